"""Row reductions on CUDA tensors.

Most are in ``kernels/rows.cu``. ``kernels/long_sums.cu`` sums few long rows; :mod:`columns` sums over tokens,
:mod:`embeddings` over those with one id, :mod:`slots` over few terms; :mod:`routing` finds experts;
:mod:`norm_gradients` computes all gradients of a norm; :mod:`add_rms_norm` has norms with a residual sum.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.backends import replay
from samebits.backends.cuda import columns, compiler, devices, embeddings, gather, runtime
from samebits.backends.cuda import norm_gradients as together
from samebits.backends.cuda.operands import TYPES, address, with_rows
from samebits.backends.cuda.plans import kept
from samebits.backends.cuda.routing import topk_routing as topk_routing
from samebits.backends.cuda.slots import combine_slots as combine_slots
from samebits.backends.cuda.slots import route as route
from samebits.backends.cuda.slots import slot_sum as slot_sum
from samebits.backends.cuda.slots import take_slots as take_slots
from samebits.functions import VOCAB_BLOCK

_THREADS = 256  # of a block of rows.cu
_PASS = 512  # entries of a row that a warp takes in a pass
_MANY = 1024  # rows that fill a GPU without sharing
_LONG = 1 << 15  # entries of a row that a whole GPU sums, if there are few rows

_ANY = (1 << 31) - 1  # blocks

# How many rows a thread has in flight, by a row's passes and the bytes of an entry: where rows are many, and
# aligned. Elsewhere it has none.
_STAGES = {"softmax": {(2, 4): 3}, "rms_norm": {(1, 2): 3, (2, 2): 3, (1, 4): 3}}
# What differs where a warp takes many aligned rows in two passes each, if nothing is f32.
_OF_A_WARP: dict[str, dict[str, Any]] = {"rms_norm": {"stages": 0, "blocks": 4}, "row_sum": {"fetched": 1}}
# Wider rows of 16-bit values are asked for into the L2 cache.
_FETCHED = {"rms_norm": 2048, "log_softmax": 2048, "softmax": 8192}
# Where there are many, longer unaligned rows of 16-bit values are summed by two warps each, piece by piece.
_IN_PIECES = 2048
# Kernels for 16-bit values, and passes, that leave room for one more block.
_SMALL = ("softmax", 2), ("log_softmax", 2), ("layer_norm", 2), ("layer_norm", 4)
_SMEM = 216 << 10  # of a multiprocessor, which is free for them

_LONG_BLOCKS = 2  # of a multiprocessor
_LONG_AHEAD = 2  # steps that a block has on their way

# The parameter structs of rows.cu and long_sums.cu.
_PARAMS = {
    "row_sum": "PPqqqi",
    "long_sums": "PPPqqqi",
    "softmax": "PPqqq",
    "log_softmax": "PPqqq",
    "softmax_backward": "PPPqq",
    "log_softmax_backward": "PPPqq",
    "rms_norm": "PPPPPPqqqf",
    "layer_norm": "PPPPPPqqqf",
    "norm_backward": "PPPPPPqqqqqq",
    "add_rms_norm": "PPPPPqqqqqqqqqqqffi",
    "add_rms_norm_backward": "PPPPPPqqqqqfffi",
    **dict.fromkeys(("l2norm", "l2norm_backward"), "PPPqqqqqqqf"),
}
_ELSEWHERE = {
    **{name: f"{name}.cu" for name in ("add_rms_norm", "add_rms_norm_backward")},
    **dict.fromkeys(("l2norm", "l2norm_backward"), "l2norm.cu"),
}
"""Kernels that are not in rows.cu."""
_IN_LANES = "add_rms_norm", "l2norm", "l2norm_backward"
"""Kernels of which a warp may take several rows at a time."""
_OF_ROWS = (
    *("row_sum", "softmax", "log_softmax", "softmax_backward", "log_softmax_backward"),
    *("rms_norm", "layer_norm", "norm_backward"),
)  # the kernels of rows.cu


class RowSchedule(NamedTuple):
    """How threads share a row: the macros of row.cuh of these names. It changes no bit."""

    warps: int
    passes: int
    vector: int
    split: bool = False
    """Sums alone: by the whole GPU."""
    stages: int = 0
    """Softmax and norms alone: rows that a thread has on their way, in blocks that stay."""
    blocks: int = 2
    """Of a multiprocessor."""
    whole: int = 0
    """1: rows are aligned, and fill all passes."""
    fetched: int = 0
    """1: rows of later blocks are asked for into the L2 cache."""
    lanes: int = 0
    """Of `_IN_LANES` alone: lanes that share an aligned row of up to 256 entries. 0: whole warps do."""


def choose(
    entry: str, rows: int, n: int, dtype: torch.dtype, aligned: bool, wide: bool = False
) -> RowSchedule:
    """As few warps as take a row in a pass, or in two where there are many rows of 16-bit values.

    Sums of long rows that are not aligned take them in pieces. `wide`: whether OUT or PARAM is f32.
    What differs between kernels was measured on an H200: docs/performance.md, "Row operations".
    """
    many, narrow = rows >= _MANY, dtype.itemsize == 2
    fetched = narrow and n > _FETCHED.get(entry, n)
    passes = 2 if many and narrow and entry != "norm_backward" and not fetched else 1
    warps = next((w for w in (1, 2, 4) if n <= passes * w * _PASS), 8)
    held = next((p for p in (1, 2, 4) if n <= p * warps * _PASS), 0)
    vector = 16 // dtype.itemsize if aligned and n * dtype.itemsize % 16 == 0 else 1
    if entry == "row_sum" and many and narrow and vector == 1 and n > _IN_PIECES:
        return RowSchedule(2, 0, vector, blocks=4)
    staged = many and vector > 1 and not fetched
    stages = _STAGES.get(entry, {}).get((held, dtype.itemsize), 0) if staged else 0
    blocks = {2: 4, 4: 3}.get(held * dtype.itemsize, 2)
    if narrow and (vector > 1 or entry == "softmax"):  # the others' registers spill if rows are not aligned
        blocks += (entry, held) in _SMALL or (fetched and held == 1)
    if entry in _IN_LANES and vector > 1 and n <= 2 * VOCAB_BLOCK:
        return RowSchedule(1, 1, vector, blocks=4, lanes=8 if n <= VOCAB_BLOCK else 16)
    if entry in _ELSEWHERE and (vector == 1 or entry.endswith("backward")):  # of several matrices
        blocks = 2
    spills = entry.endswith("backward") and warps * held > 8
    schedule = RowSchedule(
        *(warps, held, vector),
        stages=stages,
        blocks=blocks,
        whole=int(vector > 1 and n == held * warps * _PASS and not spills),
        fetched=int(fetched and held > 0),
    )
    of_a_warp = many and vector > 1 and (warps, held) == (1, 2) and not wide
    return schedule._replace(**_OF_A_WARP.get(entry, {})) if of_a_warp else schedule


def schedules(n: int, dtype: torch.dtype) -> list[RowSchedule]:
    """All choices for rows of `n` values."""
    cases = itertools.product(_OF_ROWS, (1, _MANY), (True, False), (False, True))
    every = (choose(entry, rows, n, dtype, of, wide) for entry, rows, of, wide in cases)
    found = list(dict.fromkeys(every))
    return found + [s._replace(split=True) for s in found if n >= _LONG]


def kernel_spec(
    entry: str,
    x: torch.dtype,
    out: torch.dtype,
    param: torch.dtype,
    schedule: RowSchedule,
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """A kernel of rows.cu, or of a file of its own that shares rows in the same ways."""
    types = ("IN", TYPES[x]), ("OUT", TYPES[out]), ("PARAM", TYPES[param])
    stages = _staged(entry, x, schedule)
    shared = ("WARPS", schedule.warps), ("PASSES", schedule.passes), ("VECTOR", schedule.vector)
    bounds = ("WHOLE", schedule.whole)
    wide = torch.float32 in (out, param) and stages == 0  # takes more registers
    blocks = min(schedule.blocks, 2 if schedule.passes > 1 else 3) if wide else schedule.blocks
    read = ("STAGES", stages), ("BLOCKS", blocks), ("FETCHED", schedule.fetched)
    lanes = (("LANES", schedule.lanes),) if entry in _IN_LANES else ()
    return compiler.KernelSpec(
        *(_ELSEWHERE.get(entry, "rows.cu"), entry, _PARAMS[entry], (*types, *shared, bounds, *read, *lanes)),
        block=_THREADS,
        programmatic=programmatic,
        smem=stages * _bytes_of_row(entry, x, schedule),
    )


def _staged(entry: str, x: torch.dtype, schedule: RowSchedule) -> int:
    """Rows of each matrix on their way: as many as fit, at least two, or none."""
    of_row = _bytes_of_row(entry, x, schedule)
    stages = min(schedule.stages, _SMEM // schedule.blocks // of_row) if of_row else 0
    return stages if stages > 1 else 0


def _bytes_of_row(entry: str, x: torch.dtype, schedule: RowSchedule) -> int:
    """Shared memory of a block for the rows that it takes at a time."""
    return schedule.passes * 16 * _THREADS * x.itemsize if entry in _STAGES else 0


@kept
def _plan(
    entry: str,
    device: int,
    many: bool,
    n: int,
    x: torch.dtype,
    out: torch.dtype,
    param: torch.dtype,
    aligned: bool,
    given: RowSchedule | None,
) -> tuple[runtime.Kernel, int, int]:
    """A kernel of rows.cu, the rows that a block takes at a time, and how many blocks there are at most.

    `given` is a choice that is made already, if it is one for such rows; unaligned ones have 1 as `vector`.
    """
    schedule = choose(entry, _MANY if many else 1, n, x, aligned, torch.float32 in (out, param))
    if given is not None and given in schedules(n, x):
        schedule = given if aligned else given._replace(vector=1, stages=0, whole=0)
    if entry not in _IN_LANES or not aligned:
        schedule = schedule._replace(lanes=0)
    info = devices.device_info(device)
    spec = kernel_spec(entry, x, out, param, schedule, programmatic=info.arch.copies_tiles)
    most = info.sm_count * schedule.blocks if _staged(entry, x, schedule) else _ANY
    rows_of_block = _THREADS // (schedule.lanes or 32 * schedule.warps)
    return runtime.load(spec, device), rows_of_block, most


def _launch(
    entry: str,
    like: Tensor,
    out: torch.dtype,
    param: torch.dtype,
    schedule: RowSchedule | None,
    low: int,
    *values: Any,
) -> None:
    """:func:`launch` on the rows of the matrix `like`."""
    launch(entry, *like.shape, like.get_device(), (like.dtype, out, param), schedule, low, *values)


def launch(
    entry: str,
    rows: int,
    n: int,
    device: int,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    schedule: RowSchedule | None,
    low: int,
    *values: Any,
) -> None:
    """Run a kernel that shares rows.

    Args:
        entry: the kernel.
        rows, n: how many there are, and their length.
        device: index of the GPU.
        types: IN, OUT and PARAM.
        schedule: instead of the choice, if it is one for such rows. It never changes a bit. None: the choice.
        low: addresses, and bytes from row to row, by bitwise or. All are multiples of 16 if this is.
        values: the kernel's parameters.
    """
    if rows == 0:
        return
    if schedule is not None:
        replay.refuse("a schedule is given")
    kernel, per_block, most = _plan(entry, device, rows >= _MANY, n, *types, low & 15 == 0, schedule)
    kernel.launch((min(-(-rows // per_block), most), 1, 1), *values)


def row_sum(x: Tensor, mean: bool, dtype: torch.dtype, *, schedule: RowSchedule | None = None) -> Tensor:
    """Sums or means in `dtype` of the rows of ``x[rows, n]``."""
    return _summed(x, int(mean), dtype, schedule)


def row_norm(x: Tensor, dtype: torch.dtype, *, schedule: RowSchedule | None = None) -> Tensor:
    """2-norms in `dtype` of the rows of ``x[rows, n]``."""
    return _summed(x, 2, dtype, schedule)


def _summed(x: Tensor, what: int, dtype: torch.dtype, schedule: RowSchedule | None) -> Tensor:
    """Sums (0), means (1) or 2-norms (2) of rows."""
    x = with_rows(x)
    rows, n = x.shape
    out = runtime.empty((rows,), dtype, x.get_device())
    at, step = x.data_ptr(), x.stride(0)
    low = at | step * x.itemsize
    split = n >= _LONG and 0 < rows <= 64
    if schedule is not None:
        replay.refuse("a schedule is given")
        split = schedule.split if schedule in schedules(n, x.dtype) else split
    if split:
        _sum_long(x, out, low, what)
    else:
        _launch("row_sum", x, dtype, dtype, schedule, low, at, out.data_ptr(), step, rows, n, what)
    return out


def _sum_long(x: Tensor, out: Tensor, low: int, what: int) -> None:
    (rows, n), device = x.shape, x.get_device()
    steps = -(-n // (32 * VOCAB_BLOCK))
    sums = runtime.zeros((rows, steps, 32), torch.int32, device)
    kernel, blocks = _long_kernel(device, x.dtype, out.dtype, low & 15 == 0 and n * x.itemsize % 16 == 0)
    each = min(-(-steps // _LONG_AHEAD), max(1, blocks // rows - 1))
    kernel.launch(
        (each + 1, rows, 1), x.data_ptr(), sums.data_ptr(), out.data_ptr(), x.stride(0), n, steps, what
    )


def long_spec(
    x: torch.dtype, out: torch.dtype, vector: int, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of long_sums.cu."""
    types = ("IN", TYPES[x]), ("OUT", TYPES[out])
    shared = ("WARPS", 8), ("PASSES", 0), ("VECTOR", vector), ("WHOLE", 0)
    read = ("STAGES", 0), ("BLOCKS", _LONG_BLOCKS), ("FETCHED", 0), ("AHEAD", _LONG_AHEAD)
    return compiler.KernelSpec(
        *("long_sums.cu", "long_sums", _PARAMS["long_sums"], (*types, *shared, *read)),
        block=_THREADS,
        programmatic=programmatic,
        smem=2 * 7 * 32 * 32 * 4,
    )


