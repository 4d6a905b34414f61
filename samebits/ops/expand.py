"""Broadcasting whose gradient has a contract: ``Tensor.expand``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.ops._library import library
from samebits.ops.reduce import reduce
from samebits.ops.rows import backend

library.define("column_sum(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` broadcast to `shape`, as :meth:`torch.Tensor.expand`: a view.

    Its gradient sums over the dimensions that were expanded. Over those at the end it is a row's sum, over the
    others one chain in row-major order; all in float32, with one rounding at the end. So the gradient of a
    vector that was broadcast over tokens is a chain over tokens, in which zero gradients change nothing.
    """
    out: Tensor = _Expand.apply(x, tuple(shape))  # type: ignore[no-untyped-call]
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_to(grad, ctx.shape), None


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of a tensor of `shape` that was broadcast."""
    own = (1,) * (grad.ndim - len(shape)) + tuple(shape)
    summed = [d for d in range(grad.ndim) if own[d] == 1 and grad.shape[d] != 1]
    last = [-1, *(d for d in range(grad.ndim) if own[d] != 1)][-1]
    over_rows = [d for d in summed if d > last]
    over_columns = [d for d in summed if d < last]
    total = grad
    if over_rows:
        total = reduce("sum", total, over_rows, True, torch.float32 if over_columns else grad.dtype)
    if over_columns:
        kept = [d for d in range(grad.ndim) if d not in over_columns]
        columns = total.permute(*over_columns, *kept).reshape(
            math.prod([grad.shape[d] for d in over_columns]), -1
        )
        total = torch.ops.samebits.column_sum(columns, grad.dtype)
    return total.reshape(tuple(shape))


def _forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    return backend(x).column_sum(x, dtype)  # type: ignore[no-any-return]


def _fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.to(ctx.dtype).expand(ctx.shape), None


for kind in ("CPU", "CUDA"):
    library.impl("column_sum", _forward, kind)
torch.library.register_fake("samebits::column_sum", _fake, lib=library)
torch.library.register_autograd("samebits::column_sum", _backward, setup_context=_setup_context, lib=library)
