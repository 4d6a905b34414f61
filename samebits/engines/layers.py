"""What an engine's layers compute, with the rounding points of ``transformers``: methods for their classes.

vLLM and SGLang, which has its layers from vLLM, call them alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.gated import gated
from samebits.ops.linear import linear
from samebits.ops.rotary import rotary

__all__ = ["apply", "gelu_and_mul", "gemma_rms_norm", "keep_weights", "positions", "rms_norm", "silu_and_mul"]


def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of a linear layer or a head.

    A layer may have ``samebits_contract``.
    """
    return linear(x, layer.weight, bias, contract=vars(layer).get("samebits_contract"))


def keep_weights(self: Any, layer: nn.Module) -> None:
    """Nothing: an engine would pack weights for kernels that are not called."""


def rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Llama's norm, with the sum before it where there is a residual.

    A layer may have ``samebits_rounding = "once"``, as GPT-OSS rounds.
    """
    weight = self.weight.data if self.has_weight else None
    rounding: Any = getattr(self, "samebits_rounding", "twice")
    return add_rms_norm(x, residual, weight, self.variance_epsilon, rounding=rounding)


def gemma_rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Gemma's norm, which rounds once, and whose weight counts from -1."""
    return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon, rounding="once", offset=1.0)


def silu_and_mul(self: Any, x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate, up]``."""
    return gated(x, activation="silu")


def gelu_and_mul(self: Any, x: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``[gate, up]``."""
    return gated(x, activation="gelu_tanh" if self.approximate == "tanh" else "gelu")


def positions(self: Any, positions: Tensor, query: Any, key: Any = None) -> tuple[Tensor | None, ...]:
    """Rotary positions by ``cos_sin_cache``, which holds :func:`samebits.engines.frequencies.table`."""
    cos, sin = self.cos_sin_cache.chunk(2, -1)
    q, k = query.view(len(query), -1, self.head_size), key
    if key is not None:
        k = key.view(len(key), -1, self.head_size)
    layout: Any = "halves" if self.is_neox_style else "pairs"
    turned = rotary(q, k, cos, sin, positions=positions, rotary_dim=self.rotary_dim, layout=layout)
    return tuple(t if t is None else t.view_as(x) for t, x in zip(turned, (query, key), strict=True))
