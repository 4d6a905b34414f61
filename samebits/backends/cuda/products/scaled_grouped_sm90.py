"""Grouped block-scaled FP8 products on Hopper: host side of ``kernels/scaled_grouped_sm90.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from samebits.backends import UnavailableError
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products import choice_sm90, scaled_sm90
from samebits.backends.cuda.products.grouped_sm90 import MOST_GROUPS
from samebits.backends.cuda.products.plan import CudaPlan
from samebits.backends.cuda.products.scaled_sm90 import Scaled, ScaledSchedule, output_maps, schedule
from samebits.backends.cuda.products.tensor_core_sm90 import NO_MAP
from samebits.backends.cuda.tensor_maps import Side, operand_maps
from samebits.backends.kernel import Kernel

__all__ = ["SCALED_GROUPED_SM90", "SCHEDULES", "ScaledGrouped", "spec"]

_PARAMS = "128s128s128sPPPqq8iPP2iqPPqqqqq"

_FEW = [schedule(64, n, 2, swap=True, group=choice_sm90.TOGETHER // n) for n in (8, 16, 32)]
_SOME = [schedule(64, 128, 1), schedule(64, 64, 2)]
_MANY = [schedule(128, 128, chains) for chains in (1, 2)]

SCHEDULES = (*_FEW, *_SOME, *_MANY, schedule(128, 64, 2), schedule(64, 128, 1, swap=True))
"""All schedules. None changes a bit."""


@dataclass(frozen=True, slots=True)
class ScaledGrouped:
    """A grouped product without addresses and offsets.

    Attributes:
        rows: the product that it would be if all rows had one matrix.
        groups: the number of matrices.
        masked: whether every group has as many rows, of which the first count. Else they are between offsets.
        b_stride, scale_stride: elements from one matrix to the next, and from its scales to the next.
    """

    rows: Scaled
    groups: int
    masked: bool
    b_stride: int
    scale_stride: int

    @property
    def share(self) -> int:
        """Rows of a group, if all have as many."""
        return -(-self.rows.m // max(1, min(self.groups, self.rows.m)))

    def most_tiles(self, tile: int) -> int:
        """The most tiles of `tile` rows that the groups can have."""
        if self.masked:
            return self.groups * -(-self.share // tile)
        parts = min(self.groups, self.rows.m)
        return (self.rows.m + (tile - 1) * parts) // tile


def _table(groups: int) -> int:
    """Bytes of shared memory that the kernel's scheduler takes."""
    return (2 * groups + 1) * 4


def spec(p: ScaledGrouped, s: ScaledSchedule) -> compiler.KernelSpec:
    """The kernel of `p` under `s`. Its ring leaves room for the table of groups."""
    table = _table(p.groups)
    longest = s.tile.filled(s.tile.panels + table)
    of = scaled_sm90.spec(p.rows, replace(s, tile=replace(s.tile, stages=min(s.tile.stages, longest.stages))))
    return replace(
        of,
        source="scaled_grouped_sm90.cu",
        entry="scaled_grouped_sm90",
        params=_PARAMS,
        constants=(*of.constants, ("GROUPED", "OF_ROWS"), ("MASKED", int(p.masked))),
        smem=of.smem + table,
    )


@functools.lru_cache(maxsize=4096)
def _choose(p: ScaledGrouped) -> ScaledSchedule:
    """The schedule for `p`, whatever its offsets. Groups differ, so tiles have room for twice the mean."""
    for s in _FEW[:2]:
        if 2 * p.share <= s.tile.block_n:
            return s
    if p.share <= 64:  # a second chain pays for smaller tiles where k is long
        return _SOME[p.rows.k > 4096]
    return _MANY[not p.rows.b_rows]


class ScaledGroupedSm90Kernel(Kernel[ScaledGrouped, ScaledSchedule]):
    """Its plans launch on the addresses of a plain one's, and of offsets."""

    name, step = "scaled_grouped_sm90", "scaled"

    @property
    def catalogue(self) -> Sequence[ScaledSchedule]:
        return SCHEDULES

    def supports(self, p: ScaledGrouped) -> bool:
        return devices.device_info(p.rows.device).arch.runs(self.name) and p.groups <= MOST_GROUPS

    def all(self, p: ScaledGrouped) -> Sequence[ScaledSchedule]:
        """Those for which registers suffice: scales of columns take some, and so do groups."""
        found = [s for s in SCHEDULES if scaled_sm90.fits(p.rows, s)]
        return [s for s in found if not (p.rows.b_rows and s.chains == 2 and s.tile.block_m == 128)]

    def choose(self, p: ScaledGrouped) -> ScaledSchedule:
        return _choose(p)

    def plan(self, p: ScaledGrouped, s: ScaledSchedule | None = None) -> CudaPlan:
        return _plan(p, s or _choose(p))


SCALED_GROUPED_SM90 = ScaledGroupedSm90Kernel()


def _plan(p: ScaledGrouped, s: ScaledSchedule) -> CudaPlan:
    if p.groups > MOST_GROUPS:
        raise UnavailableError(
            f"samebits.scaled_grouped_mm: expected at most {MOST_GROUPS} matrices on a GPU, got {p.groups}"
        )
    r, tile, swap = p.rows, s.tile, s.tile.swap
    kernel = runtime.load(spec(p, s), r.device)
    a_block, b_block = (tile.block_n, tile.block_m) if swap else (tile.block_m, tile.block_n)
    matrices = p.b_stride // 2 if p.groups > 1 else 0
    a, b = Side(r.m, r.k // 2, 0, r.a_stride // 2, 1), Side(r.n, r.k // 2, matrices, r.b_stride // 2, 1)
    a_maps = operand_maps(scaled_sm90.PAIR, a, 1, False, a_block, 64, 1, False, tile.l2_promotion)
    b_maps = operand_maps(scaled_sm90.PAIR, b, p.groups, False, b_block, 64, 1, False, tile.l2_promotion)
    out_maps = output_maps(r, s)
    rows, columns = (r.n, r.m) if swap else (r.m, r.n)
    batched = (1, 0) if swap else (0, 1)
    sizes = r.out_stride, 0, rows, columns, r.k // 2, 1, *batched, 0, tile.group
    of_groups = p.groups, r.m, 0 if r.bias_dtype is None else r.n
    strides = (*r.scale_b, *r.scale_a) if swap else (*r.scale_a, *r.scale_b)
    tiles = p.most_tiles(a_block) * -(-r.n // b_block)
    grid = min(tiles, tile.resident(devices.device_info(r.device).sm_count)), 1, 1

    def launch(a: int, b: int, scale_a: int, scale_b: int, out: int, bias: int, offs: int) -> None:
        maps, scales = (a_maps[a], b_maps[b]), (scale_a, scale_b)
        if swap:  # the kernel's A is on the tall side of its tiles
            maps, scales = maps[::-1], scales[::-1]
        out_map = NO_MAP if out_maps is None else out_maps[out]
        kernel.launch(
            grid, *maps, out_map, out, bias, 0, *sizes, offs, 0, *of_groups, *scales, *strides, p.scale_stride
        )

    return CudaPlan(launch)
