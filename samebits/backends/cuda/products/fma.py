"""The universal product under FMA: host side of ``kernels/fma.cu``.

It takes every layout, stride, alignment and size, and operands of any supported dtype, on sm_75 and newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from samebits.backends.arch import OLDEST
from samebits.backends.cuda import compiler, devices
from samebits.backends.cuda.products.plan import (
    GROUPED_PARAMS,
    PARAMS,
    TYPES,
    CudaKernel,
    CudaPlan,
    TileLayout,
    nothing,
    tile_layout,
    tile_plan,
)
from samebits.backends.product import Product, refuse_large

__all__ = ["FMA", "SCHEDULES", "FmaSchedule", "kernel_spec"]


@dataclass(frozen=True, slots=True)
class FmaSchedule:
    """The schedule of the universal kernel under FMA.

    Attributes:
        tile_k: k in a pipeline stage.
        thread_m, thread_n: a thread's share of the output, all of it in registers.
        lanes_m: rows of threads in a warp, which has 32 threads in all.
        warps_m, warps_n: rows and columns of warps in a block.
        helpers: warps of a block that copy, so that the others only multiply.
        stages: tiles in flight.
        step: k whose operands are read from shared memory at a time.
        min_blocks: blocks that must fit on one multiprocessor, from sm_90 on.
        alone, busy: nanoseconds for a tile over one k, fitted to times of ``benchmarks.tune`` on an H200.
            ``alone`` is for a block that has a multiprocessor to itself. ``busy`` is for each of many that
            share one.
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
        """Bytes of shared memory that suffice for every layout of operands."""
        return (self._floats(self.tile_m) + self._floats(self.tile_n)) * 4 * self.stages

    def time(self, m: int, n: int, batch: int, sm_count: int) -> float:
        """Estimated nanoseconds for one k of ``batch`` matrices of ``[m, n]``."""
        tiles = -(-m // self.tile_m) * -(-n // self.tile_n) * batch
        return max(self.alone, -(-tiles // sm_count) * self.busy)

    def _floats(self, rows: int) -> int:
        return max(rows * (self.tile_k + 4), self.tile_k * (rows + 4 if rows % 2 == 0 else rows))


SCHEDULES = (
    FmaSchedule(32, 8, 8, 4, 4, 2, 0, 3, 1, 2, alone=106, busy=94),
    FmaSchedule(32, 8, 4, 4, 2, 2, 0, 3, 2, 3, alone=40, busy=28.5),
    FmaSchedule(32, 8, 4, 4, 2, 2, 4, 3, 2, 1, alone=35, busy=29.5),
    FmaSchedule(32, 4, 4, 4, 2, 2, 4, 4, 4, 1, alone=21, busy=16.8),
    FmaSchedule(64, 4, 2, 4, 2, 2, 4, 4, 4, 1, alone=13.4, busy=10.5),
    FmaSchedule(64, 2, 2, 4, 2, 2, 4, 4, 8, 1, alone=8, busy=6),
    FmaSchedule(64, 2, 2, 2, 2, 1, 4, 4, 8, 1, alone=6.9, busy=4.6),
    FmaSchedule(64, 2, 1, 1, 2, 1, 4, 4, 8, 1, alone=5.4, busy=4.2),
    FmaSchedule(128, 2, 1, 1, 1, 1, 4, 4, 16, 1, alone=4.7, busy=3.8),
    FmaSchedule(256, 1, 1, 1, 1, 1, 4, 3, 16, 1, alone=3.9, busy=3.5),
)


def kernel_spec(
    schedule: FmaSchedule,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    a: TileLayout,
    b: TileLayout,
    sequences: bool,
    grouped: str | None = None,
) -> compiler.KernelSpec:
    """The kernel for operands with these layouts, and `dtypes` of a, b and the output.

    `grouped`: the macro GROUPED, of a grouped product.
    """
    sizes = {name.upper(): value for name, value in asdict(schedule).items() if name not in ("alone", "busy")}
    constants = sizes | {
        "A_KIND": TYPES[dtypes[0]],
        "B_KIND": TYPES[dtypes[1]],
        "OUT_KIND": TYPES[dtypes[2]],
        "A_COPY": _copy(a, schedule.step, schedule.thread_m),
        "B_COPY": _copy(b, schedule.step if schedule.thread_n < 8 else 1, schedule.thread_n),
        "SEQUENCES": int(sequences),
    }
    if grouped is not None:
        constants["GROUPED"] = grouped
    return compiler.KernelSpec(
        "fma.cu",
        "fma_product",  # fma is a function of the C library
        PARAMS if grouped is None else GROUPED_PARAMS,
        tuple(constants.items()),
        block=schedule.threads,
        smem=schedule.smem,
        oldest=OLDEST,
    )


def _copy(x: TileLayout, step: int, thread: int) -> str:
    """How tiles of `x` are copied, as the kernel's enum Copy. A thread takes `thread` rows."""
    if x.vector and x.k_major and step % 4 == 0:
        return "FOUR_K"
    if x.vector and not x.k_major and thread % 4 == 0:
        return "FOUR_ROWS"
    if not x.k_major:
        return "ALONG_ROWS"
    return "ALONG_UNIT_K" if x.strides[3] == 1 else "ALONG_K"


class FmaKernel(CudaKernel[Product, FmaSchedule]):
    name, step = "fma", "fma"

    @property
    def catalogue(self) -> Sequence[FmaSchedule]:
        return SCHEDULES

    def supports(self, p: Product) -> bool:
        return p.step == self.step

    def all(self, p: Product) -> Sequence[FmaSchedule]:
        most = devices.device_info(p.device).max_smem
        return [s for s in SCHEDULES if s.smem <= most]

    def choose(self, p: Product) -> FmaSchedule:
        return min(self.all(p), key=lambda s: self.cost(p, s))

    def cost(self, p: Product, s: FmaSchedule) -> float:
        sm_count = devices.device_info(p.device).sm_count
        return s.time(p.m, p.n, p.batch, sm_count) * max(1, p.k) / 1000

    def plan(self, p: Product, s: FmaSchedule | None = None) -> CudaPlan:
        s = s or self.choose(p)
        ragged = p.cu_seqlens is not None
        a = tile_layout(p.a, -2, -1, chunk=4, ragged=ragged)
        b = tile_layout(p.b, -1, -2, chunk=4, ragged=ragged)
        tiles_m, tiles_n = -(-p.m // s.tile_m), -(-p.n // s.tile_n)
        refuse_large(p, tiles_m * tiles_n * p.batch)
        if p.out.empty:
            return CudaPlan(nothing)
        sequences = ragged or p.a.ndim == 4
        spec = kernel_spec(s, (p.a.dtype, p.b.dtype, p.out.dtype), a, b, sequences)
        return tile_plan(p, spec, a, b, tiles_m, tiles_n, p.sequences)


FMA = FmaKernel()
