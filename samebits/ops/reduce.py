"""Sums and means over dimensions: ``torch.sum`` and ``torch.mean``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends.replay import viewed
from samebits.ops._operator import Operator
from samebits.ops._rows import as_rows, backend, check_rows


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


def _reduce(op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    bypass = check_rows(op, x)
    rows, shape = as_rows(op, x, dim, keepdim)
    out: Tensor = _operator(rows, op == "mean", bypass=bypass)
    return out if len(shape) == 1 else viewed(out, Tensor.reshape, shape)


def _forward(x: Tensor, mean: bool) -> Tensor:
    return backend(x).row_sum(x, mean, x.dtype)  # type: ignore[no-any-return]


def _fake(x: Tensor, mean: bool) -> Tensor:
    return x.new_empty(x.shape[0])


_operator = Operator("row_sum(Tensor x, bool mean) -> Tensor", cpu=_forward, fake=_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.mean = inputs
    ctx.shape, ctx.dtype = x.shape, x.dtype


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.mean:
        grad = _divided(grad, ctx.shape[1])
    return grad.to(ctx.dtype).unsqueeze(1).expand(ctx.shape), None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _share(grad: Tensor, n: int) -> Tensor:
    # A number is multiplied, not divided by, because PyTorch multiplies by the inverse on a GPU.
    return grad.to(torch.float32) * (1 / max(n, 1))


def _fake_share(grad: Tensor, n: int) -> Tensor:
    return torch.empty_like(grad, dtype=torch.float32)


# An operator, because torch.compile would compute 1 / n on the GPU, with an approximate division.
_divided = Operator("divided(Tensor grad, SymInt n) -> Tensor", cpu=_share, fake=_fake_share)


def _keep_n(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype, ctx.n = inputs[0].dtype, inputs[1]


def _backward_share(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
    return _divided(grad, ctx.n).to(ctx.dtype), None


_divided.register_autograd(_backward_share, setup_context=_keep_n)
