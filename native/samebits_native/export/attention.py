"""Attention's kernels of an archive, and the choice of their schedules as tables.

A table's ranges are of a sequence's rows in a tile's heads, of sets of heads in all sequences, and of keys.
The library's own choice fills them in. ``native/attention.c`` says the bits of variants.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from samebits.backends.arch import Arch
from samebits.backends.attention import SEGMENT, Attention
from samebits.backends.cuda import devices
from samebits.backends.cuda.attention import sm90, universal
from samebits.backends.cuda.attention.sm90 import HopperSchedule, HopperVariant
from samebits.backends.cuda.attention.universal import Forward, Variant
from samebits.backends.cuda.compiler import KernelSpec
from samebits.backends.cuda.products.plan import TYPES
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.contract import INTERPOLATION
from samebits_native.export.archive import Family, Schedule
from samebits_native.export.choices import ANY, Table3

__all__ = ["Found", "hopper", "merges", "universals"]

_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_KEYS = tuple(SEGMENT * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256))


class Found(NamedTuple):
    """A table, and kernels that its schedules need.

    Attributes:
        key: the table's.
        record: of a cell, without the number of its kernel.
        kernel: what a cell's kernels are numbered by.
        kernels: their variants.
    """

    family: Family
    key: int
    plain: Any
    table: Table3
    record: Callable[[Any], Schedule]
    kernel: Callable[[Any], Any]
    kernels: Iterable[tuple[Any, int, KernelSpec]]


class Chosen(NamedTuple):
    """A schedule, and how many blocks share the segments of a tile."""

    schedule: Any
    shares: int


@dataclass(frozen=True)
class _Operand:
    """A tensor's geometry, on a GPU that is not here."""

    shape: torch.Size
    dtype: torch.dtype
    device: int

    def stride(self, dim: int) -> int:
        return self.shape[dim + 1 :].numel()

    def get_device(self) -> int:
        return self.device


def _call(rows: int, sets: int, keys: int, sizes: tuple[int, int], dtype: torch.dtype, device: int) -> Any:
    """A call whose tiles have so many rows, of heads that share nothing."""

    def operand(tokens: int, size: int) -> Any:
        return _Operand(torch.Size((1, tokens, sets, size)), dtype, device)

    of = operand(rows, sizes[0]), operand(keys, sizes[0]), operand(keys, sizes[1])
    return Attention(*of, contract="", scale=1.0)


def _table(choose: Callable[[int, int, int], Any]) -> Table3:
    points = itertools.product(_ROWS, _SETS, _KEYS)
    return Table3((_ROWS, _SETS, _KEYS), [choose(*point) for point in points])


def _sizes(head: int, values: int) -> int:
    """The bits of a table's key, and of a variant."""
    return round_up(head, 16) // 16 | round_up(values, 16) // 16 << 5


# ---- Hopper ----


def hopper(heads: Iterable[tuple[int, int]], dtypes: Collection[torch.dtype], device: int) -> Iterator[Found]:
    """The tables of Hopper's kernels: for short or long values, with a window or without one."""
    fitting = [h for h in heads if max(h) <= 128 and h[0] % 8 == h[1] % 8 == 0]
    for long_values, windowed in itertools.product((False, True), repeat=2):
        of_these = [h for h in fitting if (h[1] > 64) == long_values]
        if not of_these:
            continue
        size = 128 if long_values else 64
        of = HopperVariant(torch.bfloat16, size, size, softcap=False)
        table = _table(functools.partial(_choose_hopper, device, of, windowed))
        yield Found(
            family=Family.ATTENTION_SM90,
            key=long_values | windowed << 1,
            plain=table.cells[0],
            table=table,
            record=_hopper_record,
            kernel=lambda c: _bare(c.schedule),
            kernels=_hopper_kernels(dict.fromkeys(_bare(c.schedule) for c in table.cells), of_these, dtypes),
        )


def _choose_hopper(device: int, of: HopperVariant, windowed: bool, rows: int, sets: int, keys: int) -> Chosen:
    x = _call(rows, sets, keys, (of.head, of.values), of.dtype, device)
    if windowed:
        x = replace(x, window=(-1, 0))
    s = sm90.choose(x, of)
    return Chosen(s, sm90.shares_of(x, s) if s.split else 1)


def _bare(s: HopperSchedule) -> HopperSchedule:
    """What is left of a schedule beside variants."""
    return HopperSchedule(s.warpgroups, 0, few=s.few, resident=s.resident)