@kept
def _long_kernel(device: int, x: torch.dtype, out: torch.dtype, aligned: bool) -> tuple[runtime.Kernel, int]:
    """The kernel, and how many of its blocks run at once."""
    info = devices.device_info(device)
    vector = 16 // x.itemsize if aligned else 1
    spec = long_spec(x, out, vector, programmatic=info.arch.copies_tiles)
    return runtime.load(spec, device), _LONG_BLOCKS * info.sm_count


def softmax(x: Tensor, logarithm: bool, dtype: torch.dtype, *, schedule: RowSchedule | None = None) -> Tensor:
    """Softmax or its logarithm in `dtype` of the rows of ``x[rows, n]``."""
    x = with_rows(x)
    out = runtime.empty(x.shape, dtype, x.get_device())
    at, step = x.data_ptr(), x.stride(0)
    entry = "log_softmax" if logarithm else "softmax"
    low = at | step * x.itemsize
    _launch(entry, x, dtype, dtype, schedule, low, at, out.data_ptr(), step, *x.shape)
    return out


def softmax_backward(
    grad: Tensor, out: Tensor, logarithm: bool, dtype: torch.dtype, *, schedule: RowSchedule | None = None
) -> Tensor:
    """Gradients in `dtype` of the rows that gave `out`."""
    grad, y = grad.contiguous(), out.contiguous()
    dx = runtime.empty(grad.shape, dtype, grad.get_device())
    at, y_at = grad.data_ptr(), y.data_ptr()
    entry = "log_softmax_backward" if logarithm else "softmax_backward"
    _launch(entry, grad, dtype, y.dtype, schedule, at | y_at, at, y_at, dx.data_ptr(), *grad.shape)
    return dx


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    *,
    schedule: RowSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of the rows of ``x[rows, n]`` (RMS norm without `centred`), means and 1 / deviations."""
    x = with_rows(x)
    weight, bias = _vectors(weight, bias)
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    means, scales = (
        runtime.empty((n,), torch.float32, x.get_device()) for n in (x.shape[0] if centred else 0, x.shape[0])
    )
    param = next((t.dtype for t in (weight, bias) if t is not None), torch.float32)
    at, weight_at, bias_at, step = x.data_ptr(), address(weight), address(bias), x.stride(0)
    _launch(
        *("layer_norm" if centred else "rms_norm", x, x.dtype, param, schedule),
        at | weight_at | bias_at | step * x.itemsize,
        *(at, weight_at, bias_at, out.data_ptr(), means.data_ptr() if centred else 0, scales.data_ptr()),
        *(step, *x.shape, eps),
    )
    return out, means, scales


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    means: Tensor,
    scales: Tensor,
    *,
    schedule: RowSchedule | None = None,
) -> Tensor:
    """Gradients of the rows of `x`."""
    x, grad = with_rows(x), with_rows(grad)
    (weight,) = _vectors(weight)
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    at, grad_at, weight_at, steps = (
        x.data_ptr(),
        grad.data_ptr(),
        address(weight),
        (grad.stride(0), x.stride(0)),
    )
    _launch(
        *("norm_backward", x, x.dtype, torch.float32 if weight is None else weight.dtype, schedule),
        at | grad_at | weight_at | (steps[0] | steps[1]) * x.itemsize,
        *(grad_at, at, weight_at, means.data_ptr() if means.numel() else 0, scales.data_ptr()),
        # The last rows first: the sums over tokens, which follow, then find the first ones in the L2 cache.
        *(out.data_ptr(), *steps, *x.shape, x.shape[0] - 1, -1),
    )
    return out


def norm_columns(
    grad: Tensor, x: Tensor, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients in `dtype` of weight and bias."""
    x = with_rows(x)
    weight_grad, bias_grad = (runtime.empty(x.shape[1:], dtype, x.get_device()) for _ in range(2))
    columns.sums(grad, bias_grad, x, means, scales, weight_grad)
    return weight_grad, bias_grad


def norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    means: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    schedule: RowSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows of `x`, and in `dtype` of weight and bias."""
    if together.takes(grad, x, weight):
        return together.norm_gradients(grad, x, weight, means, scales, dtype)
    return (
        norm_backward(grad, x, weight, means, scales, schedule=schedule),
        *norm_columns(grad, x, means, scales, dtype),
    )


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in `dtype` over the first dimension of ``x[tokens, ...]``: chains over tokens."""
    out = runtime.empty(x.shape[1:], dtype, x.get_device())
    if x.shape[0] <= columns.FEW_TOKENS:
        columns.few_sums(x, out)
    else:
        columns.sums(x if x.ndim == 2 else x.flatten(1), out)
    return out


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """``weight[ids]``."""
    return gather.rows_of(weight, ids)


def embedding_backward(grad: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    """Gradients ``[count, n]`` of an embedding's rows from ``grad[tokens, n]`` and ``ids[tokens]``."""
    out = runtime.empty((count, grad.shape[1]), grad.dtype, grad.get_device())
    embeddings.sums_by_id(grad, ids, out, padding)
    return out


def _vectors(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The vectors, contiguous and of one dtype."""
    dtypes = {t.dtype for t in vectors if t is not None}
    if len(dtypes) > 1:
        vectors = tuple(None if t is None else t.to(torch.float32) for t in vectors)
    return tuple(t if t is None or t.is_contiguous() else t.contiguous() for t in vectors)
