"""Attention on CUDA tensors, as :mod:`samebits.backends.attention` describes it.

Hopper's own kernels take what they can, the universal ones the rest. Bits do not tell which it was.
"""

from __future__ import annotations

from torch import Tensor

from samebits.backends.attention import Attention
from samebits.backends.cuda.attention import (
    backward_sm90,
    latent_sm90,
    sm90,
    universal,
    universal_backward,
)

__all__ = ["backward", "checks_offsets", "forward"]


def forward(x: Attention, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`samebits.backends.attention`."""
    if out is not None and out.data_ptr() % 16:
        out = None  # kernels write 16 bytes at a time
    plan = latent_sm90.plan(x) or sm90.plan(x)
    return universal.forward(x, out) if plan is None else plan.run(x, out)


def checks_offsets(x: Attention) -> bool:
    """See :mod:`samebits.backends.attention`."""
    return x.block_table is not None and (latent_sm90.plan(x) or sm90.plan(x)) is not None


def backward(
    x: Attention, grad: Tensor, out: Tensor, lse2: Tensor, *, grad_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.attention`."""
    if backward_sm90.supports(x) and not grad_mask:
        return backward_sm90.backward(x, grad, out, lse2)
    return universal_backward.backward(x, grad, out, lse2, grad_mask=grad_mask)
