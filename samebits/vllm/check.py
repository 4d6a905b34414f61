"""Proof inside a training job: are the engine's log-probs the trainer's, bit for bit?

::

    outputs = llm.generate(prompts, SamplingParams(logprobs=0, ...))
    parity = samebits.vllm.check.replayed(model, outputs)  # a transformers model with the same weights
    assert parity, str(parity)

or, of log-probs that both have anyway: :func:`ratios` in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from samebits.engines.parity import Parity, Sample, compare, ratios, replay

__all__ = ["Parity", "Sample", "experts", "ratios", "replayed", "samples"]


def samples(outputs: Sequence[Any]) -> list[Sample]:
    """What vLLM's ``RequestOutput`` objects hold. They must have been asked for ``logprobs=0`` or more."""
    found = []
    for output in outputs:
        prompt = [*output.prompt_token_ids]
        of_prompt = [
            at[token].logprob for at, token in zip(output.prompt_logprobs or (), prompt, strict=False) if at
        ]
        for completion in output.outputs:
            if completion.logprobs is None:
                raise ValueError(
                    "samebits.vllm.check: outputs: expected log-probs: SamplingParams(logprobs=0)"
                )
            tokens = [*completion.token_ids]
            logprobs = [at[token].logprob for at, token in zip(completion.logprobs, tokens, strict=True)]
            found.append(Sample(prompt, tokens, logprobs, of_prompt))
    return found


def experts(outputs: Sequence[Any]) -> list[Tensor]:
    """Which experts vLLM chose for each sequence's tokens, for :func:`samebits.routing.replay`.

    The engine must have been asked for them: ``enable_return_routed_experts=True``.

    Returns:
        ``[prompt + sampled tokens, layers, k]``, int64, for each completion. Tokens that vLLM did not compute
        have -1: the last one that it sampled.
    """
    found = []
    for output in outputs:
        for completion in output.outputs:
            if completion.routed_experts is None:
                raise ValueError(
                    "samebits.vllm.check: outputs: expected routed_experts: give the engine"
                    " enable_return_routed_experts=True"
                )
            known = torch.as_tensor(completion.routed_experts.astype("int64"))
            tokens = len(output.prompt_token_ids) + len(completion.token_ids)
            if not tokens - 1 <= len(known) <= tokens:
                raise ValueError(
                    f"samebits.vllm.check: outputs: expected the experts of {tokens - 1} tokens, got those of"
                    f" {len(known)}"
                )
            left = tokens - len(known)
            found.append(torch.cat([known, known.new_full((left, *known.shape[1:]), -1)]))
    return found


def replayed(model: nn.Module, outputs: Sequence[Any], **distribution: Any) -> Parity:
    """Replay vLLM's outputs in a ``transformers`` model of the same weights, and compare bits.

    Args:
        model: on any device; on the engine's kind of device for equal bits of elementwise functions.
        outputs: of ``LLM.generate``.
        distribution: for ``processed_logprobs`` the ``temperature``, ``top_k`` and ``top_p`` of all requests.
            Tokens of prompts are not compared then: vLLM's log-probs of them are never processed.
    """
    found = samples(outputs)
    if distribution:
        found = [replace(s, prompt_logprobs=()) for s in found]
    return compare(found, replay(model, [[*s.prompt, *s.tokens] for s in found], **distribution))
