"""Sums and means over dimensions: ``torch.sum`` and ``torch.mean``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends.replay import viewed
from samebits.ops._operator import Operator, bypasses_dispatcher
from samebits.ops._rows import as_rows, backend, check_rows
from samebits.ops.expand import expand


def sum(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """``out[...] = sum over i of x[..., i]``, as :func:`torch.sum`.

    The summed elements, in row-major order, are a row of ``docs/contract.md``, "Row reductions": blocks of
    128, in float32, with one rounding to the dtype of ``x`` at the end.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: one or several dimensions; all of them by default.
        keepdim: keep them, of size 1.

    The gradient is that of the sum, expanded.

    Raises:
        TypeError: ``x`` is not a dense tensor of such a dtype.
        IndexError: there is no such dimension, or it is named twice.
    """
    return _reduce("sum", x, dim, keepdim)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """``out[...] = (sum over i of x[..., i]) / n``, as :func:`torch.mean`.

    The division is in float32. All else is as in :func:`sum`. The gradient is the mean's gradient times the
    float32 nearest to 1 / n, computed in float32, rounded once to its dtype, and expanded.
    """
    return _reduce("mean", x, dim, keepdim)


FEW = 16  # terms that a GPU adds where they are: as rows they would have to be copied


def _reduce(op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    bypass = check_rows(op, x)
    if op == "sum" and x.is_cuda and (few := _few_terms(x, dim)):
        before, after = x.shape[:few], x.shape[few + 1 :]
        slots = viewed(x, Tensor.reshape, (math.prod(before), x.shape[few], math.prod(after)))
        total: Tensor = sum_of_slots(slots, bypass=bypass)
        return viewed(total, Tensor.reshape, (*before, *(1,) * keepdim, *after))
    rows, shape = as_rows(op, x, dim, keepdim)
    out: Tensor = _operator(rows, op == "mean", bypass=bypass)
    return out if len(shape) == 1 else viewed(out, Tensor.reshape, shape)


def _few_terms(x: Tensor, dim: Any) -> int:
    """The dimension, if it is one of few terms, not the first or last, that may be summed by itself."""
    if isinstance(dim, Sequence) and len(dim) == 1:
        (dim,) = dim
    if type(dim) is not int or not -x.ndim <= dim < x.ndim or x.numel() == 0:
        return 0
    dim = dim % x.ndim
    return dim if dim < x.ndim - 1 and 0 < x.shape[dim] <= FEW else 0


def _slot_sum(x: Tensor) -> Tensor:
    return backend(x).slot_sum(x)  # type: ignore[no-any-return]


def _fake_slots(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]))


sum_of_slots = Operator("slot_sum(Tensor x) -> Tensor", cpu=_slot_sum, fake=_fake_slots)
"""``x[a, n, b].sum(1)``, where `n` is small."""


def _keep_slots(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.slots = inputs[0].shape[1]


def _backward_slots(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    return expand(grad.unsqueeze(1), (grad.shape[0], ctx.slots, grad.shape[1]))


sum_of_slots.register_autograd(_backward_slots, setup_context=_keep_slots)


def _forward(x: Tensor, mean: bool) -> Tensor:
    return backend(x).row_sum(x, mean, x.dtype)  # type: ignore[no-any-return]


def _fake(x: Tensor, mean: bool) -> Tensor:
    return x.new_empty(x.shape[0])


_operator = Operator("row_sum(Tensor x, bool mean) -> Tensor", cpu=_forward, fake=_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.mean = inputs
    ctx.shape = x.shape


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.mean:
        divided = _share if bypasses_dispatcher([grad]) else _divided  # a trace must see one operator
        grad = divided(grad, ctx.shape[1])
    return expand(grad.unsqueeze(1), ctx.shape), None


_operator.register_autograd(_backward, setup_context=_setup_context, unless="mean")


def _share(grad: Tensor, n: int) -> Tensor:
    # A number is multiplied, not divided by, because PyTorch multiplies by the inverse on a GPU. It computes
    # in float32, and rounds once.
    return grad * (1 / max(n, 1))


def _fake_share(grad: Tensor, n: int) -> Tensor:
    return torch.empty_like(grad)


# An operator, because torch.compile would compute 1 / n on the GPU, with an approximate division.
_divided = Operator("divided(Tensor grad, SymInt n) -> Tensor", cpu=_share, fake=_fake_share)


def _keep_n(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.n = inputs[1]


def _backward_share(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
    return _divided(grad, ctx.n), None


_divided.register_autograd(_backward_share, setup_context=_keep_n)
