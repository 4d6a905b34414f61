"""vLLM's own layers with the rounding points of ``transformers``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.layers import (
    activation,
    layernorm,
    linear,
    logits_processor,
    vocab_parallel_embedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from samebits.engines import layers
from samebits.engines.hooks import Hooks
from samebits.ops.linear import linear as product

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Replace what the layers compute."""
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        hooks.replace(method, "apply", layers.apply, "self", "layer", "x", "bias")
        # On a CPU it would pack weights for kernels that are not called.
        hooks.replace(method, "process_weights_after_loading", layers.keep_weights, "self", "layer")
    for layer, forward, parameters in (
        (layernorm.RMSNorm, layers.rms_norm, ("self", "x", "residual")),
        (layernorm.GemmaRMSNorm, layers.gemma_rms_norm, ("self", "x", "residual")),
        (activation.SiluAndMul, layers.silu_and_mul, ("x",)),
        (activation.GeluAndMul, layers.gelu_and_mul, ("self", "x")),
        (RotaryEmbedding, layers.positions, ("self", "positions", "query", "key")),
    ):
        hooks.expect(layer, "forward_native", *parameters)
        hooks.replace(layer, "forward", forward, "self")  # which would call a form for the platform
    logits = logits_processor.LogitsProcessor
    hooks.replace(logits, "forward", _logits(logits.forward), "self", "lm_head", "hidden_states")
    head = "self", "lm_head", "hidden_states", "embedding_bias"
    hooks.replace(logits, "_apply_head", _head(logits._apply_head), *head)


def _head(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, and a head in float32 (``head_dtype``) that leaves its operands in 16 bits, as a trainer's.

    vLLM would give CPUs operands in float32, whose sums have another order. Sums are never cut into segments
    here: log-probs are those of :func:`samebits.linear_logp`, and of its form for split vocabularies.
    """

    @functools.wraps(own)
    def _apply_head(self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        if self.head_dtype in (None, hidden_states.dtype):
            return own(self, lm_head, hidden_states, embedding_bias)
        return product(hidden_states, lm_head.weight, embedding_bias, out_dtype=self.head_dtype)

    return _apply_head


def _logits(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, and the division of Granite's logits, which vLLM multiplies by a rounded inverse."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = own(self, *args, **kwargs)
        layer = getattr(self, "base_layer", self)  # where adapters have wrapped it
        divisor = getattr(layer, "samebits_divisor", None)
        return logits if divisor is None or logits is None else logits / divisor

    forward.__wrapped__ = own  # type: ignore[attr-defined]
    return forward
