"""Replacements of PyTorch's functions that sort, pick and add by index, under ``samebits.batch_invariant``.

The functions follow the conventions of :mod:`samebits.mode.overrides`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.mode.arguments import as_pytorch, records, takes
from samebits.ops import indexing, scan
from samebits.ops.expand import expand

_BY_SORTING = 4096  # so many entries or fewer
_INTEGERS = (torch.int64, torch.int32)

# Bound here, before the mode's rules find them.
_sort, _argsort, _topk = torch.sort, torch.argsort, torch.topk


def sort(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    how = _sorting(*args, **kwargs)
    if not _has_keys(input):
        return _sort(input, **how)
    as_pytorch(_sort, input, **how)
    places = _sort(_keys(input), **how)[1]
    return torch.return_types.sort((_pick(input, how.get("dim", -1), places), places))


def _pick(input: Tensor, dim: int, places: Tensor) -> Tensor:
    return indexing.pick(input, dim, places) if records(input) else input.gather(dim, places)


def argsort(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _argsort(_keys(input) if _has_keys(input) else input, **_sorting(*args, **kwargs))


def msort(input: Tensor) -> Any:
    return sort(input, dim=0)[0]


def _has_keys(x: Any) -> bool:
    """Whether PyTorch may sort -0 and NaN by the batch, as on GPUs, where it has several ways."""
    return isinstance(x, Tensor) and x.is_cuda and x.ndim > 0 and takes(x)


def _keys(x: Tensor) -> Tensor:
    """`x` in float32, with one zero and one NaN."""
    return x.detach().to(torch.float32) + 0.0


def _sorting(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a stable sort. ``stable`` comes first in one of PyTorch's forms, but by name only."""
    names: tuple[str, ...] = ("dim", "descending")
    if args and (args[0] is None or isinstance(args[0], bool)):  # the operator's own form
        names = ("stable", *names)
    return {**dict(zip(names, args, strict=False)), **kwargs, "stable": True}


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest, or smallest: among equal ones those that come first, in this order."""
    if input.ndim:
        input.size(dim)  # raises IndexError; PyTorch 2.11 has an assertion where tensors have no data
    if not (type(k) is type(dim) is int and takes(input) and input.ndim and 0 <= k <= input.shape[dim]):
        as_pytorch(_topk, input, k, dim, largest, sorted)  # raises what PyTorch does
    k, dim = operator.index(k), operator.index(dim)
    with torch.no_grad():
        places = _first_places(input.detach(), k, dim, largest)
    values = input.clone() if input.ndim == 0 else _pick(input, dim, places)
    return torch.return_types.topk((values, places))


def _first_places(x: Tensor, k: int, dim: int, largest: bool) -> Tensor:
    if k == 0 and x.ndim:  # an engine asks for none beside the log-prob of a token that was sampled
        return x.narrow(dim, 0, 0).to(torch.int64)
    if x.ndim == 0 or x.shape[dim] <= _BY_SORTING or not takes(x):
        keys = _keys(x) if _has_keys(x) else x
        places = _sort(keys, dim=dim, descending=largest, stable=True)[1]
        return places if x.ndim == 0 else places.narrow(dim, 0, k).contiguous()
    wide = _keys(x).contiguous().view(torch.int32)
    order = (wide ^ (wide >> 31 & 0x7FFFFFFF)).to(torch.int64)  # as the numbers are ordered
    order = torch.where(x.isnan(), 0x7FFFFFFF, order)  # NaN is the largest
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    place = torch.arange(x.shape[dim], device=x.device).view(shape)
    keys = order << 32 | (0xFFFFFFFF - place if largest else place)
    low = _topk(keys, k, dim, largest, True)[0] & 0xFFFFFFFF
    return 0xFFFFFFFF - low if largest else low


def getitem(input: Tensor, index: Any) -> Any:
    """``input[index]``: where integers pick parts that have gradients, these are summed in order."""
    entries = _entries(input, index) if records(input) else ()
    picked = _picked(entries)
    if picked is None:
        return input[index]
    theirs = as_pytorch(operator.getitem, input, entries)
    before, indices, after = picked
    first = sum(not _is_integer(x) for x in before)
    found = _taken(input[before], first, indices)
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    found = found[(*(slice(None),) * (first + len(shape)), *after)] if after else found
    return _laid_out_as(theirs, found)


def _laid_out_as(theirs: Tensor, found: Tensor) -> Tensor:
    """`found` with the strides of what PyTorch returns."""
    if found.stride() == theirs.stride():
        return found
    room = torch.empty_strided(found.shape, theirs.stride(), dtype=found.dtype, device=found.device)
    return room.copy_(found)


def _is_integer(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _entries(x: Tensor, index: Any) -> tuple[Any, ...]:
    """What indexes the dimensions of `x`, with tensors for lists of integers, and slices for an ellipsis."""
    entries = [
        torch.tensor(e, device=x.device) if isinstance(e, list) and e and all(map(_is_integer, e)) else e
        for e in (index if isinstance(index, tuple) else (index,))
    ]
    at = [i for i, e in enumerate(entries) if e is Ellipsis]
    if len(at) == 1:
        missing = x.ndim + 1 - sum(e is not None for e in entries)
        entries[at[0] : at[0] + 1] = [slice(None)] * missing
    return tuple(entries)


def _picked(index: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor], tuple[Any, ...]] | None:
    """Tensors of integers one after the other, and what is before and behind them, if that is no tensor."""
    found = [i for i, x in enumerate(index) if isinstance(x, Tensor)]
    if not found or found[-1] - found[0] != len(found) - 1:
        return None
    before, indices, after = index[: found[0]], [*index[found[0] : found[-1] + 1]], index[found[-1] + 1 :]
    integers = all(x.dtype in _INTEGERS and x.ndim > 0 for x in indices)
    plain = all(x is None or isinstance(x, slice) or _is_integer(x) for x in before + after)
    return (before, indices, after) if integers and plain else None


def _taken(x: Tensor, first: int, indices: Sequence[Tensor]) -> Tensor:
    """`x` at integers for the dimensions from `first` on."""
    rows, places = _as_rows(x, first, indices)
    found = indexing.take(rows, places)
    return found.movedim([*range(places.ndim)], [*range(first, first + places.ndim)])


def _as_rows(x: Tensor, first: int, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`x` with the dimensions from `first` on, as many as there are indices, as one in front; its rows."""
    count = len(indices)
    sizes = x.shape[first : first + count]
    places = indexing.row_numbers(sizes, torch.broadcast_tensors(*indices))
    moved = x.movedim([*range(first, first + count)], [*range(count)]) if first else x
    return moved.reshape(math.prod(sizes), *moved.shape[count:]), places


