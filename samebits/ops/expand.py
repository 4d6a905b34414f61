"""Broadcasting whose gradient has a contract: ``Tensor.expand``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, same_shape
from samebits.ops._autograd import without_modes
from samebits.ops._operator import Operator
from samebits.ops._rows import backend, rounded


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of `x`, broadcast to `shape` as by :meth:`torch.Tensor.expand`.

    The gradient sums over the expanded dimensions, in float32 with one rounding at the end. An expanded last
    dimension is summed as a row. The others are summed as one chain in row-major order. So the gradient of a
    vector that was broadcast over tokens is a chain over tokens, in which zeros change nothing.
    """
    if same_shape(shape, x.shape) or not (x.requires_grad and torch.is_grad_enabled()):
        return x.expand(tuple(shape))
    chosen_backend(x.device.type, "expand")
    out: Tensor = _Expand.apply(x, tuple(shape))  # type: ignore[no-untyped-call]
    return out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.expand(shape)

    @staticmethod
    @without_modes
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_broadcast(grad, ctx.shape), None


def sum_to(grad: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The sum in `dtype`, by default that of `grad`."""
    dtype = dtype or grad.dtype
    sizes = (1,) * (grad.ndim - len(shape)) + tuple(shape)
    summed = [d for d in range(grad.ndim) if sizes[d] == 1 and grad.shape[d] != 1]
    if not summed:
        same = grad.reshape(tuple(shape))
        if dtype != grad.dtype:
            return rounded(same, dtype).contiguous()
        return same.clone(memory_format=torch.contiguous_format)
    total = grad
    if summed[-1:] == [grad.ndim - 1]:
        of_rows = dtype if len(summed) == 1 else torch.float32
        # In the order of memory, rows need no copy: each is by itself.
        order = sorted(range(grad.ndim - 1), key=grad.stride, reverse=True)
        turned = grad.permute(*order, grad.ndim - 1)
        total = backend(grad).row_sum(
            turned.reshape(math.prod(grad.shape[:-1]), grad.shape[-1]), False, of_rows
        )
        total = total.view(*turned.shape[:-1], 1).permute(*(order.index(d) for d in range(grad.ndim - 1)), -1)
        del summed[-1]
    if summed:
        kept = [d for d in range(grad.ndim) if d not in summed]
        tokens = total.permute(*summed, *kept).flatten(0, len(summed) - 1)
        total = backend(grad).column_sum(tokens if kept else tokens[:, None], dtype)
    return total.reshape(tuple(shape)).contiguous()


def _fake(grad: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    return grad.new_empty(tuple(shape), dtype=dtype)


sum_over_broadcast = Operator(
    "sum_to(Tensor grad, SymInt[] shape, ScalarType? dtype=None) -> Tensor", cpu=sum_to, fake=_fake
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *others = inputs
    ctx.shape, ctx.dtype, ctx.others = x.shape, x.dtype, len(others)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return expand(grad, ctx.shape).to(ctx.dtype), *(None,) * ctx.others


sum_over_broadcast.register_autograd(_backward, setup_context=_setup_context)
