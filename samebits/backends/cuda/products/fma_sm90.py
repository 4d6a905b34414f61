"""Products under FMA of float32 matrices on Hopper.

Host side of ``kernels/fma_sm90.cu``, for many rows, and ``kernels/fma_few_sm90.cu``, for few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from samebits.backends.arch import SM_90
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products.plan import (
    CudaKernel,
    CudaPlan,
    matrix_strides,
    start_strides,
    writes_vectors,
)
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.cuda.products.tensor_core_sm90 import EPILOGUE_TYPES
from samebits.backends.cuda.tensor_maps import Maps
from samebits.backends.product import LARGEST, Matrix, Product, need, refuse_large

__all__ = ["FEW", "FMA_SM90", "MANY", "TERMS", "FmaFewSchedule", "FmaManySchedule", "FmaSm90Schedule"]

TILE_K = 32
"""k in a pipeline stage. A row of a raw tile is one line of the swizzle."""

_PARAMS = "128s128s P3q P3q Pq 10i".replace(" ", "")
_SMEM, _SMEM_OF_ALL, _SMEM_RESERVED = 227 << 10, 228 << 10, 1 << 10
_MOST_STAGES = 8
TERMS = (256, 1024, 4096)
"""Schedules are chosen for as many terms as the first of these that is not fewer, or for the last."""
_START, _STORE = 1500.0, 0.12
"""Nanoseconds of a round of blocks beside its arithmetic: in all, and for each element of a tile."""
_DRIFT = 80_000.0
"""Nanoseconds after which blocks of equal length no longer end together."""


@dataclass(frozen=True, slots=True)
class FmaSm90Schedule:
    """The schedule of either kernel.

    Attributes:
        thread_m, thread_n: a thread's share of the output, all of it in registers.
        lanes_m: rows of threads in a warp, which has 32 threads in all.
        warps_m, warps_n: rows and columns of warps in a block.
        depth: k, or quads of k, whose operands a thread has in registers. All except one are prefetched.
        min_blocks: blocks that must fit on one multiprocessor.
        by_k: nanoseconds for a tile over one k, where both operands are contiguous along k: of a block that
            has a multiprocessor to itself, and of each of the ``min_blocks`` that share one, on an H200.
        by_rows: the same two where an operand is contiguous along m or n.
    """

    thread_m: int
    thread_n: int
    lanes_m: int
    warps_m: int
    warps_n: int
    depth: int
    min_blocks: int
    by_k: tuple[float, float] = field(kw_only=True)
    by_rows: tuple[float, float] = field(kw_only=True)

    @property
    def tile_m(self) -> int:
        return self.thread_m * self.lanes_m * self.warps_m

    @property
    def tile_n(self) -> int:
        return self.thread_n * 32 // self.lanes_m * self.warps_n

    @property
    def helpers(self) -> int:
        """Warps that do not multiply."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return (self.warps_m * self.warps_n + self.helpers) * 32

    def each(self, m: int, n: int, k: int, batch: int, by_k: bool, sm_count: int) -> float:
        """Estimated nanoseconds for one of the k terms of ``batch`` matrices of ``[m, n]``.

        `by_k`: whether both operands are contiguous along k.
        """
        alone, busy = self.by_k if by_k else self.by_rows
        full = self.min_blocks * busy
        rounds, rest = self._rounds(m, n, batch, sm_count)
        if not rest:
            return rounds * full
        # Between one block on a multiprocessor and all that fit.
        more = self.shared(rounds, rest, full * k) - 1
        return rounds * full + alone + more * (full - alone) / max(1, self.min_blocks - 1)

    def time(self, m: int, n: int, k: int, batch: int, by_k: bool, sm_count: int) -> float:
        """Estimated nanoseconds in all: terms, and what a round of blocks takes beside them."""
        rounds, rest = self._rounds(m, n, batch, sm_count)
        beside = _START + _STORE * self.tile_m * self.tile_n
        return self.each(m, n, k, batch, by_k, sm_count) * k + (rounds + (rest > 0)) * beside

    def _rounds(self, m: int, n: int, batch: int, sm_count: int) -> tuple[int, float]:
        """Rounds of as many blocks as fit, and how many for each multiprocessor are in the last one."""
        tiles = -(-m // self.tile_m) * -(-n // self.tile_n) * batch
        rounds, rest = divmod(tiles / sm_count, self.min_blocks)
        return int(rounds), rest

    def shared(self, rounds: int, rest: float, length: float) -> int:
        """Blocks on one multiprocessor in the last round.

        The last round has `rest` blocks for each multiprocessor, and comes after `rounds` full rounds, of
        which each takes `length` nanoseconds.
        """
        # In the first round a multiprocessor may get one more than its share while others are idle.
        return 1 if rest <= 1 else min(self.min_blocks, math.ceil(rest if rounds else rest + 0.5))

    def spec(self, a_by_k: bool, b_by_k: bool) -> compiler.KernelSpec:
        """The kernel for operands that are contiguous along k, or along m and n."""
        raise NotImplementedError

    def _spec(self, entry: str, smem: int, **constants: int) -> compiler.KernelSpec:
        shared = {
            "THREAD_M": self.thread_m,
            "THREAD_N": self.thread_n,
            "LANES_M": self.lanes_m,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "DEPTH": self.depth,
            "MIN_BLOCKS": self.min_blocks,
            "SMEM": smem,
        }
        return compiler.KernelSpec(
            f"{entry}.cu",
            entry,
            _PARAMS,
            tuple((name, int(value)) for name, value in (shared | constants).items()),
            block=self.threads,
            smem=smem,
            programmatic=True,
            oldest=SM_90,
        )

    @property
    def _most_smem(self) -> int:
        return min(_SMEM, _SMEM_OF_ALL // self.min_blocks - _SMEM_RESERVED)


@dataclass(frozen=True, slots=True)
class FmaManySchedule(FmaSm90Schedule):
    """The schedule for many rows: ``kernels/fma_sm90.cu``, which reads one k of a row at a time.

    Attributes:
        unroll: k in an iteration of the inner loop. The instruction cache should hold its code.
        feeders: additional warps that fill the stages. Without them, the multiplying warps do so.
    """

    unroll: int
    feeders: int

    @property
    def helpers(self) -> int:
        return self.feeders

    def rings(self, a_by_k: bool, b_by_k: bool) -> tuple[int, int, int]:
        """Stages, raw tiles in flight, and bytes of shared memory for operands contiguous along k or not."""
        by_k = a_by_k + b_by_k
        stage = (self.tile_m + self.tile_n) * TILE_K * 4 + by_k * TILE_K * 8
        raw = (a_by_k * self.tile_m + b_by_k * self.tile_n) * TILE_K * 4
        if self.feeders:  # each feeder has its own raw tiles and stage
            choices = [
                (stages, self.feeders * more)
                for stages, more in itertools.product((8, 6, 4, 3, 2), (2, 1))
                if stages >= self.feeders
            ]
        else:  # copies for later stages stay in raw tiles until they are transposed
            choices = [(3, 3), (3, 2), (2, 2), (2, 1)]
        for stages, raws in choices:
            smem = stages * stage + raws * raw + (2 * stages + raws) * 8 + 16
            if smem + 1024 <= self._most_smem:  # 1024: the start is rounded up to the swizzle's period
                break
        return stages, raws, smem + 1024

    def spec(self, a_by_k: bool, b_by_k: bool) -> compiler.KernelSpec:
        stages, raws, smem = self.rings(a_by_k, b_by_k)
        return self._spec(
            "fma_sm90",
            smem,
            UNROLL=self.unroll,
            FEEDERS=self.feeders,
            STAGES=stages,
            RAW_STAGES=raws,
            A_TURNED=a_by_k,
            B_TURNED=b_by_k,
        )


@dataclass(frozen=True, slots=True)
class FmaFewSchedule(FmaSm90Schedule):
    """The schedule for few rows: ``kernels/fma_few_sm90.cu``, which reads four k of a row at a time.

    Attributes:
        lines: blocks of ``TILE_K`` k in a stage.
    """

    lines: int

    @property
    def helpers(self) -> int:
        return 1

    def shared(self, rounds: int, rest: float, length: float) -> int:
        # Short blocks end together. The first free multiprocessors then take more than their share.
        found = FmaSm90Schedule.shared(self, rounds, rest, length)
        return min(self.min_blocks, found + 1) if rounds and length < _DRIFT else found

    def spec(self, a_by_k: bool, b_by_k: bool) -> compiler.KernelSpec:
        line = sum(round_up(rows * TILE_K * 4, 1024) for rows in (self.tile_m, self.tile_n))
        stage = self.lines * line + 16
        stages = min(_MOST_STAGES, (self._most_smem - 1024) // stage)
        return self._spec(
            "fma_few_sm90",
            stages * stage + 1024,
            LINES=self.lines,
            STAGES=stages,
            A_BY_K=a_by_k,
            B_BY_K=b_by_k,
        )


MANY = (
    FmaManySchedule(8, 8, 4, 4, 3, 2, 1, 16, 2, by_k=(131, 131), by_rows=(122.7, 122.7)),
    FmaManySchedule(8, 8, 4, 4, 2, 2, 2, 16, 0, by_k=(93, 86), by_rows=(91.8, 85)),
    FmaManySchedule(8, 8, 4, 4, 2, 2, 1, 16, 3, by_k=(88.2, 88.2), by_rows=(83.2, 83.2)),
    FmaManySchedule(8, 8, 4, 4, 2, 2, 1, 32, 3, by_k=(90.3, 90.3), by_rows=(82, 82)),
    FmaManySchedule(8, 4, 4, 4, 3, 2, 1, 32, 3, by_k=(70.8, 70.8), by_rows=(67.7, 67.7)),
    FmaManySchedule(8, 8, 4, 2, 2, 2, 3, 16, 1, by_k=(61.8, 44.1), by_rows=(49.6, 40.9)),
    FmaManySchedule(8, 8, 4, 2, 2, 2, 2, 16, 2, by_k=(57.9, 47.2), by_rows=(47.6, 41.8)),
    FmaManySchedule(8, 4, 4, 2, 4, 2, 1, 32, 4, by_k=(45.9, 45.9), by_rows=(43.9, 43.9)),
    FmaManySchedule(8, 4, 4, 2, 2, 2, 4, 32, 1, by_k=(38, 24.3), by_rows=(30.5, 23.4)),
    FmaManySchedule(8, 4, 4, 2, 2, 2, 3, 32, 2, by_k=(32.6, 24.6), by_rows=(25.8, 22.7)),
    FmaManySchedule(8, 4, 4, 2, 2, 2, 1, 32, 4, by_k=(24.9, 24.9), by_rows=(24.4, 24.4)),
    FmaManySchedule(12, 2, 4, 1, 4, 2, 1, 32, 4, by_k=(21.8, 21.8), by_rows=(21.3, 21.3)),
    FmaManySchedule(4, 4, 4, 2, 2, 4, 3, 32, 2, by_k=(18.9, 14.5), by_rows=(13.7, 12.6)),
    FmaManySchedule(4, 4, 4, 2, 2, 4, 2, 32, 4, by_k=(14.8, 13.9), by_rows=(13.1, 12.7)),
    FmaManySchedule(4, 2, 4, 2, 2, 4, 3, 32, 4, by_k=(10.1, 9.5), by_rows=(10, 9.1)),
)

FEW = (
    FmaFewSchedule(1, 1, 1, 1, 1, 4, 2, 4, by_k=(2.05, 2.5), by_rows=(2.55, 2.5)),
    FmaFewSchedule(1, 1, 1, 1, 1, 4, 3, 2, by_k=(2.25, 2.2), by_rows=(2.75, 2.45)),
    FmaFewSchedule(1, 1, 4, 1, 1, 4, 3, 4, by_k=(2.1, 0.83), by_rows=(2.6, 1)),
    FmaFewSchedule(1, 1, 4, 2, 1, 4, 3, 4, by_k=(2.12, 1.38), by_rows=(2.62, 1.55)),
    FmaFewSchedule(1, 1, 4, 2, 2, 4, 1, 4, by_k=(2.4, 2.1), by_rows=(2.9, 2.9)),
    FmaFewSchedule(2, 1, 4, 1, 4, 4, 1, 4, by_k=(3.5, 2.9), by_rows=(4, 4)),
    FmaFewSchedule(2, 2, 4, 1, 3, 4, 1, 4, by_k=(4.5, 3.6), by_rows=(5, 5)),
    FmaFewSchedule(2, 2, 4, 2, 2, 2, 1, 4, by_k=(4.6, 4.2), by_rows=(5.1, 5.1)),
    FmaFewSchedule(4, 2, 4, 1, 3, 2, 2, 2, by_k=(7.6, 6.85), by_rows=(8.1, 7.1)),
    FmaFewSchedule(4, 2, 4, 1, 4, 2, 2, 2, by_k=(7.9, 7.45), by_rows=(8.4, 7.7)),
    FmaFewSchedule(4, 4, 4, 1, 3, 2, 3, 2, by_k=(13, 12.4), by_rows=(12.8, 12.2)),
    FmaFewSchedule(4, 4, 4, 1, 4, 2, 2, 2, by_k=(13.6, 12.65), by_rows=(13.6, 12.4)),
    FmaFewSchedule(4, 4, 4, 1, 4, 2, 3, 1, by_k=(15.2, 13.6), by_rows=(15.1, 13.3)),
)
_FEW_ROWS = 16  # unless both operands are contiguous along k


def _by_k(x: Matrix, row_dim: int, k_dim: int) -> bool | None:
    """Whether an operand is contiguous along k (or else along its rows); None if TMA cannot read it."""
    if x.dtype != torch.float32 or x.ndim > 3 or x.misalignment:
        return None
    if _batched(x) is None:
        return None
    rows, k, row_stride, k_stride = x.shape[row_dim], x.shape[k_dim], x.strides[row_dim], x.strides[k_dim]

    def lines(inner: int, step: int, outer: int, stride: int) -> bool:
        return (step == 1 or inner == 1) and (outer == 1 or (stride % 4 == 0 and inner <= stride < 1 << 37))

    if lines(rows, row_stride, k, k_stride):  # these need no transpose
        return False
    return True if lines(k, k_stride, rows, row_stride) else None


def terms(k: int) -> int:
    """How many terms a schedule is chosen for, of :data:`TERMS`."""
    return next((some for some in TERMS if k <= some), TERMS[-1])


def _both_by_k(p: Product) -> bool:
    """Whether both operands are contiguous along k, as those of ``linear``'s forward."""
    return bool(_by_k(p.a, -2, -1) and _by_k(p.b, -1, -2))


def _batched(x: Matrix) -> bool | None:
    """Whether every matrix of the batch has its own address; None if TMA cannot read them."""
    if x.ndim < 3 or x.shape[0] <= 1 or x.strides[0] == 0:
        return False
    return True if x.strides[0] > 0 and x.strides[0] % 4 == 0 else None


def _maps(x: Matrix, row_dim: int, k_dim: int, by_k: bool, tile: int) -> Maps:
    """The tensor maps of one operand."""
    inner, outer = (k_dim, row_dim) if by_k else (row_dim, k_dim)
    sizes = x.shape[inner], x.shape[outer]
    stride = x.strides[outer] if sizes[1] > 1 else -(-sizes[0] // 4) * 4
    batch, batch_stride = (x.shape[0], x.strides[0]) if _batched(x) else (1, stride * sizes[1])
    strides = (stride * 4, batch_stride * 4, batch_stride * 4)
    box = (TILE_K, tile, 1, 1) if by_k else (round_up(tile, 4), TILE_K, 1, 1)  # at least 16 bytes
    return Maps(torch.float32, (*sizes, 1, batch), strides, box, 128 if by_k else 0)


class FmaSm90Kernel(CudaKernel[Product, FmaSm90Schedule]):
    name, step = "fma_sm90", "fma"
    sources = "fma_sm90.cu", "fma_few_sm90.cu"

    @property
    def catalogue(self) -> Sequence[FmaSm90Schedule]:
        return MANY + FEW

    def supports(self, p: Product) -> bool:
        """Whether these are float32 matrices with K > 0 that TMA can read."""
        return (
            p.step == self.step
            and devices.device_info(p.device).arch.runs(self.name)
            and p.cu_seqlens is None
            and p.out.dtype == torch.float32
            and not p.out.empty
            and p.k > 0
            and max(*p.a.shape, *p.b.shape) <= LARGEST
            and _by_k(p.a, -2, -1) is not None
            and _by_k(p.b, -1, -2) is not None
        )

    def choose(self, p: Product) -> FmaSm90Schedule:
        by_k, sm_count = _both_by_k(p), devices.device_info(p.device).sm_count
        among: Sequence[FmaSm90Schedule] = MANY + FEW if by_k or p.m <= _FEW_ROWS else MANY
        return min(among, key=lambda s: s.time(p.m, p.n, terms(p.k), p.batch, by_k, sm_count))

    def cost(self, p: Product, s: FmaSm90Schedule) -> float:
        """Microseconds of all terms, to compare with ``fma``'s. The rest of a launch takes as long."""
        sm_count = devices.device_info(p.device).sm_count
        return s.each(p.m, p.n, terms(p.k), p.batch, _both_by_k(p), sm_count) * max(1, p.k) / 1000

    def plan(self, p: Product, s: FmaSm90Schedule | None = None) -> CudaPlan:
        need(
            self.supports(p),
            f"{self.name}: expected float32 matrices with terms, which TMA can read, on sm_90",
        )
        s = s or self.choose(p)
        a_by_k, b_by_k = bool(_by_k(p.a, -2, -1)), bool(_by_k(p.b, -1, -2))
        tiles_m, tiles_n = -(-p.m // s.tile_m), -(-p.n // s.tile_n)
        tiles = tiles_m * tiles_n * p.batch
        refuse_large(p, tiles)
        kernel = runtime.load(s.spec(a_by_k, b_by_k), p.device)
        a_maps = _maps(p.a, -2, -1, a_by_k, s.tile_m)
        b_maps = _maps(p.b, -1, -2, b_by_k, s.tile_n)
        out_strides, from_start = matrix_strides(p.out), start_strides(p)
        bias_stride = 0 if p.bias is None else p.bias.strides[0]
        sizes = (
            *(p.m, p.n, p.k, tiles_m, tiles_n),
            *(bool(_batched(p.a)), bool(_batched(p.b))),
            *(p.sequences, writes_vectors(p.out), EPILOGUE_TYPES[None if p.bias is None else p.bias.dtype]),
        )

        def launch(a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
            kernel.launch(
                (tiles, 1, 1),
                a_maps[a],
                b_maps[b],
                out,
                *out_strides,
                start,
                *from_start,
                bias,
                bias_stride,
                *sizes,
            )

        return CudaPlan(launch, a_maps, b_maps)


FMA_SM90 = FmaSm90Kernel()
