"""Block-scaled products of FP8 matrices on Hopper: ``kernels/scaled_sm90.cu`` and ``scaled_few_sm90.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from samebits.backends.arch import SM_90
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products.plan import CudaPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule
from samebits.backends.cuda.products.tensor_core_sm90 import EPILOGUE_TYPES, NO_MAP, in_units
from samebits.backends.cuda.tensor_maps import Maps, Side, operand_maps
from samebits.backends.kernel import Kernel

__all__ = [
    "PAIR",
    "SCALED_SM90",
    "SCHEDULES",
    "Scaled",
    "ScaledSchedule",
    "fits",
    "output_maps",
    "schedule",
    "spec",
]

BLOCK = 128
"""Terms of a chain, and rows of a block that share a scale."""

_PARAMS = "128s128s128sPPPqq8iPPqqqq"
PAIR = torch.bfloat16
"""What a pair of FP8 elements is to the copy engine: one of 16 bits."""


@dataclass(frozen=True, slots=True)
class ScaledSchedule:
    """A schedule of ``scaled_sm90``.

    Attributes:
        tile: as of a product of 16-bit elements that are pairs of FP8: its block of k is 64.
        chains: chains of a warpgroup that are multiplied or added at a time. With several, one is added while
            the tensor cores multiply the others.
        parts: blocks of a cluster that share a tile, each with every such block of k: ``scaled_few_sm90``.
    """

    tile: Sm90Schedule
    chains: int
    parts: int = 1


def schedule(
    block_m: int, block_n: int, chains: int, *, swap: bool = False, stages: int = 24, **more: int
) -> ScaledSchedule:
    """A schedule with as many of `stages` as fit. Its other fields follow from the arguments."""
    groups = block_m // 64
    tile = Sm90Schedule(block_m, block_n, 64, 2, groups, groups, swap=swap, early=swap, **more)
    filled = tile.filled(tile.panels)
    return ScaledSchedule(replace(filled, stages=min(filled.stages, stages)), chains)


_FEW = [schedule(64, n, 8, swap=True) for n in (8, 16)]
_STEADY = schedule(64, 8, 4, swap=True, stages=12)
"""Where almost all multiprocessors read weights: less at a time streams faster."""
_SOME = [schedule(64, 64, 2), schedule(128, 64, 2, group=8)]
_MANY = [schedule(128, 128, chains, group=8) for chains in (1, 2)]

_SHARED = 96 << 10
"""Bytes of shared memory for chains and scales where blocks share a tile."""
_LONG = 4096
"""Terms from which on they do."""


_PAIR = ScaledSchedule(Sm90Schedule(64, 8, 64, 0, 1, 1, swap=True, early=True).filled(_SHARED), 4, 2)

SCHEDULES = (
    *(*_FEW, _STEADY, _PAIR, *_SOME, *_MANY),
    *(schedule(128, 128, chains, cluster=2, group=8) for chains in (1, 2)),
    *(schedule(block_m, 64, 1, group=8) for block_m in (64, 128)),
    *(schedule(64, n, 2, swap=True) for n in (32, 64)),
    schedule(64, 128, 1, swap=True),
)
"""All schedules. None changes a bit."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The product ``out[m, n] = a[m, k] @ b[n, k].T``, scaled, without addresses.

    Attributes:
        a_stride, b_stride: elements from one row to the next, multiples of 16.
        scale_a, scale_b: strides of the scales, from one row of them to the next and along k.
        b_rows: whether every row of b has scales of its own; otherwise 128 of them share theirs.
        out_stride: elements from one row of the output to the next.
        out_misalignment: the output's address modulo 16.
    """

    device: int
    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    a_stride: int
    b_stride: int
    scale_a: tuple[int, int]
    scale_b: tuple[int, int]
    b_rows: bool
    out_dtype: torch.dtype
    out_stride: int
    out_misalignment: int = 0
    bias_dtype: torch.dtype | None = None

    @property
    def aligned(self) -> bool:
        """Whether rows of the output consist of whole units of 16 bytes."""
        return in_units(self.out_dtype, self.out_misalignment, self.n, self.out_stride)

    def panel(self, s: ScaledSchedule) -> int:
        """Columns that leave in one store of the copy engine, or 0."""
        return s.tile.panel if self.aligned and self.out_dtype != torch.float32 else 0


def spec(p: Scaled, s: ScaledSchedule) -> compiler.KernelSpec:
    """The kernel of `p` under `s`."""
    tile, panel = s.tile, p.panel(s)
    e5m2 = [int(dtype == torch.float8_e5m2) for dtype in (p.a_dtype, p.b_dtype)]
    rows = [1, int(p.b_rows)]
    if tile.swap:
        e5m2, rows = e5m2[::-1], rows[::-1]
    constants = {
        **{"INPUT_F16": 0, "A_MN": 0, "B_MN": 0, **tile.constants(), "FOLDED": 0},
        **{"A_E5M2": e5m2[0], "B_E5M2": e5m2[1], "A_ROWS": rows[0], "B_ROWS": rows[1], "CHAINS": s.chains},
        "TRANSPOSED": int(tile.swap),
        "OUTPUT": EPILOGUE_TYPES[p.out_dtype],
        "BIAS": EPILOGUE_TYPES[p.bias_dtype],
        "ACCUMULATE": 0,
        "ALIGNED": int(p.aligned),
        "PANEL": panel,
        "RAGGED": 0,
        "BOUND": "int",
    }
    if s.parts > 1:
        constants["PARTS"] = s.parts
    name = "scaled_sm90" if s.parts == 1 else "scaled_few_sm90"
    return compiler.KernelSpec(
        source=f"{name}.cu",
        entry=name,
        params=_PARAMS,
        constants=tuple(constants.items()),
        block=tile.threads,
        smem=tile.smem(panel, False, False) + (_SHARED if s.parts > 1 else 0),
        cluster=(tile.cluster * s.parts, 1, 1),
        programmatic=True,
        oldest=SM_90,
    )


def fits(p: Scaled, s: ScaledSchedule) -> bool:
    """Whether `s` can compute `p`. Scales of columns need registers that two wide chains take."""
    if s.parts > 1:
        rows, tokens = 64 // s.parts, s.tile.block_n
        a_block = (rows * tokens + (rows if p.b_rows else 1) + tokens) * 4
        return p.m <= tokens and -(-p.k // BLOCK) * a_block + 16 <= _SHARED
    return not (p.b_rows and s.chains * s.tile.block_n > 128 and not s.tile.swap)


@functools.lru_cache(maxsize=4096)
def _choose(p: Scaled) -> ScaledSchedule:
    """The schedule for `p`."""
    sms = devices.device_info(p.device).sm_count
    # Other blocks can start beside those that are ending only on multiprocessors that have none.
    tiles = -(-p.n // 64)
    if p.k >= _LONG and fits(p, _PAIR) and tiles * _PAIR.parts <= sms // 2:
        return _PAIR
    if p.m <= _STEADY.tile.block_n and tiles > sms * 3 // 4:
        return _STEADY
    for s in _FEW:  # weights are read as few times as can be
        if p.m <= s.tile.block_n:
            return s
    for s in (_FEW[-1], *_SOME):  # the smallest tiles that can all run at once
        rows, columns = (p.n, p.m) if s.tile.swap else (p.m, p.n)
        if -(-rows // s.tile.block_m) * -(-columns // s.tile.block_n) <= sms:
            return s
    if p.m <= 64:
        return _SOME[0]
    return _MANY[0 if p.b_rows else 1]


def output_maps(p: Scaled, s: ScaledSchedule) -> Maps | None:
    """The tensor maps by which the copy engine writes the output, if it does."""
    if not (panel := p.panel(s)):
        return None
    strides = p.out_stride * 2, p.out_stride * p.m * 2
    return Maps(p.out_dtype, (p.n, p.m, 1), strides, (panel, 64, 1), panel * 2)


class ScaledSm90Kernel(Kernel[Scaled, ScaledSchedule]):
    """Its plans launch on the addresses of a, b, both scales, out and bias. A missing one is 0."""

    name, step = "scaled_sm90", "scaled"
    sources = "scaled_sm90.cu", "scaled_few_sm90.cu"

    @property
    def catalogue(self) -> Sequence[ScaledSchedule]:
        return SCHEDULES

    def supports(self, p: Scaled) -> bool:
        return devices.device_info(p.device).arch.runs(self.name)

    def all(self, p: Scaled) -> Sequence[ScaledSchedule]:
        return [s for s in SCHEDULES if fits(p, s)]

    def choose(self, p: Scaled) -> ScaledSchedule:
        return _choose(p)

    def plan(self, p: Scaled, s: ScaledSchedule | None = None) -> CudaPlan:
        return _plan(p, s or _choose(p))


SCALED_SM90 = ScaledSm90Kernel()


def _plan(p: Scaled, s: ScaledSchedule) -> CudaPlan:
    if not fits(p, s):
        raise ValueError(
            f"schedule: expected one of all(p), which can compute {p.m} x {p.n} x {p.k}; got {s}"
        )
    tile, swap = s.tile, s.tile.swap
    kernel = runtime.load(spec(p, s), p.device)
    a_block, b_block = (tile.block_n, tile.block_m) if swap else (tile.block_m, tile.block_n)
    a_sharers, b_sharers = (1, tile.cluster) if swap else (tile.cluster, 1)
    a, b = Side(p.m, p.k // 2, 0, p.a_stride // 2, 1), Side(p.n, p.k // 2, 0, p.b_stride // 2, 1)
    a_maps = operand_maps(PAIR, a, 1, False, a_block, 64, a_sharers, False, tile.l2_promotion)
    b_maps = operand_maps(PAIR, b, 1, False, b_block, 64, b_sharers, False, tile.l2_promotion)
    out_maps = output_maps(p, s)
    rows, columns = (p.n, p.m) if swap else (p.m, p.n)
    sizes = p.out_stride, 0, rows, columns, p.k // 2, 1, 0, 0, 0, tile.group
    strides_of_scales = (*p.scale_b, *p.scale_a) if swap else (*p.scale_a, *p.scale_b)
    grid = tile.grid(rows, columns, 1, devices.device_info(p.device).sm_count)
    if s.parts > 1:
        grid = -(-rows // 64) * s.parts, 1, 1

    def launch(a: int, b: int, scale_a: int, scale_b: int, out: int, bias: int) -> None:
        maps, scales = (a_maps[a], b_maps[b]), (scale_a, scale_b)
        if swap:  # the kernel's A is on the tall side of its tiles
            maps, scales = maps[::-1], scales[::-1]
        out_map = NO_MAP if out_maps is None else out_maps[out]
        kernel.launch(grid, *maps, out_map, out, bias, 0, *sizes, *scales, *strides_of_scales)

    return CudaPlan(launch)
