"""The universal tensor-core product on CUDA tensors: ``kernels/matmul_sm80.cu``.

It takes every layout, stride, alignment and size on sm_80 and newer, and is what faster kernels are held to.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from samebits.backends.cuda import runtime

__all__ = ["SCHEDULES", "Plan", "Schedule", "choose_schedule", "kernel_spec", "matmul", "plan"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the work is cut. It never changes a bit.

    Attributes:
        tile_m, tile_n: a block's share of the output.
        tile_k: k in a pipeline stage.
        warps_m, warps_n: how a block's warps share its tile.
        stages: tiles in flight.
        min_blocks: blocks that shall fit on one multiprocessor.
        alone, busy: microseconds for a tile over 4096 k, measured on an H200: with few blocks on the GPU, and
            for each of many that a multiprocessor takes.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int
    alone: float
    busy: float

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def smem(self) -> int:
        return (self.tile_m + self.tile_n) * self.tile_k * 2 * self.stages


SCHEDULES = (
    Schedule(128, 256, 32, 2, 4, 4, 1, alone=86, busy=89),
    Schedule(128, 128, 32, 2, 2, 4, 2, alone=55, busy=42),
    Schedule(64, 64, 64, 2, 2, 3, 3, alone=30, busy=14.5),
    Schedule(16, 32, 128, 1, 2, 5, 1, alone=14.5, busy=6),
    Schedule(64, 16, 64, 4, 1, 4, 2, alone=20, busy=8.5),
)


def choose_schedule(m: int, n: int, batch: int, info: runtime.DeviceInfo) -> Schedule:
    """The schedule that should be fastest for ``batch`` matrices of ``[m, n]``."""

    def time(s: Schedule) -> float:
        tiles = -(-m // s.tile_m) * -(-n // s.tile_n) * batch
        shared = 2 * s.smem <= info.max_smem  # blocks hide each other's waiting only if two fit
        return max(s.alone, -(-tiles // info.sm_count) * (s.busy if shared else max(s.alone, s.busy)))

    # The times are of tiles full of output; in one that is mostly padding, loads are as well.
    full = [s for s in SCHEDULES if s.tile_m <= 2 * max(m, 8) and s.tile_n <= 2 * max(n, 8)]
    return min(full or SCHEDULES[-2:], key=time)


LARGEST = 2**31 - 2048
"""Sizes up to this can be counted in 32 bits, and rounded up to all the tiles that are in flight at once."""


class Layout(NamedTuple):
    """How an operand's tiles are loaded, and its strides in elements; "row" is m of a, n of b."""

    k_major: bool
    vector: bool
    strides: tuple[int, int, int, int]  # batch, segment, row, k


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# struct Params of the kernel.
PARAMS = "P4q P4q P3q P3q Pq P 10i".replace(" ", "")


def kernel_spec(schedule: Schedule, dtype: torch.dtype, a: Layout, b: Layout) -> runtime.KernelSpec:
    """The kernel that multiplies operands of such layouts."""
    sizes = {name.upper(): value for name, value in asdict(schedule).items() if name not in ("alone", "busy")}
    constants = sizes | {
        "INPUT_BF16": int(dtype == torch.bfloat16),
        "A_K_MAJOR": int(a.k_major),
        "A_VECTOR": int(a.vector),
        "B_K_MAJOR": int(b.k_major),
        "B_VECTOR": int(b.vector),
    }
    return runtime.KernelSpec(
        "matmul_sm80.cu",
        "matmul_sm80",
        PARAMS,
        tuple(constants.items()),
        block=schedule.threads,
        smem=schedule.smem,
    )


