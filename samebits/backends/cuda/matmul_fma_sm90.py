"""Host side of ``kernels/matmul_fma_sm90.cu``: products under FMA of f32 matrices on Hopper."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.cuda import runtime
from samebits.backends.cuda.matmul_sm80 import LARGEST, matrix_strides
from samebits.backends.cuda.matmul_sm90 import TYPES, Maps

__all__ = ["SCHEDULES", "Plan", "Schedule", "kernel_spec", "supports"]

TILE_K = 32
"""k in a pipeline stage: a row of a raw tile is one line of the swizzle."""

_PARAMS = "128s128s P3q P3q Pq 10i".replace(" ", "")
_SMEM, _SMEM_OF_ALL, _SMEM_RESERVED = 227 << 10, 228 << 10, 1 << 10


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the work is cut. It never changes a bit.

    Attributes:
        thread_m, thread_n: a thread's share of the output, all of it in registers.
        lanes_m: rows of threads in a warp, of 32 threads in all.
        warps_m, warps_n: rows and columns of warps in a block.
        depth: k whose operands a thread has in registers, all but one of them read ahead.
        unroll: k in a turn of the inner loop, whose code the instruction cache should hold.
        feeders: more warps that fill the stages for these; without any, they do so themselves.
        min_blocks: blocks that shall fit on one multiprocessor.
        alone, busy: nanoseconds for a tile over one k, fitted to times of ``benchmarks.fma_tune`` on an H200:
            of a block that has a multiprocessor to itself, and for each of the ``min_blocks`` that share one.
    """

    thread_m: int
    thread_n: int
    lanes_m: int
    warps_m: int
    warps_n: int
    depth: int
    unroll: int
    feeders: int
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
        return (self.warps_m * self.warps_n + self.feeders) * 32

    def rings(self, a_turned: bool, b_turned: bool) -> tuple[int, int, int]:
        """Stages, raw tiles in flight, and bytes of shared memory for operands contiguous along k or not."""
        turned = a_turned + b_turned
        stage = (self.tile_m + self.tile_n) * TILE_K * 4 + turned * TILE_K * 8
        raw = (a_turned * self.tile_m + b_turned * self.tile_n) * TILE_K * 4
        most = min(_SMEM, _SMEM_OF_ALL // self.min_blocks - _SMEM_RESERVED)
        if self.feeders:  # each has raw tiles, and a stage, of its own
            choices = [
                (stages, self.feeders * more)
                for stages, more in itertools.product((8, 6, 4, 3, 2), (2, 1))
                if stages >= self.feeders
            ]
        else:  # what is copied for stages ahead lies in raw tiles until it is turned
            choices = [(3, 3), (3, 2), (2, 2), (2, 1)]
        for stages, raws in choices:
            smem = stages * stage + raws * raw + (2 * stages + raws) * 8 + 16
            if smem + 1024 <= most:  # the swizzle's period, to which the beginning is rounded up
                break
        return stages, raws, smem + 1024

    def time(self, m: int, n: int, batch: int, sm_count: int) -> float:
        """Estimated nanoseconds for one k of ``batch`` matrices of ``[m, n]``."""
        tiles = -(-m // self.tile_m) * -(-n // self.tile_n) * batch
        rounds, rest = divmod(tiles / sm_count, self.min_blocks)  # of as many as fit, and of the rest
        time = rounds * max(self.alone, self.min_blocks * self.busy)
        if rest == 0:
            return time
        # A multiprocessor may get one more than its share while others wait.
        shared = 1 if rest <= 1 else min(self.min_blocks, math.ceil(rest + 0.5))
        return time + max(self.alone, shared * self.busy)


SCHEDULES = (
    Schedule(8, 8, 4, 4, 2, 2, 16, 0, 2, alone=93.5, busy=85.9),
    Schedule(8, 8, 4, 4, 1, 2, 16, 1, 3, alone=56.4, busy=43.7),
    Schedule(8, 8, 4, 2, 2, 2, 16, 2, 2, alone=58.3, busy=43.0),
    Schedule(8, 4, 4, 2, 2, 2, 32, 1, 4, alone=29.9, busy=23.0),
    Schedule(8, 4, 4, 2, 2, 2, 32, 2, 3, alone=32.8, busy=22.9),
    Schedule(8, 4, 4, 2, 2, 2, 32, 4, 1, alone=25.2, busy=24.0),
    Schedule(12, 2, 4, 1, 4, 2, 32, 4, 1, alone=21.6, busy=20.4),
    Schedule(4, 4, 4, 2, 2, 4, 32, 2, 3, alone=19.7, busy=13.3),
    Schedule(4, 4, 4, 2, 2, 4, 32, 4, 2, alone=15.1, busy=14.0),
    Schedule(4, 2, 4, 2, 2, 4, 32, 4, 3, alone=10.3, busy=9.2),
)


def kernel_spec(schedule: Schedule, a_turned: bool, b_turned: bool) -> runtime.KernelSpec:
    """The kernel for operands that are contiguous along k (turned) or along m and n."""
    s = schedule
    stages, raws, smem = s.rings(a_turned, b_turned)
    constants = {
        "THREAD_M": s.thread_m,
        "THREAD_N": s.thread_n,
        "LANES_M": s.lanes_m,
        "WARPS_M": s.warps_m,
        "WARPS_N": s.warps_n,
        "DEPTH": s.depth,
        "UNROLL": s.unroll,
        "FEEDERS": s.feeders,
        "MIN_BLOCKS": s.min_blocks,
        "STAGES": stages,
        "RAW_STAGES": raws,
        "SMEM": smem,
        "A_TURNED": int(a_turned),
        "B_TURNED": int(b_turned),
    }
    return runtime.KernelSpec(
        "matmul_fma_sm90.cu",
        "matmul_fma_sm90",
        _PARAMS,
        tuple(constants.items()),
        block=s.threads,
        smem=smem,
        programmatic=True,
        oldest=(9, 0),
    )


def _turned(x: Tensor, row_dim: int, k_dim: int) -> bool | None:
    """Whether an operand is contiguous along k (or else along its rows); None if TMA cannot read it."""
    if x.dtype != torch.float32 or x.ndim > 3 or x.data_ptr() % 16:
        return None
    if x.ndim == 3 and x.shape[0] > 1 and x.stride(0) and (x.stride(0) < 0 or x.stride(0) % 4):
        return None
    rows, k, row_stride, k_stride = x.shape[row_dim], x.shape[k_dim], x.stride(row_dim), x.stride(k_dim)

    def lines(inner: int, step: int, outer: int, stride: int) -> bool:
        return (step == 1 or inner == 1) and (outer == 1 or (stride % 4 == 0 and inner <= stride < 1 << 37))

    if lines(rows, row_stride, k, k_stride):  # such need not be turned
        return False
    return True if lines(k, k_stride, rows, row_stride) else None


def supports(a: Tensor, b: Tensor, out: Tensor, *, cu_seqlens: Tensor | None = None) -> bool:
    """Whether the kernel takes these operands: float32 matrices with terms, which TMA can read."""
    return (
        cu_seqlens is None
        and out.dtype == torch.float32
        and out.numel() > 0
        and a.shape[-1] > 0
        and max(*a.shape, *b.shape) <= LARGEST
        and _turned(a, -2, -1) is not None
        and _turned(b, -1, -2) is not None
    )


def _maps(x: Tensor, row_dim: int, k_dim: int, turned: bool, tile: int) -> Maps:
    """One operand as the kernel's tensor map sees it."""
    inner, outer = (k_dim, row_dim) if turned else (row_dim, k_dim)
    sizes = x.shape[inner], x.shape[outer]
    stride = x.stride(outer) if sizes[1] > 1 else -(-sizes[0] // 4) * 4
    batch, batch_stride = (x.shape[0], x.stride(0)) if _batched(x) else (1, stride * sizes[1])
    strides = (stride * 4, batch_stride * 4, batch_stride * 4)
    box = (TILE_K, tile, 1, 1) if turned else (tile, TILE_K, 1, 1)
    return Maps(torch.float32, (*sizes, 1, batch), strides, box, 128 if turned else 0)


def _batched(x: Tensor) -> bool:
    return x.ndim == 3 and x.shape[0] > 1 and x.stride(0) > 0


class Plan:
    """Everything of a call but its addresses; see ``matmul_fma.matmul``, which has checked the operands."""

    __slots__ = ("_a", "_acc", "_b", "_bias", "_grid", "_kernel", "_out", "_sizes")

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        acc: Tensor | None,
        bias: Tensor | None,
        closing: bool,
        schedule: Schedule,
    ) -> None:
        (m, k), n, batch = a.shape[-2:], b.shape[-1], out.shape[0] if out.ndim == 3 else 1
        a_turned, b_turned = bool(_turned(a, -2, -1)), bool(_turned(b, -1, -2))
        tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
        tiles = tiles_m * tiles_n * batch
        if tiles > LARGEST:
            raise ValueError(
                f"samebits: a product of a {tuple(a.shape)} by b {tuple(b.shape)} has a size above {LARGEST}"
            )
        self._kernel = runtime.load(kernel_spec(schedule, a_turned, b_turned), out.get_device())
        self._grid = tiles, 1, 1
        self._a = _maps(a, -2, -1, a_turned, schedule.tile_m)
        self._b = _maps(b, -1, -2, b_turned, schedule.tile_n)
        self._out = strides = matrix_strides(out)
        self._acc = None if acc is None else matrix_strides(acc)
        self._bias = 0 if bias is None else bias.stride(0)
        together = strides[2] == 1 and out.data_ptr() % 16 == 0 and strides[0] % 4 == strides[1] % 4 == 0
        self._sizes = (
            *(m, n, k, tiles_m, tiles_n),
            *(_batched(a), _batched(b)),
            *(closing, together, TYPES[None if bias is None else bias.dtype]),
        )

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int, acc: int | None = None) -> None:
        """Run on operands at these addresses; accumulators lie at ``acc``, or else at ``out``."""
        start = (0, 0, 0, 0) if self._acc is None else (out if acc is None else acc, *self._acc)
        self._kernel.launch(
            self._grid, self._a[a], self._b[b], out, *self._out, *start, bias, self._bias, *self._sizes
        )
