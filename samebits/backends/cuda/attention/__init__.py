"""Attention on CUDA tensors, as :mod:`samebits.backends.attention` describes it.

Hopper's own kernels take what they can, the universal ones the rest. Bits do not tell which it was.
"""

from __future__ import annotations

from torch import Tensor

from samebits.backends.attention import Attention
from samebits.backends.cuda.attention import sm90, universal
from samebits.backends.cuda.attention.universal_backward import backward

__all__ = ["backward", "forward"]


def forward(x: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`samebits.backends.attention`."""
    return sm90.forward(x) if sm90.supports(x) else universal.forward(x)
