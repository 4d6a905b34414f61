"""Log-probs of vLLM's samplers: those of ``log_softmax`` under samebits.

The V1 runner computes all of a row, the V2 runner those of given tokens. ``processed_logprobs`` are those of
:func:`samebits.engines.logprobs.processed`: Triton's kernels divide and cut otherwise than PyTorch, and V2 of
vLLM 0.26 would write ``logits / T`` back in the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample import gumbel, logprob, prompt_logprob, states
from vllm.v1.worker.gpu.sample import sampler as sampler_v2

from samebits.engines.hooks import Hooks
from samebits.engines.logprobs import all_logprobs, divided, keep_top
from samebits.ops.logp import gather_logp

__all__ = ["install", "install_processed"]

_IMPORTERS = gumbel, logprob, prompt_logprob, rejection_sampler, sampler_v2, states, topk_topp_sampler
"""Modules that define the functions, or import them by name."""


def install(hooks: Hooks) -> None:
    """Replace what computes log-probs."""
    hooks.replace(sampler.Sampler, "compute_logprobs", staticmethod(all_logprobs), "logits")
    _replace_everywhere(hooks, logprob.compute_token_logprobs, gather_logp, "logits", "token_ids")


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
