"""Rows of experts by their slots, and sums over few terms: ``kernels/slots.cu``, and ``sort_slots.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import OLDEST
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows

MOST = 16
"""Terms that a thread holds at a time."""
_THREADS = 256  # of a block
_TAKEN = 2  # runs of a token that a thread copies
_PARAMS = {"take_slots": "PPPPqqqqqqq", "sum_slots": "PPPPqqqqq", "route": "PPPPPqqq"}


def kernel_spec(
    entry: str,
    dtype: torch.dtype,
    vector: int,
    slots: int,
    weights: torch.dtype | None,
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """A kernel of slots.cu; sum_slots is of so many terms. There may be weights of this dtype."""
    types = ("TYPE", TYPES[dtype]), ("WEIGHT", TYPES[weights or dtype])
    constants = ("VECTOR", vector), ("SLOTS", slots), ("WEIGHTED", int(weights is not None))
    return compiler.KernelSpec(
        *("slots.cu", entry, _PARAMS[entry], (*types, *constants)),
        block=_THREADS,
        programmatic=programmatic,
        oldest=OLDEST,
    )


_kernel = runtime.loader(kernel_spec)

_SORTERS = 512  # threads of a block that sorts
_ROOM = 9 << 10  # words of shared memory for its counts
_MOST_BLOCKS = 128


def sort_spec(entry: str, *, programmatic: bool = False) -> compiler.KernelSpec:
    """A kernel of sort_slots.cu."""
    return compiler.KernelSpec(
        *("sort_slots.cu", entry, "PPPPPPPqqqqq", ()),
        block=_SORTERS,
        programmatic=programmatic,
        oldest=OLDEST,
    )


_sorter = runtime.loader(sort_spec)


def _one_block_sorts(slots: int, experts: int) -> bool:
    """Whether it has so many slots, and room to count those of each expert in chunks of 32."""
    return slots <= 2048 and experts < 2 * _SORTERS and -(-slots // 32) * (experts // 2 + 1) <= _ROOM


def _shares(slots: int, experts: int) -> tuple[int, int, int]:
    """Blocks that sort, the slots of each, and how many warps of a block share them."""
    warps, chunks = min(_SORTERS // 32, _ROOM // (experts + 1)), -(-slots // 32)
    blocks = min(_MOST_BLOCKS, -(-chunks // warps))
    span = -(-chunks // (blocks * warps)) * warps * 32
    return -(-slots // span), span, warps


def _shape(tokens: int, runs: int) -> tuple[int, int, int]:
    """Blocks of tokens, and of a token, and the power of two of its threads in a block, which copy it."""
    each = _TAKEN if tokens * runs >= 1 << 18 else 1
    lanes = min(8, (-(-runs // each) - 1).bit_length())
    return -(-tokens // (_THREADS >> lanes)), min(-(-runs // (each << lanes)), 65535), lanes


def _launch(
    entry: str,
    x: Tensor,
    count: int,
    slots: int,
    weights: Tensor | None,
    numbers: Tensor | None = None,
    outer: int = 0,
) -> Tensor:
    """Of `count` tokens, from rows of ``x[rows, n]``, or of ``x[a, slots, n]`` with a's stride `outer`."""
    n, inner, device = x.shape[-1], x.stride(-2), x.get_device()
    of = None if weights is None else weights.dtype
    takes = entry == "take_slots"
    out = runtime.empty((count * slots if takes else count, n), of or x.dtype, device)
    if out.numel():
        low = x.data_ptr() | (outer | inner | n) * x.itemsize
        vector = 16 // x.itemsize if low & 15 == 0 else 1
        weights, numbers = (None if t is None else t.contiguous() for t in (weights, numbers))
        at = x.data_ptr(), address(weights), address(numbers), out.data_ptr()
        params = *at, count, n, outer, inner, slots
        if takes:
            blocks, pieces, lanes = _shape(count, n // vector)
            _kernel(device, entry, x.dtype, vector, 1, of).launch(
                (blocks, pieces, 1), *params, lanes, runtime.beyond_l2(out)
            )
        else:
            blocks = -(-count * (n // vector) // _THREADS)
            _kernel(device, entry, x.dtype, vector, slots, of).launch((blocks, 1, 1), *params)
    return out


def take_slots(x: Tensor, places: Tensor, slots: int, weights: Tensor | None) -> Tensor:
    """``x[i // slots]`` in row ``places[i]``, times ``weights[i]``, rounded once."""
    return _launch("take_slots", with_rows(x), len(places) // slots, slots, weights, places)


def combine_slots(x: Tensor, places: Tensor, slots: int, weights: Tensor | None) -> Tensor:
    """Sums over every token's slots i, at most `MOST`, of ``x[places[i]]``, times ``weights[i]``.

    Weights are of the dtype of `x`, or in float32, as then are products and sums.
    """
    return _launch("sum_slots", with_rows(x), len(places) // slots, slots, weights, places)


def slot_sum(x: Tensor) -> Tensor:
    """``x[a, n, b].sum(1)`` of at most `MOST` terms: sums of rows."""
    a, n, b = x.shape
    x = x if x.stride(2) == 1 or b <= 1 else x.contiguous()
    return _launch("sum_slots", x, a, n, None, outer=x.stride(0))


def route(experts: Tensor, count: int, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Slots by their experts, sorted: see :func:`samebits.backends.reference.rows.route`."""
    slots, device = len(experts), experts.get_device()
    places = runtime.empty((slots,), torch.int64, device)
    ends = runtime.empty((count,), torch.int32, device)
    sequences = runtime.empty((slots if each else 0,), torch.int32, device)
    made = address(places), ends.data_ptr(), address(sequences)
    if count >= 2 * _SORTERS:
        experts, order = experts.clamp(0, count).sort(stable=True)
        _kernel(device, "route", torch.float32, 1, 1, None).launch(
            (-(-(slots + 1) // _THREADS), 1, 1),
            *(address(experts), address(order), *made, slots, count, each),
        )
        return experts, order, places, ends, sequences
    given = experts.contiguous()
    experts, order = (runtime.empty((slots,), torch.int64, device) for _ in range(2))
    read_and_made = address(given), address(experts), address(order), *made
    if _one_block_sorts(slots, count):
        _sorter(device, "sort_slots").launch((1, 1, 1), *read_and_made, 0, slots, count, each, slots, 1)
    else:
        blocks, span, warps = _shares(slots, count)
        counts = runtime.empty((count + 1, _MOST_BLOCKS), torch.int32, device)
        for entry in ("count_slots", "place_slots"):
            _sorter(device, entry).launch(
                (blocks, 1, 1), *read_and_made, counts.data_ptr(), slots, count, each, span, warps
            )
    return experts, order, places, ends, sequences
