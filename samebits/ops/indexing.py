"""Sums of rows and elements that an index sends to the same place: chains in the order of the index.

:data:`index_sum` is behind all of them, and behind the gradients of what picks rows by an index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops._rows import backend, rounded

__all__ = ["gather", "index_add", "index_sum", "pick", "row_numbers", "scatter_add", "take"]

_FEW = 32  # entries along a dimension that are scattered one after the other


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``. The gradient of a row of ``x`` is one chain over its places in ``index``, in order.

    It has a float32 accumulator and is rounded once. Places with zero gradients change no bit of it.

    Args:
        x: ``[n, ...]``; bfloat16, float16 or float32.
        index: int64 or int32, each within [0, n).
    """
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    out: Tensor = _take(rows, index.to(torch.int64).reshape(-1))
    return out.reshape(*index.shape, *x.shape[1:])


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1) -> Tensor:
    """``x`` with ``alpha * source`` added to the slices that ``index`` names, as :func:`torch.index_add`.

    A slice of the result is one chain over that of ``x`` and its places in ``index``, in order, in float32
    with one rounding at the end. ``alpha * source`` is rounded to float32. The gradient of ``source`` is that
    of the result at its places, times ``alpha``.

    Raises:
        IndexError: on a CPU, an index is not within [0, n). On a GPU it ends in a device-side assert.
    """
    if x.ndim == 0:
        return index_add(x[None], 0, index.reshape(-1), source.reshape(-1), alpha)[0]
    count, dtype = x.shape[dim], x.dtype
    if alpha != 1:
        x, source = x.to(torch.float32), source.to(torch.float32) * alpha
    moved, added = x.movedim(dim, 0), (source if source.ndim else source[None]).movedim(dim, 0)
    columns = math.prod(moved.shape[1:])
    rows = torch.cat([moved.reshape(count, columns), added.reshape(added.shape[0], columns)])
    places = torch.cat([torch.arange(count, device=index.device), index.reshape(-1).to(torch.int64)])
    out: Tensor = index_sum(rows, places, count)
    return out.reshape(moved.shape).movedim(0, dim).contiguous().to(dtype)


def row_numbers(shape: Sequence[int], indices: Sequence[Tensor]) -> Tensor:
    """The rows that integers for the dimensions of `shape` name, when these are flattened.

    Where one is not within [-size, size), the result is no row: the number of rows or more, or below 0.
    """
    total: Any = 0
    inside: Any = None
    for size, index in zip(shape, indices, strict=True):
        wide = index.to(torch.int64)
        wide = torch.where(wide < 0, wide + size, wide)
        total = total * size + wide
        if len(indices) > 1:  # out of range in one dimension, they might name another row
            here = (wide >= 0) & (wide < size)
            inside = here if inside is None else inside & here
    places: Tensor = total if inside is None else torch.where(inside, total, math.prod(shape))
    return places


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """As :func:`torch.gather`. The gradient is a chain for every element, in the order of the index."""
    out: Tensor = _gather(x, dim % max(x.ndim, 1), index)
    return out


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """As :func:`torch.scatter_add`: for every element a chain from that of ``x``, in the index's order."""
    if index.numel() == 0:
        return x.scatter_add(dim, index, source)  # nothing is added
    dim = dim % max(x.ndim, 1)
    for d, size in enumerate(index.shape):
        source = source.narrow(d, 0, size)
    out: Tensor = _scatter_sum(x, dim, index, source)
    return out