class Plan(NamedTuple):
    """Everything of a call but its addresses."""

    kernel: runtime.Kernel | None  # None: there is nothing to compute
    grid: tuple[int, int, int]
    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    acc: tuple[int, ...] | None
    bias: tuple[int, ...]
    sizes: tuple[int, ...]

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int, acc: int | None = None) -> None:
        """Run on operands at these addresses; accumulators lie at ``acc``, or else at ``out``."""
        if self.kernel is None:
            return
        start = (0, 0, 0, 0) if self.acc is None else (out if acc is None else acc, *self.acc)
        self.kernel.launch(
            self.grid,
            a,
            *self.a,
            b,
            *self.b,
            out,
            *self.out,
            *start,
            bias,
            *self.bias,
            cu_seqlens,
            *self.sizes,
        )


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor,
    schedule: Schedule | None = None,
) -> Tensor:
    """``out = acc + a @ b + bias``: one chain of 16-k steps for every output element, then one rounding.

    Args:
        a: ``[M, K]``, ``[B, M, K]`` or ``[B, S, M, K]``, bfloat16 or float16 on a CUDA device, any strides.
            With four dimensions the chain runs over k of every segment s in turn; each starts a new group.
        b: ``[K, N]``, ``[B, K, N]`` or ``[B, S, K, N]``, of a's dtype. B may be 1 or missing in either.
        acc: float32, of out's shape: the chains start from it. It may be ``out`` itself.
        bias: ``[N]``, float32, bfloat16 or float16.
        cu_seqlens: int32 or int64 ``[S + 1]``, ascending bounds in k of segments of one K axis.
        out: ``[M, N]`` or ``[B, M, N]``, float32, bfloat16 or float16, any strides.
        schedule: one of :data:`SCHEDULES`; by default :func:`choose_schedule`'s.
    """
    planned = plan(a, b, out, acc=acc, bias=bias, cu_seqlens=cu_seqlens, schedule=schedule)
    run(planned, a, b, out, bias, cu_seqlens, acc)
    return out


class Planned(Protocol):
    """Everything of a call of a kernel but its addresses."""

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int, acc: int | None = None) -> None:
        """Run on operands at these addresses; accumulators lie at ``acc``, or else at ``out``."""


def run(
    planned: Planned,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    acc: Tensor | None,
) -> None:
    """Run a plan on these operands."""
    planned.launch(
        a.data_ptr(),
        b.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        None if acc is None else acc.data_ptr(),
    )


def plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """How :func:`matmul` runs these operands, and others of their shapes, strides, dtypes and alignment."""
    check(a, b, acc, bias, cu_seqlens, out)
    (m, k), n, batch = a.shape[-2:], b.shape[-1], out.shape[0] if out.ndim == 3 else 1
    segments = a.shape[1] if a.ndim == 4 else 1
    if cu_seqlens is not None:
        segments = cu_seqlens.numel() - 1
    info = runtime.device_info(out.device.index)
    layout_a = layout(a, -2, -1, chunk=8, ragged=cu_seqlens is not None)
    layout_b = layout(b, -1, -2, chunk=8, ragged=cu_seqlens is not None)
    schedule = schedule or choose_schedule(m, n, batch, info)
    tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
    tiles = tiles_m * tiles_n * batch
    # Groups of all segments: spans of k in all have one more each at most.
    groups = -(-k // 16) * segments if cu_seqlens is None else k // 16 + segments
    if max(m, n, k, tiles, segments, groups) > LARGEST:
        raise ValueError(
            f"samebits: a product of a {tuple(a.shape)} by b {tuple(b.shape)} has a size above {LARGEST}"
        )
    kernel = None
    if tiles > 0:
        kernel = runtime.load(kernel_spec(schedule, a.dtype, layout_a, layout_b), info.index)
    sizes = m, n, k, segments, tiles_m, tiles_n, KINDS[out.dtype]
    return complete(kernel, tiles, layout_a, layout_b, out, acc, bias, cu_seqlens, sizes)


def complete(
    kernel: runtime.Kernel | None,
    tiles: int,
    a: Layout,
    b: Layout,
    out: Tensor,
    acc: Tensor | None,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: tuple[int, ...],
) -> Plan:
    """A plan with such `sizes`, to which all follows that a kernel learns of the outputs and the bias."""
    strides = matrix_strides(out)
    align = 4 * out.element_size()
    together = strides[2] == 1 and out.data_ptr() % align == 0 and strides[0] % 4 == strides[1] % 4 == 0
    return Plan(
        kernel,
        (tiles, 1, 1),
        a.strides,
        b.strides,
        strides,
        None if acc is None else matrix_strides(acc),
        (0,) if bias is None else bias.stride(),
        (
            *sizes,
            together,
            0 if bias is None else KINDS[bias.dtype],
            cu_seqlens is not None and cu_seqlens.dtype == torch.int64,
        ),
    )


def matrix_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, row and column; 0 for a dimension of one, whose stride may be anything."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    strides[-1] = strides[-1] or 1
    return (0,) * (3 - x.ndim) + tuple(strides)


def layout(x: Tensor, row_dim: int, k_dim: int, *, chunk: int, ragged: bool) -> Layout:
    """Which way aligned chunks of so many elements lie in memory: along k, along the rows, or neither."""
    batch = x.stride(0) if x.ndim > 2 and x.shape[0] > 1 else 0
    segment = x.stride(1) if x.ndim > 3 and x.shape[1] > 1 else 0
    row, k = x.stride(row_dim), x.stride(k_dim)
    one_row, one_k = x.shape[row_dim] <= 1, x.shape[k_dim] <= 1
    aligned = x.data_ptr() % (chunk * x.element_size()) == batch % chunk == segment % chunk == 0
    # A chunk is never asked for where there are fewer elements: its address may be the last of an allocation.
    along_k = (k == 1 or one_k) and (row % chunk == 0 or one_row) and not ragged  # spans start at any k
    along_k = along_k and x.shape[k_dim] >= chunk
    along_rows = (row == 1 or one_row) and (k % chunk == 0 or one_k) and x.shape[row_dim] >= chunk
    strides = (batch, segment, 0 if one_row else row, 0 if one_k else k)
    if aligned and along_k:
        return Layout(True, True, strides)
    if aligned and along_rows:
        return Layout(False, True, strides)
    return Layout(k <= row, False, strides)


def check(
    a: Tensor, b: Tensor, acc: Tensor | None, bias: Tensor | None, cu_seqlens: Tensor | None, out: Tensor
) -> None:
    need(a.dtype in (torch.bfloat16, torch.float16), f"a: expected bfloat16 or float16, got {a.dtype}")
    need(b.dtype == a.dtype, f"b: expected a's dtype {a.dtype}, got {b.dtype}")
    check_sizes(a, b, acc, bias, cu_seqlens, out)


def need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"samebits.backends.cuda: {what}")


