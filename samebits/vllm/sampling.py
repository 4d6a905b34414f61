"""Log-probs of vLLM's samplers: those of ``log_softmax`` under samebits.

Raw log-probs are the model's. A grammar cuts logits in place before vLLM computes them, so what the model
gave is kept beside it.

The V1 runner computes all of a row, the V2 runner those of given tokens. ``processed_logprobs`` are those of
:func:`samebits.engines.logprobs.processed`: Triton's kernels divide and cut otherwise than PyTorch, and V2 of
vLLM 0.26 would write ``logits / T`` back in the dtype of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.sample import gumbel, logprob, prompt_logprob, states
from vllm.v1.worker.gpu.sample import sampler as sampler_v2
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from samebits.engines.hooks import Hooks
from samebits.engines.logprobs import all_logprobs, divided, keep_top
from samebits.ops.logp import gather_logp

__all__ = ["install", "install_processed", "install_raw"]

_IMPORTERS = gumbel, logprob, prompt_logprob, rejection_sampler, sampler_v2, states, topk_topp_sampler
"""Modules that define the functions, or import them by name."""


def install(hooks: Hooks) -> None:
    """Replace what computes log-probs."""
    hooks.replace(sampler.Sampler, "compute_logprobs", staticmethod(_all_logprobs), "logits")
    _replace_everywhere(hooks, logprob.compute_token_logprobs, _token_logprobs, "logits", "token_ids")


def install_raw(hooks: Hooks) -> None:
    """Keep the model's logits where a grammar cuts them, for log-probs that are not processed."""
    if hasattr(gpu_model_runner.apply_grammar_bitmask, "__wrapped__"):  # for another engine in this process
        return
    v1, v2 = gpu_model_runner.apply_grammar_bitmask, StructuredOutputsWorker.apply_grammar_bitmask
    parameters = "scheduler_output", "grammar_output", "input_batch", "logits"
    hooks.replace(gpu_model_runner, v1.__name__, _keeping(v1, 3), *parameters)
    hooks.replace(StructuredOutputsWorker, v2.__name__, _keeping(v2, 1), "self", "logits")


def _keeping(own: Callable[..., None], at: int) -> Callable[..., None]:
    """`own`, which changes the logits, its argument number `at`."""

    @functools.wraps(own)
    def apply_grammar_bitmask(*args: Any, **kwargs: Any) -> None:
        logits = kwargs["logits"] if "logits" in kwargs else args[at]
        logits.samebits_raw = logits.clone()
        own(*args, **kwargs)

    return apply_grammar_bitmask


def _raw(logits: Tensor) -> Tensor:
    return getattr(logits, "samebits_raw", logits)


def _all_logprobs(logits: Tensor) -> Tensor:
    return all_logprobs(_raw(logits))


def _token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    return gather_logp(_raw(logits), token_ids)


def install_processed(hooks: Hooks) -> None:
    """Replace what log-probs are computed from, where these are the processed ones. It is no faster."""
    if gumbel.apply_temperature is _divide:  # another engine in this process asked before
        return
    own = sampler_v2.Sampler.apply_sampling_params
    hooks.replace(sampler_v2.Sampler, "apply_sampling_params", _in_float32(own), "self", "logits")
    _replace_everywhere(hooks, topk_topp_sampler.apply_top_k_top_p, keep_top, "logits", "k", "p")
    _replace_everywhere(
        hooks, gumbel.apply_temperature, _divide, "logits", "expanded_idx_mapping", "temperature"
    )


def _replace_everywhere(hooks: Hooks, function: Callable[..., Any], new: Any, *parameters: str) -> None:
    for module in _IMPORTERS:
        if vars(module).get(function.__name__) is function:
            hooks.replace(module, function.__name__, new, *parameters)


def _divide(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    logits.copy_(divided(logits, temperature[expanded_idx_mapping]))


def _in_float32(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, which works in place, on a copy in float32."""

    def apply_sampling_params(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own(self, logits.to(torch.float32), *args, **kwargs)

    return apply_sampling_params
