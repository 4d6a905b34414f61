"""Proof inside a training job: are the engine's log-probs the trainer's, bit for bit?

::

    outputs = llm.generate(input_ids=prompts, return_logprob=True, ...)
    parity = samebits.sglang.check.replayed(model, prompts, outputs)
    assert parity, str(parity)

or, of log-probs that both have anyway: :func:`ratios` in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from samebits.engines.parity import Parity, Sample, compare, ratios, replay

__all__ = ["Parity", "Sample", "ratios", "replayed", "samples"]


def samples(prompts: Sequence[Sequence[int]], outputs: Sequence[dict[str, Any]]) -> list[Sample]:
    """What SGLang's outputs hold. They must have been asked for with ``return_logprob=True``.

    Log-probs of prompts count where ``logprob_start_len=0`` asked for all of them.

    Args:
        prompts: token ids. With ``n`` samples of a prompt, each of them `n` times.
    """
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        info = output["meta_info"]
        if "output_token_logprobs" not in info:
            raise ValueError("samebits.sglang.check: outputs: expected log-probs: return_logprob=True")
        of_prompt = [logprob for logprob, *_ in info["input_token_logprobs"][1:]]
        sampled = info["output_token_logprobs"]
        found.append(
            Sample(
                [*prompt],
                [token for _, token, *_ in sampled],
                [logprob for logprob, *_ in sampled],
                of_prompt if len(of_prompt) == len(prompt) - 1 else (),
            )
        )
    return found


def replayed(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[dict[str, Any]],
    temperature: float = 1.0,
) -> Parity:
    """Replay SGLang's outputs in a ``transformers`` model of the same weights, and compare bits.

    Args:
        model: on any device; on the engine's kind of device for equal bits of elementwise functions.
        temperature: of all requests. At another than 1 tokens of prompts are not compared: SGLang's
            log-probs of them have none.
    """
    found = samples(prompts, outputs)
    if temperature != 1:
        found = [Sample(s.prompt, s.tokens, s.logprobs) for s in found]
    sequences = [[*s.prompt, *s.tokens] for s in found]
    return compare(found, replay(model, sequences, temperature=temperature))
