"""The universal tensor-core product: host side of ``kernels/tensor_core.cu``.

It takes every layout, stride, alignment and size on sm_80 and newer. Faster kernels are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

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

__all__ = ["SCHEDULES", "TENSOR_CORE", "TensorCoreSchedule", "kernel_spec"]


@dataclass(frozen=True, slots=True)
class TensorCoreSchedule:
    """The schedule of the universal tensor-core kernel.

    Attributes:
        tile_m, tile_n: a block's share of the output.
        tile_k: k in a pipeline stage.
        warps_m, warps_n: rows and columns of warps that share a block's tile.
        stages: tiles in flight.
        min_blocks: blocks that must fit on one multiprocessor.
        alone, busy: microseconds for a tile over 4096 k, measured on an H200. ``alone`` is with few blocks on
            the GPU. ``busy`` is for each of many blocks that a multiprocessor takes.
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
    TensorCoreSchedule(128, 256, 32, 2, 4, 4, 1, alone=86, busy=89),
    TensorCoreSchedule(128, 128, 32, 2, 2, 4, 2, alone=55, busy=42),
    TensorCoreSchedule(64, 64, 64, 2, 2, 3, 3, alone=30, busy=14.5),
    TensorCoreSchedule(16, 32, 128, 1, 2, 5, 1, alone=14.5, busy=6),
    TensorCoreSchedule(64, 16, 64, 4, 1, 4, 2, alone=20, busy=8.5),
)


def kernel_spec(
    schedule: TensorCoreSchedule, dtype: torch.dtype, a: TileLayout, b: TileLayout, grouped: str | None = None
) -> compiler.KernelSpec:
    """The kernel for operands with these layouts. `grouped`: the macro GROUPED, of a grouped product."""
    sizes = {name.upper(): value for name, value in asdict(schedule).items() if name not in ("alone", "busy")}
    constants = sizes | {
        "INPUT_BF16": int(dtype == torch.bfloat16),
        "A_K_MAJOR": int(a.k_major),
        "A_VECTOR": int(a.vector),
        "B_K_MAJOR": int(b.k_major),
        "B_VECTOR": int(b.vector),
    }
    if grouped is not None:
        constants["GROUPED"] = grouped
    return compiler.KernelSpec(
        "tensor_core.cu",
        "tensor_core",
        PARAMS if grouped is None else GROUPED_PARAMS,
        tuple(constants.items()),
        block=schedule.threads,
        smem=schedule.smem,
    )


class TensorCoreKernel(CudaKernel[Product, TensorCoreSchedule]):
    name, step = "tensor_core", "mma"

    @property
    def catalogue(self) -> Sequence[TensorCoreSchedule]:
        return SCHEDULES

    def supports(self, p: Product) -> bool:
        return p.step == self.step

    def choose(self, p: Product) -> TensorCoreSchedule:
        # The times are of full tiles. In a tile that is mostly padding, loads are mostly padding, too.
        full = [s for s in SCHEDULES if s.tile_m <= 2 * max(p.m, 8) and s.tile_n <= 2 * max(p.n, 8)]
        return min(full or SCHEDULES[-2:], key=lambda s: self.cost(p, s))

    def cost(self, p: Product, s: TensorCoreSchedule) -> float:
        info = devices.device_info(p.device)
        tiles = -(-p.m // s.tile_m) * -(-p.n // s.tile_n) * p.batch
        shared = 2 * s.smem <= info.max_smem  # blocks hide each other's latency only if two fit
        busy = s.busy if shared else max(s.alone, s.busy)
        return max(s.alone, -(-tiles // info.sm_count) * busy) * max(1, p.k) / 4096

    def plan(self, p: Product, s: TensorCoreSchedule | None = None) -> CudaPlan:
        s = s or self.choose(p)
        ragged = p.cu_seqlens is not None
        a = tile_layout(p.a, -2, -1, chunk=8, ragged=ragged)
        b = tile_layout(p.b, -1, -2, chunk=8, ragged=ragged)
        tiles_m, tiles_n = -(-p.m // s.tile_m), -(-p.n // s.tile_n)
        # Each packed sequence starts a new step along K. Sequences on an axis all have k terms.
        steps = p.k // 16 + p.sequence_count if ragged else -(-p.k // 16) * p.sequence_count
        refuse_large(p, tiles_m * tiles_n * p.batch, steps)
        if p.out.empty:
            return CudaPlan(nothing)
        spec = kernel_spec(s, p.a.dtype, a, b)
        return tile_plan(p, spec, a, b, tiles_m, tiles_n, TYPES[p.out.dtype])


TENSOR_CORE = TensorCoreKernel()