def pick(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """As :func:`gather` of an index that has no element twice: with the same gradient."""
    out: Tensor = _pick(x, dim % max(x.ndim, 1), index)
    return out


def _check_range(index: Tensor, count: int) -> None:
    outside = (index < 0) | (index >= count)
    if index.is_cuda:
        torch._assert_async(~outside.any(), "samebits: an index is out of range")  # waits for nothing
    elif outside.any():
        first = int(index[outside][0])
        raise IndexError(f"index out of range: it names row {first} of {count}")


def _index_sum(rows: Tensor, places: Tensor, count: int) -> Tensor:
    _check_range(places, count)
    return backend(rows).embedding_backward(rows, places, count, -1)  # type: ignore[no-any-return]


def _fake_index_sum(rows: Tensor, places: Tensor, count: int) -> Tensor:
    return rows.new_empty((count, rows.shape[1]))


# out[c] = the chain from +0 over the rows whose place is c, in order.
index_sum = Operator(
    "index_sum(Tensor rows, Tensor places, SymInt count) -> Tensor", cpu=_index_sum, fake=_fake_index_sum
)


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _index_sum_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None]:
    return _take(grad, saved[0]), None, None


index_sum.register_autograd(_index_sum_backward, setup_context=_keep_places)


def _forward_take(rows: Tensor, places: Tensor) -> Tensor:
    return rows.index_select(0, places)


def _fake_take(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


_take = Operator("take(Tensor rows, Tensor places) -> Tensor", cpu=_forward_take, fake=_fake_take)


def _keep_count(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1])


def _take_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
    return index_sum(grad, saved[0], ctx.count), None


_take.register_autograd(_take_backward, setup_context=_keep_count)


def _forward_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.gather(dim, index)


def _fake_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.new_empty(index.shape)


_gather = Operator(
    "gather(Tensor x, int dim, Tensor index) -> Tensor", cpu=_forward_gather, fake=_fake_gather
)


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, index = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(index)


def _pick_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None]:
    # Chains of one term from +0. A scatter changes NaN on a CPU; an addition on a GPU makes it canonical.
    if grad.is_cuda:
        return grad.new_zeros(ctx.shape).scatter(ctx.dim, saved[0], grad + 0.0), None, None
    wide = grad.new_zeros(ctx.shape, dtype=torch.float32).scatter(ctx.dim, saved[0], grad.to(torch.float32))
    return rounded(wide + 0.0, grad.dtype), None, None


def _gather_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = saved
    if index.ndim == 0 or index.shape[ctx.dim] == 1:  # no element twice
        return _pick_backward(ctx, saved, grad)
    return _scatter_sum(grad.new_zeros(ctx.shape), ctx.dim, index, grad), None, None


_gather.register_autograd(_gather_backward, setup_context=_keep_shape)


_pick = Operator("pick(Tensor x, int dim, Tensor index) -> Tensor", cpu=_forward_gather, fake=_fake_gather)
_pick.register_autograd(_pick_backward, setup_context=_keep_shape)


def _forward_scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.ndim == 0 or index.numel() == 0:
        return x.scatter_add(dim, index, source)
    if index.shape[dim] <= _FEW:
        total = x.contiguous().to(torch.float32) + 0.0
        for j in range(index.shape[dim]):  # no element twice: PyTorch's order does not matter
            part = source.narrow(dim, j, 1).to(torch.float32)
            total.scatter_add_(dim, index.narrow(dim, j, 1), part)
        return rounded(total, x.dtype)
    _check_range(index, x.shape[dim])
    places: Any = 0
    for d, size in enumerate(x.shape):
        along = torch.arange(index.shape[d], device=index.device).view(-1, *[1] * (x.ndim - 1 - d))
        places = places * size + (index if d == dim else along)
    own = torch.arange(x.numel(), device=index.device)
    rows = torch.cat([x.reshape(-1), source.reshape(-1)])[:, None]
    places = torch.cat([own, places.reshape(-1)])
    return backend(rows).embedding_backward(rows, places, x.numel(), -1).reshape(x.shape)  # type: ignore[no-any-return]


def _fake_scatter(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_scatter_sum = Operator(
    "scatter_sum(Tensor x, int dim, Tensor index, Tensor source) -> Tensor",
    cpu=_forward_scatter,
    fake=_fake_scatter,
)


def _keep_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(inputs[2])


def _scatter_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Any, ...]:
    of_source = _gather(grad, ctx.dim, saved[0]) if ctx.needs_input_grad[3] else None
    return grad, None, None, of_source


_scatter_sum.register_autograd(_scatter_backward, setup_context=_keep_index)
