"""Sums over ranks in a fixed order: a binary tree over pairs of neighbours, in float32, rounded once.

NCCL and gloo only move bytes here. Where GPUs reach each other's memory, one kernel moves and adds them:
:mod:`samebits.distributed._symmetric`. The order of the additions is the group's: ranks r and r + 1 first,
then pairs of pairs. It does not depend on the message's size, nor on how bytes are moved. A rank that owns a
subtree of a sum (see :meth:`samebits.Contract.segmented`) therefore gives the bits of one GPU that owns all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends.replay import refuse
from samebits.distributed._groups import Group, all_gather, all_to_all, name_of, ranks
from samebits.distributed._symmetric import Space, space_of
from samebits.ops._checks import SUPPORTED, shape
from samebits.ops._operator import Operator

__all__ = [
    "gather",
    "ordered_all_reduce",
    "ordered_reduce_scatter",
    "reduce_over_ranks",
    "scatter_over_ranks",
    "split",
]

_SMALL = 1 << 20
"""Up to so many bytes, all partial sums go to all ranks at once: one exchange, where more need two."""

_NAN = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


def ordered_all_reduce(x: Tensor, group: Group = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """The sum of every rank's `x`, on all ranks, in an order that is always the same.

    Values are widened to float32 and added there by a binary tree over the group's ranks, pairs of neighbours
    first: ``((x0 + x1) + (x2 + x3)) + ...``. The sum is rounded once, to `out_dtype`; a NaN is the canonical
    one. Neither the size of `x` nor the backend of ``torch.distributed`` changes the order.

    The result is the same tensor on all ranks, so its gradient is too, and the gradient of `x` is it.

    Args:
        x: ``[...]``; float32, bfloat16 or float16; of the same shape and dtype on all ranks.
        group: a process group or a ``DeviceMesh`` of one dimension, with a power of two of ranks. None: all
            ranks, or this process alone if ``torch.distributed`` is not initialized.
        out_dtype: bfloat16, float16 or float32; that of `x` by default.

    Raises:
        TypeError: a dtype is not one of these, or `group` is no group.
        ValueError: the group's size is not a power of two, or this rank is not in it.
    """
    out_dtype = _check("ordered_all_reduce", x, out_dtype)
    out: Tensor = reduce_over_ranks(x, None, name_of("ordered_all_reduce", group), out_dtype)
    return out


def ordered_reduce_scatter(
    x: Tensor, group: Group = None, *, dim: int = 0, out_dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's part of :func:`ordered_all_reduce`: of equal parts of dimension `dim` its own.

    The gradient of `x` is the gradient of all parts, gathered.

    Args:
        x: as in :func:`ordered_all_reduce`.
        group: as in :func:`ordered_all_reduce`.
        dim: the dimension that is split; the number of ranks divides its size.
        out_dtype: as in :func:`ordered_all_reduce`.

    Raises:
        TypeError, ValueError: as in :func:`ordered_all_reduce`; or the number of ranks does not divide the
            dimension.
    """
    out_dtype = _check("ordered_reduce_scatter", x, out_dtype)
    name = name_of("ordered_reduce_scatter", group)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"samebits.distributed.ordered_reduce_scatter: dim: expected a dimension of shape {shape(x)},"
            f" got {dim}"
        )
    check_divides("ordered_reduce_scatter", f"x: dimension {dim}", x.shape[dim], ranks(name)[1])
    out: Tensor = scatter_over_ranks(x, None, dim % x.ndim, name, out_dtype)
    return out


def check_divides(op: str, what: str, size: int, by: int) -> None:
    if size % by:
        raise ValueError(f"samebits.distributed.{op}: {what}: expected a multiple of {by} ranks, got {size}")


def _check(op: str, x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.dtype not in SUPPORTED:
        got = f"{x.layout} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"samebits.distributed.{op}: x: expected a dense tensor of bfloat16, float16 or float32,"
            f" got {got}"
        )
    if out_dtype is None:
        return x.dtype
    if out_dtype not in SUPPORTED:
        raise TypeError(
            f"samebits.distributed.{op}: out_dtype: expected bfloat16, float16 or float32, got {out_dtype!r}"
        )
    return out_dtype


def finished(sums: Tensor, bias: Tensor | None, dtype: torch.dtype, divisor: int = 1) -> Tensor:
    """``sums / divisor + bias``, rounded to `dtype`. It may write to `sums`."""
    if divisor > 1:
        sums = sums.div_(divisor)
    if bias is not None:
        sums = sums.add_(bias)  # widens the bias
    out = sums.to(dtype)
    as_int, nan = _NAN[dtype]
    out.view(as_int).masked_fill_(sums.isnan(), nan)
    return out


def tree(partials: Tensor) -> Tensor:
    """The float32 sum over the first dimension, pairs of neighbours first. Never a view of `partials`."""
    if partials.is_cpu:
        from samebits.backends.reference.matmul import require_subnormals

        require_subnormals()
    wide = partials.to(torch.float32, copy=len(partials) == 1)
    while len(wide) > 1:
        wide = wide[0::2] + wide[1::2]
    return wide[0]


def _space(x: Tensor, group: str) -> Space | None:
    """The memory in which one kernel adds `x` of all ranks, if they have any."""
    return space_of(group, x) if x.dtype == torch.float32 and ranks(group)[1] > 1 else None