def index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    if not records(input) or input.ndim == 0 or index.ndim > 1:
        return torch.index_select(input, dim, index)
    return indexing.take(input.movedim(dim, 0), index.reshape(-1)).movedim(0, dim).contiguous()


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if not records(input) or sparse_grad:
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    as_pytorch(torch.gather, input, dim, index)
    return indexing.gather(input, operator.index(dim), index)


def repeat_interleave(input: Tensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    if not records(input):
        return torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    x, dim = (input.reshape(-1), 0) if dim is None else (input, dim % input.ndim)
    if isinstance(repeats, Tensor):
        places = torch.repeat_interleave(repeats.expand(x.shape[dim]), output_size=output_size)
        return index_select(x, dim, places)
    shape = (*x.shape[: dim + 1], operator.index(repeats), *x.shape[dim + 1 :])
    return expand(x.unsqueeze(dim + 1), shape).flatten(dim, dim + 1)


def repeat(input: Tensor, *repeats: Any) -> Any:
    counts = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    if not records(input) or len(counts) < input.ndim:
        return input.repeat(counts)
    sizes = (1,) * (len(counts) - input.ndim) + tuple(input.shape)
    apart = [n for size in sizes for n in (1, size)]
    wide = [n for pair in zip(counts, sizes, strict=True) for n in pair]
    return expand(input.reshape(apart), wide).reshape([c * n for c, n in zip(counts, sizes, strict=True)])


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    if not takes(input, source):
        return NotImplemented
    if index.dtype not in (torch.int64, torch.int32) or source.ndim > input.ndim == 0:
        return torch.index_add(input, dim, index, source, alpha=alpha)  # it raises its error
    as_pytorch(torch.index_add, input, dim, index, source, alpha=alpha)
    along = operator.index(dim)
    if input.dtype != source.dtype or _apart_from(along, input) != _apart_from(along, source):
        return torch.index_add(input, dim, index, source, alpha=alpha)  # so here: meta tensors check neither
    return indexing.index_add(input, along, index, source, alpha)


def _apart_from(dim: int, t: Tensor) -> list[int]:
    """The sizes of the other dimensions."""
    sizes = list(t.shape)
    if sizes:
        sizes.pop(dim)
    return sizes


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    if not takes(input, src):
        return NotImplemented
    as_pytorch(torch.scatter_add, input, dim, index, src)
    return indexing.scatter_add(input, operator.index(dim), index, src)


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce in ("amax", "amin"):  # exact in any order
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    if reduce not in ("sum", "mean") or not takes(input, src):
        return NotImplemented
    as_pytorch(torch.scatter_reduce, input, dim, index, src, reduce, include_self=include_self)
    dim, wide = operator.index(dim), input.to(torch.float32)
    count = torch.zeros_like(wide).scatter_add(dim, index, torch.ones_like(index, dtype=torch.float32))
    start = wide if include_self else wide.masked_fill(count > 0, 0.0)
    total = indexing.scatter_add(start, dim, index, src.to(torch.float32))
    if reduce == "mean":
        total = total / (count + 1 if include_self else count.clamp(min=1))
    return total.to(input.dtype)


def index_put(input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    if not accumulate:
        return torch.index_put(input, list(indices), values)
    return _put(input, indices, values)


def index_put_(
    input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not accumulate:
        return torch.ops.aten.index_put_.default(input, list(indices), values)
    result = _put(input, indices, values)
    return result if result is NotImplemented else input.copy_(result)


def _put(x: Tensor, indices: Sequence[Any], values: Tensor) -> Any:
    picked = _picked(tuple(slice(None) if i is None else i for i in indices))
    if picked is None or not takes(x, values) or x.dtype != values.dtype:
        return NotImplemented
    theirs = as_pytorch(torch.ops.aten.index_put, x, list(indices), values, True)
    first, (rows, places) = len(picked[0]), _as_rows(x, len(picked[0]), picked[1])
    added = values.expand(*x.shape[:first], *places.shape, *x.shape[first + len(picked[1]) :])
    added = added.movedim([*range(first, first + places.ndim)], [*range(places.ndim)])
    added = added.reshape(places.numel(), *rows.shape[1:])
    total = indexing.index_add(rows, 0, places.reshape(-1), added)
    if not first:
        return _laid_out_as(theirs, total.reshape(x.shape))
    count = len(picked[1])
    total = total.reshape(*x.shape[first : first + count], *rows.shape[1:])
    return _laid_out_as(theirs, total.movedim([*range(count)], [*range(first, first + count)]))


def cumsum(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return _cumulated(torch.cumsum, scan.cumsum, input, dim, dtype)


def cumprod(input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if records(input):
        return NotImplemented
    return _cumulated(torch.cumprod, scan.cumprod, input, dim, dtype)


def _cumulated(theirs: Any, ours: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
    kind = dtype or input.dtype
    if not (kind.is_floating_point or kind.is_complex):
        return theirs(input, dim, dtype=dtype)  # integers: exact in any order
    x = input if dtype is None else input.to(dtype)
    if not takes(x):
        return NotImplemented
    as_pytorch(theirs, x, dim)
    return ours(x, operator.index(dim))
