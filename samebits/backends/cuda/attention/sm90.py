"""Attention on Hopper, forward: host side of ``kernels/attention_sm90.cu``."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.backends.arch import SM_90
from samebits.backends.attention import BLOCK, SEGMENT, Attention
from samebits.backends.cuda import compiler, devices, runtime, shapes, tuned
from samebits.backends.cuda.attention import universal
from samebits.backends.cuda.attention.maps_sm90 import (
    layout,
    query_maps,
    readable,
    shared_matrices,
    tile_maps,
)
from samebits.backends.cuda.attention.problem import PROBLEM, check, empty_results, lse_strides, problem
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.plans import Plans
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.cuda.shapes import AttentionShape
from samebits.backends.cuda.tensor_maps import Maps
from samebits.contract import contract_from_key

__all__ = [
    "HopperSchedule",
    "HopperVariant",
    "Plan",
    "candidates",
    "choose",
    "forward",
    "l2_promotion",
    "load_all",
    "make_plan",
    "plan",
    "schedules",
    "shares_of",
    "spec",
    "supports",
    "variant",
]

_PARAMS = "128s128s128sPPPPPPqqiiiiiiiiii" + PROBLEM
_LARGEST_HEAD = 128
_SMEM = 227 * 1024 - 3 * 56  # but for the tickets
_SCRATCH = 512 << 20  # bytes that segments may take
_L2 = 24 << 20  # bytes of keys and values that are used side by side
_SMALLEST_BOX = 8  # lines: the period of the swizzle


@dataclass(frozen=True, slots=True)
class HopperVariant:
    """What a compiled kernel is specialised to, besides its schedule. Sizes are multiples of 16.

    Attributes:
        paged: whether keys and values lie in pages.
    """

    dtype: torch.dtype
    head: int
    values: int
    softcap: bool
    paged: bool = False

    @property
    def stage(self) -> int:
        """Bytes of a tile of keys or of values."""
        return BLOCK * 2 * max(_columns(self.head), round_up(self.values, self.width))

    @property
    def width(self) -> int:
        """Columns of values that one copy brings."""
        return 64 if self.values % 64 == 0 else 32


@dataclass(frozen=True, slots=True)
class HopperSchedule:
    """A schedule of ``attention_sm90``.

    Attributes:
        warpgroups: that compute; each has 64 rows.
        stages: tiles of keys or values held at once.
        grouped: whether a tile has all heads that share a head of k and v, side by side; else it has one.
        split: whether tiles share the segments of their rows, and a second kernel merges them.
        dynamic: whether blocks of the grid take tiles as they come; else each has its own.
        few: whether tiles have 8 rows only, so that threads do the arithmetic of one row, not of two.
    """

    warpgroups: int
    stages: int
    grouped: bool = False
    split: bool = False
    dynamic: bool = False
    few: bool = False

    @property
    def rows(self) -> int:
        """Of the kernel's products."""
        return 64 * self.warpgroups

    @property
    def most_rows(self) -> int:
        """Of these, the most that hold queries."""
        return 8 if self.few else self.rows

    def smem(self, of: HopperVariant) -> int:
        in_registers = self.split or (of.values <= 64 and self.warpgroups < 3)
        total = 0 if in_registers else self.rows * of.values * 4
        barriers = (2 * self.stages + 2) * 8
        q = self.rows * _columns(of.head) * 2
        return 1024 + q + self.stages * of.stage + total + barriers

    def fits(self, of: HopperVariant) -> bool:
        # The registers of three warpgroups hold scores, probabilities and short values.
        return self.stages >= 3 and self.smem(of) <= _SMEM and (self.warpgroups < 3 or of.values <= 64)

    def filled(self, of: HopperVariant) -> HopperSchedule:
        """With as many stages, up to 8, as there is room for."""
        room = _SMEM - self.smem(of)
        return replace(self, stages=max(0, min(8, self.stages + room // (of.stage + 16))))


def _columns(head: int) -> int:
    return round_up(head, 64)


@functools.cache
def schedules(of: HopperVariant) -> tuple[HopperSchedule, ...]:
    """All that :func:`choose` may return, and those with the fewest stages."""
    flags = (
        (False, False, False),
        (True, False, False),
        (False, False, True),
        (False, True, False),
        (True, True, False),
    )
    found = []
    for warpgroups, (grouped, split, dynamic) in itertools.product((1, 2, 3), flags):
        least = HopperSchedule(warpgroups, 3, grouped, split, dynamic)
        found += [least.filled(of), least]
    for grouped, split in itertools.product((False, True), repeat=2):
        found.append(HopperSchedule(1, 3, grouped, split, few=True).filled(of))
    return tuple(dict.fromkeys(s for s in found if s.fits(of)))


def spec(of: HopperVariant, s: HopperSchedule) -> compiler.KernelSpec:
    """The kernel under a schedule."""
    constants: dict[str, int | str] = {
        "INPUT_F16": int(of.dtype == torch.float16),
        "HEAD": of.head,
        "VALUES": of.values,
        "SOFTCAP": int(of.softcap),
        "WARPGROUPS": s.warpgroups,
        "STAGES": s.stages,
        "SPLIT": int(s.split),
        "FEW": int(s.few),
        "PAGED": int(of.paged),
    }
    return compiler.KernelSpec(
        *("attention_sm90.cu", "attention_sm90", _PARAMS, tuple(constants.items())),
        block=128 * s.warpgroups + 128,
        smem=s.smem(of),
        programmatic=True,
        oldest=SM_90,
    )


def cost(x: Attention, s: HopperSchedule, multiprocessors: int) -> float:
    """How long a call takes, in blocks of keys for 64 rows, roughly."""
    tiles, heads, height, _ = _tiles(x, s)
    left, right = x.window
    waves: float = -(-tiles * heads // multiprocessors)
    if left >= 0 and right >= 0:
        seen = min(x.keys, left + right + height)
    elif x.window != (-1, -1) and x.queries > height:
        seen = x.keys - min(x.queries, x.keys) // 2 + height // 2
        waves = max(1.0, tiles * heads / multiprocessors)  # long ones make up for short ones
    else:
        seen = x.keys
    # A third warpgroup hides more of the arithmetic.
    return waves * (seen / BLOCK + 1.5) * s.warpgroups * (0.88 if s.warpgroups == 3 else 1.0)


def choose(x: Attention, of: HopperVariant) -> HopperSchedule:
    """The schedule for a call."""
    multiprocessors = devices.device_info(x.q.get_device()).sm_count
    queries = -(-x.queries // max(1, x.batch)) if x.packed else x.queries
    grouped = x.group > 1 and queries < 128 and _can_group(x)
    rows = queries * (x.group if grouped else 1)
    dynamic = x.packed or x.key_start is not None or x.key_length is not None
    least = HopperSchedule(1, 3, grouped, dynamic=dynamic, few=rows <= 8)
    found = [replace(least, warpgroups=n) for n in ((1,) if rows <= 64 else (2, 3))]
    s = min((s for s in found if s.fits(of)), key=lambda s: cost(x, s, multiprocessors))
    if shares_of(x, s) > 1 and _has_scratch(x, of):
        s = replace(s, split=True, dynamic=False)
    return s.filled(of)


def _has_scratch(x: Attention, of: HopperVariant) -> bool:
    return x.q.shape[:-1].numel() * _segments(x) * (of.values + 2) * 4 <= _SCRATCH


def _segments(x: Attention) -> int:
    return -(-x.keys // SEGMENT)


def shares_of(x: Attention, s: HopperSchedule) -> int:
    """How many tiles best share the segments of their rows."""
    tiles, heads, height, members = _tiles(x, s)
    multiprocessors = devices.device_info(x.q.get_device()).sm_count
    return _best_shares(tiles * heads, _segments(x), height * members, multiprocessors)


@functools.lru_cache(maxsize=4096)
def _best_shares(tiles: int, segments: int, rows: int, multiprocessors: int) -> int:
    def cost(shares: int) -> float:  # in blocks of keys
        waves = -(-tiles * shares // multiprocessors)
        share = -(-segments // shares) * SEGMENT // BLOCK
        if shares == 1:
            return 0.85 * waves * (share + 1.5)
        return waves * (share * (1 + rows / 256) + 1.5) + 1.5  # segments are written, and merged

    return min(range(1, max(1, segments) + 1), key=cost)


def _can_group(x: Attention, rows: int = 64) -> bool:
    return x.group <= rows and x.q.stride(-2) != 0


def _tiles(x: Attention, s: HopperSchedule) -> tuple[int, int, int, int]:
    """Tiles of queries, heads or groups of heads, queries in a tile, and heads in it."""
    members = x.group if s.grouped else 1
    height = s.most_rows // members
    tiles = -(-x.queries // height) + (x.batch if x.packed else 0)
    return tiles, (1 if x.packed else x.batch) * x.heads // members, height, members


def l2_promotion(s: HopperSchedule) -> int:
    """The least bytes of keys and values that L2 fetches. Those that stream from memory do so 6 % faster."""
    return 128 if s.warpgroups == 1 else 256


def supports(x: Attention) -> bool:
    """Whether the kernel takes the call. The universal kernels take all others."""
    head, values = x.q.shape[-1], x.v.shape[-1]
    return (
        x.q.dtype in (torch.bfloat16, torch.float16)
        and x.mask is None
        and (x.block_table is None or (x.key_start is None and _box(x) >= _SMALLEST_BOX))
        and contract_from_key(x.contract).step == "mma"
        and devices.device_info(x.q.get_device()).arch.runs("attention_sm90")
        and 0 < head <= _LARGEST_HEAD
        and 0 < values <= _LARGEST_HEAD
        and head % 8 == values % 8 == 0
        and x.q.numel() > 0
        and x.k.numel() > 0
        and all(map(readable, (x.q, x.k, x.v)))
    )


def _box(x: Attention) -> int:
    """Lines of a page that one copy brings: they divide the page, and a block of keys."""
    return math.gcd(x.k.shape[1], BLOCK)


def variant(x: Attention) -> HopperVariant:
    """What the kernel is specialised to for a call."""
    head, values = (round_up(t.shape[-1], 16) for t in (x.q, x.v))
    return HopperVariant(x.q.dtype, head, values, x.softcap != 0, x.block_table is not None)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a launch that a call's geometry decides: everything but addresses.

    Attributes:
        kernel: under its schedule.
        maps: of q, k and v.
        grid: blocks.
        sizes: members of ``struct Params`` between the addresses of results and those of sequences.
        problem: those after the latter.
        scratch: floats that hold segments, if they are merged by a kernel of their own.
        dynamic: whether blocks take tiles as they come.
        merge: that kernel.
    """

    kernel: runtime.Kernel
    maps: tuple[Maps, ...]
    grid: int
    sizes: tuple[int, ...]
    problem: tuple[Any, ...]
    scratch: int
    dynamic: bool
    merge: universal.Merge | None

    def run(self, x: Attention, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.q, x.k, x.v
        out, lse, lse2 = empty_results(x, out, checked=x.block_table is not None)
        scratch = following = None
        if self.scratch:
            scratch = runtime.empty((self.scratch,), torch.float32, q.get_device())
        if self.dynamic:
            following = runtime.zeros((1,), torch.int32, q.get_device())
        of_q, of_k, of_v = self.maps
        self.kernel.launch(
            (self.grid, 1, 1),
            *(of_q[q.data_ptr()], of_k[k.data_ptr()], of_v[v.data_ptr()]),
            *map(address, (out, x.sinks, lse, lse2, scratch, following)),
            *self.sizes,
            *map(address, (x.cu_seqlens_q, x.cu_seqlens_k, x.key_start, x.key_length, x.block_table)),
            *self.problem,
        )
        if scratch is not None and self.merge is not None:
            self.merge.run(x, out, lse, lse2, scratch)
        return out, lse, lse2


def make_plan(x: Attention, schedule: HopperSchedule | None = None) -> Plan:
    """The plan of a call that the kernel supports; with a schedule instead of the default choice."""
    check(x)
    of = variant(x)
    s = schedule or choose(x, of)
    if s.grouped and not _can_group(x, s.most_rows):
        s = replace(s, grouped=False)
    device = x.q.get_device()
    layouts = tuple(map(layout, (x.q, x.k, x.v)))
    tiles, heads, height, members = _tiles(x, s)
    promotion, lines = l2_promotion(s), _box(x) if of.paged else BLOCK
    maps = (
        query_maps(of.dtype, layouts[0], height, members),
        tile_maps(of.dtype, layouts[1], lines, 64, promotion),
        tile_maps(of.dtype, layouts[2], lines, of.width, promotion),
    )
    of_head = 2 * x.keys * (x.k.shape[-1] + x.v.shape[-1])
    together = min(heads, max(1, _L2 // of_head) * (x.group // members))
    segments = _segments(x)
    share = -(-segments // min(segments, max(shares_of(x, s), 2))) if s.split else segments
    shares = -(-segments // share)
    sizes = (*lse_strides(x), tiles, heads, together, segments, shares, share, members, height)
    count, blocks = tiles * heads * shares, devices.device_info(device).sm_count
    return Plan(
        kernel=runtime.load(spec(of, s), device),
        maps=maps,
        grid=min(count, blocks),
        sizes=(*sizes, shared_matrices(layouts), lines if of.paged else 0),
        problem=problem(x)[5:],
        scratch=x.q.shape[:-1].numel() * segments * (of.values + 2) if s.split else 0,
        dynamic=s.dynamic and not (of.paged and count <= blocks),  # the counter costs a launch
        merge=universal.Merge.of(x) if s.split else None,
    )


def load_all(x: Attention) -> None:
    """Compile and load all kernels of calls like `x`, whatever their sequences, tokens, lengths and pages.

    So an engine neither compiles as it serves, nor loads a kernel in the capture of a graph.
    """
    check(x)
    of, device = variant(x), x.q.get_device()
    kernels = dict.fromkeys(spec(of, s) for s in schedules(of) if s == s.filled(of))
    every = [*kernels, universal.Merge.spec(x)]
    runtime.announce(every, device)
    for kernel in every:
        runtime.load(kernel, device)


def forward(x: Attention, *, schedule: HopperSchedule | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`samebits.backends.attention`.

    Args:
        schedule: instead of the default choice. Never changes a bit.
    """
    return make_plan(x, schedule).run(x)


_plans: Plans[Plan | None] = Plans(1024)  # a cache of keys that grows makes one at each step


def plan(x: Attention) -> Plan | None:
    """The plan of a call, found by its geometry; None if the kernel does not support it."""
    q, k, v, offsets, table = x.q, x.k, x.v, x.cu_seqlens_q, x.block_table
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 or x.mask is not None:
        return None
    key = (
        *(q.dtype, q.get_device(), q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(x.contract, x.scale, x.softcap, x.window, x.align, None if offsets is None else len(offsets)),
        *(x.cu_seqlens_k is None, x.key_start is None, x.key_length is None),
        *((None,) if table is None else (table.shape[1], table.stride(0))),
    )
    try:
        return _plans[key]
    except KeyError:
        return _plans.keep(key, make_plan(x, tuned_schedule(x)) if supports(x) else None)


def tuned_schedule(x: Attention) -> HopperSchedule | None:
    """A tuned table's schedule for a call; None if :func:`choose` should say. Tables know no pages."""
    if x.block_table is not None:
        return None
    shape = AttentionShape.of(x)
    shapes.met(shape)
    found = tuned.find(shape, x.q.get_device(), lambda name: [(None, s) for s in candidates(x)])
    return None if found is None else found[1]


def candidates(x: Attention) -> tuple[HopperSchedule, ...]:
    """The choice, and other schedules that could be the fastest. Tuning times them."""
    of = variant(x)
    found = (
        s
        for s in schedules(of)
        if s == s.filled(of)
        and (not s.split or (_segments(x) > 1 and _has_scratch(x, of)))
        and (not s.grouped or (x.group > 1 and _can_group(x, s.most_rows)))
        and (not s.few or x.queries * (x.group if s.grouped else 1) <= 64)
    )
    return tuple(dict.fromkeys((choose(x, of), *found)))