def check_sizes(
    a: Tensor, b: Tensor, acc: Tensor | None, bias: Tensor | None, cu_seqlens: Tensor | None, out: Tensor
) -> None:
    """Refuse operands of different devices or that do not fit together, whatever dtypes a and b have."""

    given = {"a": a, "b": b, "acc": acc, "bias": bias, "cu_seqlens": cu_seqlens, "out": out}
    for name, x in given.items():
        if x is not None:
            need(
                x.is_cuda and x.device == a.device, f"{name}: expected a tensor on {a.device}, got {x.device}"
            )
    need(out.dtype in KINDS, f"out: expected float32, bfloat16 or float16, got {out.dtype}")
    need(2 <= a.ndim <= 4 and 2 <= b.ndim <= 4, "a, b: expected 2 to 4 dimensions")
    need((a.ndim == 4) == (b.ndim == 4), "a, b: both or neither have segments (4 dimensions)")
    need(a.shape[-1] == b.shape[-2], f"a, b: K differs: {tuple(a.shape)} and {tuple(b.shape)}")
    batch = {x.shape[0] for x in (a, b) if x.ndim > 2} - {1}
    need(len(batch) <= 1, f"a, b: batches differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.ndim == 4:
        need(a.shape[1] == b.shape[1], f"a, b: segments differ: {tuple(a.shape)} and {tuple(b.shape)}")
    matrix = (a.shape[-2], b.shape[-1])
    shapes = [(*batch, *matrix)] if batch else [matrix, (1, *matrix)]
    need(tuple(out.shape) in shapes, f"out: expected {shapes[0]}, got {tuple(out.shape)}")
    if acc is not None:
        need(acc.dtype == torch.float32, f"acc: expected float32, got {acc.dtype}")
        need(acc.shape == out.shape, f"acc: expected {tuple(out.shape)}, got {tuple(acc.shape)}")
    if bias is not None:
        need(bias.dtype in KINDS, f"bias: expected float32, bfloat16 or float16, got {bias.dtype}")
        need(tuple(bias.shape) == matrix[1:], f"bias: expected {matrix[1:]}, got {tuple(bias.shape)}")
    if cu_seqlens is not None:
        need(a.ndim < 4, "cu_seqlens: expected a, b without segments")
        need(cu_seqlens.dtype in (torch.int32, torch.int64), f"cu_seqlens: got {cu_seqlens.dtype}")
        need(cu_seqlens.ndim == 1 and cu_seqlens.numel() > 0, f"cu_seqlens: got {tuple(cu_seqlens.shape)}")
        need(cu_seqlens.is_contiguous(), "cu_seqlens: expected contiguous")
