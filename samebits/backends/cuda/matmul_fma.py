"""Products under FMA on CUDA tensors: ``kernels/matmul_fma.cu``.

It takes every layout, stride, alignment and size, and operands of any supported dtype, on sm_75 and newer.
What ``matmul_fma_sm90`` takes too, that runs where it should be faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from samebits.backends.cuda import matmul_fma_sm90, runtime
from samebits.backends.cuda.matmul_sm80 import (
    KINDS,
    LARGEST,
    PARAMS,
    Layout,
    Plan,
    check_sizes,
    complete,
    layout,
    need,
    run,
)

__all__ = ["SCHEDULES", "Schedule", "choose_schedule", "kernel_spec", "matmul", "plan"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the work is cut. It never changes a bit.

    Attributes:
        tile_k: k in a pipeline stage.
        thread_m, thread_n: a thread's share of the output, all of it in registers.
        lanes_m: rows of threads in a warp, of 32 threads in all.
        warps_m, warps_n: rows and columns of warps in a block.
        helpers: warps of a block that copy for these, which then only multiply.
        stages: tiles in flight.
        step: k whose operands are read from shared memory at a time.
        min_blocks: blocks that shall fit on one multiprocessor, from sm_90 on.
        alone, busy: nanoseconds for a tile over one k, fitted to times of ``benchmarks.fma_tune`` on an H200:
            of a block that has a multiprocessor to itself, and for each of many that share one.
    """

    tile_k: int
    thread_m: int
    thread_n: int
    lanes_m: int
    warps_m: int
    warps_n: int
    helpers: int
    stages: int
    step: int
    min_blocks: int
    alone: float
    busy: float

    @property
    def tile_m(self) -> int:
        return self.thread_m * self.lanes_m * self.warps_m

    @property
    def tile_n(self) -> int:
        return self.thread_n * 32 // self.lanes_m * self.warps_n

    @property
    def threads(self) -> int:
        return (self.warps_m * self.warps_n + self.helpers) * 32

    @property
    def smem(self) -> int:
        """Bytes of shared memory that suffice, however operands lie in it."""
        return (self._floats(self.tile_m) + self._floats(self.tile_n)) * 4 * self.stages

    def time(self, m: int, n: int, batch: int, sm_count: int) -> float:
        """Estimated nanoseconds for one k of ``batch`` matrices of ``[m, n]``."""
        tiles = -(-m // self.tile_m) * -(-n // self.tile_n) * batch
        return max(self.alone, -(-tiles // sm_count) * self.busy)

    def _floats(self, rows: int) -> int:
        return max(rows * (self.tile_k + 4), self.tile_k * (rows + 4 if rows % 2 == 0 else rows))


SCHEDULES = (
    Schedule(32, 8, 8, 4, 4, 2, 0, 3, 1, 2, alone=106, busy=94),
    Schedule(32, 8, 4, 4, 2, 2, 0, 3, 2, 3, alone=40, busy=28.5),
    Schedule(32, 8, 4, 4, 2, 2, 4, 3, 2, 1, alone=35, busy=29.5),
    Schedule(32, 4, 4, 4, 2, 2, 4, 4, 4, 1, alone=21, busy=16.8),
    Schedule(64, 4, 2, 4, 2, 2, 4, 4, 4, 1, alone=13.4, busy=10.5),
    Schedule(64, 2, 2, 4, 2, 2, 4, 4, 8, 1, alone=8, busy=6),
    Schedule(64, 2, 2, 2, 2, 1, 4, 4, 8, 1, alone=6.9, busy=4.6),
    Schedule(64, 2, 1, 1, 2, 1, 4, 4, 8, 1, alone=5.4, busy=4.2),
    Schedule(128, 2, 1, 1, 1, 1, 4, 4, 16, 1, alone=4.7, busy=3.8),
    Schedule(256, 1, 1, 1, 1, 1, 4, 3, 16, 1, alone=3.9, busy=3.5),
)


def choose_schedule(m: int, n: int, batch: int, info: runtime.DeviceInfo) -> Schedule:
    """The schedule that should be fastest for ``batch`` matrices of ``[m, n]``."""
    return min(
        (s for s in SCHEDULES if s.smem <= info.max_smem), key=lambda s: s.time(m, n, batch, info.sm_count)
    )


def kernel_spec(
    schedule: Schedule,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    a: Layout,
    b: Layout,
    segmented: bool,
) -> runtime.KernelSpec:
    """The kernel for operands of such layouts, and `dtypes` of a, b and the output."""
    sizes = {name.upper(): value for name, value in asdict(schedule).items() if name not in ("alone", "busy")}
    constants = sizes | {
        "A_KIND": KINDS[dtypes[0]],
        "B_KIND": KINDS[dtypes[1]],
        "OUT_KIND": KINDS[dtypes[2]],
        "A_COPY": _copy(a, schedule.step, schedule.thread_m),
        "B_COPY": _copy(b, schedule.step if schedule.thread_n < 8 else 1, schedule.thread_n),
        "SEGMENTED": int(segmented),
    }
    return runtime.KernelSpec(
        "matmul_fma.cu",
        "matmul_fma",
        PARAMS,
        tuple(constants.items()),
        block=schedule.threads,
        smem=schedule.smem,
        oldest=runtime.OLDEST,
    )


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    closing: bool = False,
    out: Tensor,
    schedule: Schedule | matmul_fma_sm90.Schedule | None = None,
) -> Tensor:
    """``out = acc + a @ b + bias``: one chain of fused multiply-adds for every element, then one rounding.

    Args:
        a: ``[M, K]``, ``[B, M, K]`` or ``[B, S, M, K]``, float32, bfloat16 or float16 on a CUDA device, any
            strides. With four dimensions the chain runs over k of every segment s in turn.
        b: ``[K, N]``, ``[B, K, N]`` or ``[B, S, K, N]``, also of any dtype. B may be 1 or missing in either.
        acc: float32, of out's shape: the chains start from it. It may be ``out`` itself.
        bias: ``[N]``, float32, bfloat16 or float16.
        cu_seqlens: int32 or int64 ``[S + 1]``, ascending bounds in k of segments of one K axis.
        closing: every segment that has a term is followed by fma(+0, +0, acc), as sequences are.
        out: ``[M, N]`` or ``[B, M, N]``, float32, bfloat16 or float16, any strides.
        schedule: one of :data:`SCHEDULES`, or of ``matmul_fma_sm90.SCHEDULES`` where that takes the operands;
            by default the one that should be fastest.
    """
    planned = plan(a, b, out, acc=acc, bias=bias, cu_seqlens=cu_seqlens, closing=closing, schedule=schedule)
    run(planned, a, b, out, bias, cu_seqlens, acc)
    return out


def plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    closing: bool = False,
    schedule: Schedule | matmul_fma_sm90.Schedule | None = None,
) -> Plan | matmul_fma_sm90.Plan:
    """How :func:`matmul` runs these operands, and others of their shapes, strides, dtypes and alignment."""
    check(a, b, acc, bias, cu_seqlens, out)
    (m, k), n, batch = a.shape[-2:], b.shape[-1], out.shape[0] if out.ndim == 3 else 1
    segments = a.shape[1] if a.ndim == 4 else 1
    if cu_seqlens is not None:
        segments = cu_seqlens.numel() - 1
    info = runtime.device_info(out.device.index)
    taken = matmul_fma_sm90.supports(a, b, out, cu_seqlens=cu_seqlens)
    if schedule is None:
        schedule = choose_schedule(m, n, batch, info)
        if info.capability == (9, 0) and taken:
            other = matmul_fma_sm90.choose_schedule(a, b, info.sm_count)
            if other.time(m, n, batch, info.sm_count) < schedule.time(m, n, batch, info.sm_count):
                schedule = other
    if isinstance(schedule, matmul_fma_sm90.Schedule):
        need(
            taken,
            "a, b, out, cu_seqlens: this schedule takes float32 matrices with terms, which TMA can read",
        )
        return matmul_fma_sm90.Plan(a, b, out, acc, bias, closing, schedule)
    layout_a = layout(a, -2, -1, chunk=4, ragged=cu_seqlens is not None)
    layout_b = layout(b, -1, -2, chunk=4, ragged=cu_seqlens is not None)
    tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
    tiles = tiles_m * tiles_n * batch
    if max(m, n, k, tiles, segments) > LARGEST:
        raise ValueError(
            f"samebits: a product of a {tuple(a.shape)} by b {tuple(b.shape)} has a size above {LARGEST}"
        )
    kernel = None
    if tiles > 0:
        segmented = a.ndim == 4 or cu_seqlens is not None
        spec = kernel_spec(schedule, (a.dtype, b.dtype, out.dtype), layout_a, layout_b, segmented)
        kernel = runtime.load(spec, info.index)
    sizes = m, n, k, segments, tiles_m, tiles_n, closing
    return complete(kernel, tiles, layout_a, layout_b, out, acc, bias, cu_seqlens, sizes)


def _copy(x: Layout, step: int, thread: int) -> str:
    """How tiles of `x` are copied, of which a thread takes so many rows: enum Copy of the kernel."""
    if x.vector and x.k_major and step % 4 == 0:
        return "FOUR_K"
    if x.vector and not x.k_major and thread % 4 == 0:
        return "FOUR_ROWS"
    if not x.k_major:
        return "ALONG_ROWS"
    return "ALONG_UNIT_K" if x.strides[3] == 1 else "ALONG_K"


def check(
    a: Tensor, b: Tensor, acc: Tensor | None, bias: Tensor | None, cu_seqlens: Tensor | None, out: Tensor
) -> None:
    for name, x in (("a", a), ("b", b)):
        need(x.dtype in KINDS, f"{name}: expected float32, bfloat16 or float16, got {x.dtype}")
    check_sizes(a, b, acc, bias, cu_seqlens, out)
