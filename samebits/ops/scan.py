"""Sums and products of all that comes before: ``torch.cumsum`` and ``torch.cumprod``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops._rows import rounded
from samebits.remedies import see

__all__ = ["cumprod", "cumsum"]


def cumsum(x: Tensor, dim: int) -> Tensor:
    """``out[..., i] = sum over j <= i of x[..., j]``, as :func:`torch.cumsum`.

    In float32, by doubling: every entry adds the one that is 1, 2, 4, … before it (``docs/contract.md``, "Row
    reductions"), with one rounding to the dtype of ``x`` at the end. So an entry does not depend on what
    comes after it. The gradient is the same sum from the other end.
    """
    out: Tensor = _scan(x, dim % max(x.ndim, 1), False, False)
    return out


def cumprod(x: Tensor, dim: int) -> Tensor:
    """``out[..., i] = product over j <= i of x[..., j]``, in the order of :func:`cumsum`. No gradients."""
    out: Tensor = _scan(x, dim % max(x.ndim, 1), True, False)
    return out


def _forward(x: Tensor, dim: int, product: bool, reverse: bool) -> Tensor:
    if x.numel() == 0 or x.ndim == 0:
        return x.clone()
    total = x.to(torch.float32)
    total, n, step = total.flip(dim) if reverse else total, x.shape[dim], 1
    while step < n:
        before, here = total.narrow(dim, 0, n - step), total.narrow(dim, step, n - step)
        ahead = torch.mul(here, before) if product else torch.add(here, before)
        total = torch.cat([total.narrow(dim, 0, step), ahead], dim)
        step *= 2
    return rounded(total.flip(dim) if reverse else total, x.dtype).contiguous()


def _fake(x: Tensor, dim: int, product: bool, reverse: bool) -> Tensor:
    return x.new_empty(x.shape)


_scan = Operator("scan(Tensor x, int dim, bool product, bool reverse) -> Tensor", cpu=_forward, fake=_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.product, ctx.reverse = inputs[1:]


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None, None]:
    if ctx.product:
        raise NotImplementedError("samebits: gradients of cumprod are not implemented" + see("derivatives"))
    return _scan(grad, ctx.dim, False, not ctx.reverse), None, None, None


_scan.register_autograd(_backward, setup_context=_setup_context)
