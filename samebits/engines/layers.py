"""Layers with the rounding points of ``transformers``' eager code, under ``samebits.batch_invariant``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["gated"]


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of ``[..., 2 n]``: gate and up side by side; `act`'s result is rounded.

    Args:
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
    """
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