def _hopper_record(c: Chosen) -> Schedule:
    s = c.schedule
    rows = {"tile_m": s.rows, "tile_n": s.most_rows}
    promotion = sm90.l2_promotion(s)
    return Schedule(Family.ATTENTION_SM90, 0, **rows, group=c.shares, blocks=s.resident, promotion=promotion)


def _hopper_kernels(
    schedules: Iterable[HopperSchedule], heads: Iterable[tuple[int, int]], dtypes: Collection[torch.dtype]
) -> Iterator[tuple[Any, int, KernelSpec]]:
    flags = (False, True)
    for s, (head, values), dtype, softcap, split in itertools.product(schedules, heads, dtypes, flags, flags):
        of = HopperVariant(dtype, round_up(head, 16), round_up(values, 16), softcap)
        filled = replace(s, stages=3, split=split).filled(of)
        if filled.fits(of):
            yield (
                s,
                TYPES[dtype] | softcap << 3 | split << 4 | _sizes(head, values) << 5,
                sm90.spec(of, filled),
            )


# ---- The universal kernels ----


def universals(
    heads: Iterable[tuple[int, int]], dtypes: Collection[torch.dtype], device: int
) -> Iterator[Found]:
    """The tables of the universal kernels, by the sizes of heads."""
    info = devices.device_info(device)
    for (head, values), f32 in itertools.product(heads, (False, True)):
        of_these = [d for d in dtypes if (d == torch.float32) == f32]
        if not of_these:
            continue
        of = _variant(of_these[0], head, values, info.arch)
        schedules = universal.forward_schedules(of, info.max_smem)
        if not schedules:
            continue
        plain = Chosen(next((s for s in schedules if not s.split), schedules[0]), 1)
        table = Table3((ANY,) * 3, [plain])
        if not f32:
            table = _table(functools.partial(_choose_universal, device, of))
        yield Found(
            family=Family.ATTENTION,
            key=_sizes(head, values) | f32 << 10,
            plain=plain,
            table=table,
            record=functools.partial(_record, of),
            kernel=lambda c: c.schedule,
            kernels=_universal_kernels(
                of, of_these, plain.schedule, dict.fromkeys(c.schedule for c in table.cells), info
            ),
        )


def _variant(dtype: torch.dtype, head: int, values: int, arch: Arch) -> Variant:
    exp2 = dtype != torch.float32 and arch.mma is not None and arch.mma.exp2 == INTERPOLATION
    sizes = round_up(head, 16), round_up(values, 16)
    return Variant(dtype, *sizes, vector=True, mask=None, softcap=False, paged=False, hardware_exp2=exp2)


def _choose_universal(device: int, of: Variant, rows: int, sets: int, keys: int) -> Chosen:
    return Chosen(*universal.choose(_call(rows, sets, keys, (of.head, of.values), of.dtype, device), of))


def _record(of: Variant, c: Chosen) -> Schedule:
    s = c.schedule
    return Schedule(Family.ATTENTION, 0, s.rows, s.values(of), group=c.shares, swap=s.split)


def _universal_kernels(
    of: Variant,
    dtypes: Iterable[torch.dtype],
    plain: Forward,
    chosen: Iterable[Forward],
    info: devices.DeviceInfo,
) -> Iterator[tuple[Any, int, KernelSpec]]:
    """Every variant under the plain schedule. Others only where they are not a faster kernel's, or rare."""
    programmatic = info.arch.copies_tiles
    sm90_takes = info.arch.runs("attention_sm90") and max(of.head, of.values) <= 128
    flags = (False, True)
    for dtype, vector, softcap, paged in itertools.product(dtypes, flags, flags, flags):
        v = replace(of, dtype=dtype, vector=vector, softcap=softcap, paged=paged)
        every = vector and not (softcap and paged) and (paged or not sm90_takes)
        bits = TYPES[dtype] | vector << 2 | softcap << 3 | paged << 4 | _sizes(of.head, of.values) << 5
        for s in dict.fromkeys((plain, *(chosen if every else ()))):
            yield s, bits, universal.forward_spec(v, s, programmatic)


def merges(
    heads: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype], device: int
) -> Iterator[tuple[int, KernelSpec]]:
    """The kernels that merge segments, by the dtype and the values of a row in scratch."""
    info = devices.device_info(device)
    for (head, values), dtype in itertools.product(heads, dtypes):
        of = _variant(dtype, head, values, info.arch)
        for s in universal.forward_schedules(of, info.max_smem):
            if s.split:
                bits = TYPES[dtype] | s.values(of) // 16 << 2
                yield bits, universal.merge_spec(of, s, info.arch.copies_tiles)