def all_reduce(
    x: Tensor, bias: Tensor | None, group: str, out_dtype: torch.dtype, divisor: int = 1
) -> Tensor:
    """The sum over ranks, divided by a power of two, plus a bias, in `out_dtype`."""
    refuse("an exchange between ranks is no launch")
    _, size = ranks(group)
    if size == 1:
        return finished(tree(x[None]), bias, out_dtype, divisor)
    space = _space(x, group) if divisor == 1 else None
    if space is not None:
        return space.all_reduce(x, bias, out_dtype)
    rows = x.reshape(-1, x.shape[-1] if bias is not None and x.ndim else 1)
    if x.numel() * x.element_size() * (size - 1) <= _SMALL or len(rows) < size:
        return finished(tree(all_gather(rows, group)), bias, out_dtype, divisor).view(x.shape)
    step = -(-len(rows) // size)
    sizes = [min(step, max(0, len(rows) - r * step)) for r in range(size)]
    mine = finished(tree(all_to_all(rows, group, sizes)), bias, out_dtype, divisor)
    if len(mine) < step:  # all ranks send parts of the same size
        mine = torch.cat([mine, mine.new_empty(step - len(mine), rows.shape[1])])
    return all_gather(mine, group).view(-1, rows.shape[1])[: len(rows)].view(x.shape)


def _all_reduce_fake(x: Tensor, bias: Tensor | None, group: str, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


reduce_over_ranks = Operator(
    "ordered_all_reduce(Tensor x, Tensor? bias, str group, ScalarType out_dtype) -> Tensor",
    cpu=all_reduce,
    fake=_all_reduce_fake,
)
"""The sum over ranks, plus a bias that has no gradient here, rounded once."""


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _reduce_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad.to(ctx.dtype), None, None, None


reduce_over_ranks.register_autograd(_reduce_backward, setup_context=_reduce_setup)


def reduce_scatter(x: Tensor, bias: Tensor | None, dim: int, group: str, out_dtype: torch.dtype) -> Tensor:
    """This rank's part of the sum over ranks, plus a bias."""
    refuse("an exchange between ranks is no launch")
    _, size = ranks(group)
    rows = x.movedim(dim, 0)
    space = _space(x, group)
    if space is not None and rows[:1].numel() % 4 == 0:
        return space.reduce_scatter(rows, bias, out_dtype).movedim(0, dim).contiguous()
    sums = tree(all_to_all(rows, group, [len(rows) // size] * size)).movedim(0, dim)
    return finished(sums, bias, out_dtype).contiguous()


def _reduce_scatter_fake(
    x: Tensor, bias: Tensor | None, dim: int, group: str, out_dtype: torch.dtype
) -> Tensor:
    size = ranks(group)[1]
    return x.new_empty([n // size if d == dim else n for d, n in enumerate(x.shape)], dtype=out_dtype)


scatter_over_ranks = Operator(
    "ordered_reduce_scatter(Tensor x, Tensor? bias, int dim, str group, ScalarType out_dtype) -> Tensor",
    cpu=reduce_scatter,
    fake=_reduce_scatter_fake,
)
"""This rank's part of the sum over ranks, plus a bias that has no gradient here, rounded once."""


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype, ctx.dim, ctx.group = inputs[0].dtype, inputs[2], inputs[3]


def _scatter_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return gather(grad.to(ctx.dtype), ctx.dim, ctx.group, True), None, None, None, None


scatter_over_ranks.register_autograd(_scatter_backward, setup_context=_scatter_setup)


def _gather(x: Tensor, dim: int, group: str, summed: bool) -> Tensor:
    refuse("an exchange between ranks is no launch")
    parts = all_gather(x, group)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _gather_fake(x: Tensor, dim: int, group: str, summed: bool) -> Tensor:
    size = ranks(group)[1]
    return x.new_empty([n * size if d == dim else n for d, n in enumerate(x.shape)])


gather = Operator(
    "gather_over_ranks(Tensor x, int dim, str group, bool summed) -> Tensor", cpu=_gather, fake=_gather_fake
)
"""Every rank's `x`, one after the other in dimension `dim`, on all ranks.

summed: whether the ranks go on with different work. Then the gradient of `x` is a sum over them, else it is
the rank's own part of the gradient that all of them have.
"""


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.group, ctx.summed = inputs


def _gather_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.summed:
        part = scatter_over_ranks(grad, None, ctx.dim, ctx.group, grad.dtype)
    else:
        part = own_part(grad, ctx.dim, ctx.group)
    return part, None, None, None


gather.register_autograd(_gather_backward, setup_context=_gather_setup)


split = Operator(
    "split_over_ranks(Tensor x, int dim, str group) -> Tensor",
    cpu=lambda x, dim, group: own_part(x, dim, group).clone(),
    fake=lambda x, dim, group: x.new_empty(
        [n // ranks(group)[1] if d == dim else n for d, n in enumerate(x.shape)]
    ),
)
"""This rank's part of `x`, which is the same on all ranks."""


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.group = inputs


def _split_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return gather(grad, ctx.dim, ctx.group, False), None, None


split.register_autograd(_split_backward, setup_context=_split_setup)


def own_part(x: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part of dimension `dim`, which the number of ranks divides."""
    rank, size = ranks(group)
    step = x.shape[dim] // size
    return x.narrow(dim, rank * step, step).contiguous()
