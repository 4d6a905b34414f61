"""vLLM's own layers with the rounding points of ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers import (
    activation,
    layernorm,
    linear,
    logits_processor,
    vocab_parallel_embedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from samebits.engines.hooks import Hooks
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.gated import gated
from samebits.ops.linear import linear as product
from samebits.ops.rotary import rotary

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Replace what the layers compute."""
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        hooks.replace(method, "apply", _apply, "self", "layer", "x", "bias")
        # On a CPU it would pack weights for kernels that are not called.
        hooks.replace(method, "process_weights_after_loading", _keep_weights, "self", "layer")
    for layer, forward, parameters in (
        (layernorm.RMSNorm, _rms_norm, ("self", "x", "residual")),
        (layernorm.GemmaRMSNorm, _gemma_rms_norm, ("self", "x", "residual")),
        (activation.SiluAndMul, _silu_and_mul, ("x",)),
        (activation.GeluAndMul, _gelu_and_mul, ("self", "x")),
        (RotaryEmbedding, _rotary, ("self", "positions", "query", "key")),
    ):
        hooks.expect(layer, "forward_native", *parameters)
        hooks.replace(layer, "forward", forward, "self")  # which would call a form for the platform
    logits = logits_processor.LogitsProcessor
    hooks.replace(logits, "forward", _logits(logits.forward), "self", "lm_head", "hidden_states")


def _apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return product(x, layer.weight, bias)


def _keep_weights(self: Any, layer: nn.Module) -> None:
    pass


def _rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    weight = self.weight.data if self.has_weight else None
    return add_rms_norm(x, residual, weight, self.variance_epsilon)


def _gemma_rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon, rounding="once", offset=1.0)


def _silu_and_mul(self: Any, x: Tensor) -> Tensor:
    return gated(x, activation="silu")


def _gelu_and_mul(self: Any, x: Tensor) -> Tensor:
    return gated(x, activation="gelu_tanh" if self.approximate == "tanh" else "gelu")


def _rotary(self: Any, positions: Tensor, query: Any, key: Any = None) -> tuple[Tensor | None, ...]:
    cos, sin = self.cos_sin_cache.chunk(2, -1)  # of the table that loading.py has put there
    q, k = query.view(len(query), -1, self.head_size), key
    if key is not None:
        k = key.view(len(key), -1, self.head_size)
    layout: Any = "halves" if self.is_neox_style else "pairs"
    turned = rotary(q, k, cos, sin, positions=positions, rotary_dim=self.rotary_dim, layout=layout)
    return tuple(t if t is None else t.view_as(x) for t, x in zip(turned, (query, key), strict=True))


def _logits(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, and the division of Granite's logits, which vLLM multiplies by a rounded inverse."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = own(self, *args, **kwargs)
        divisor = getattr(self, "samebits_divisor", None)
        return logits if divisor is None or logits is None else logits / divisor

    forward.__wrapped__ = own  # type: ignore[attr-defined]
    return forward
