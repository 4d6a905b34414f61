"""Attention on Hopper, forward: host side of ``kernels/attention_sm90.cu``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.backends.attention import BLOCK, SEGMENT, Attention
from samebits.backends.cuda import devices, runtime, shapes, tuned
from samebits.backends.cuda.attention import mask, universal
from samebits.backends.cuda.attention.maps_sm90 import (
    copyable_mask,
    layout,
    mask_maps,
    query_maps,
    readable,
    shared_matrices,
    tile_maps,
)
from samebits.backends.cuda.attention.problem import (
    check,
    empty_results,
    lse_strides,
    problem,
    sequences,
    with_tokens,
)
from samebits.backends.cuda.attention.schedule_sm90 import HopperSchedule, HopperVariant, schedules, spec
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
    "best_shares",
    "candidates",
    "choose",
    "forward",
    "is_uneven",
    "l2_promotion",
    "make_plan",
    "plan",
    "schedules",
    "shares_of",
    "spec",
    "supports",
    "variant",
]

_LARGEST_HEAD = 128
_SCRATCH = 512 << 20  # bytes that segments may take
_L2 = 24 << 20  # bytes of keys and values that are used side by side
_LONG = 8192  # queries whose tiles under a window are taken as they come: the counter costs a launch
_SMALLEST_BOX = 8  # lines: the period of the swizzle


def cost(x: Attention, s: HopperSchedule, multiprocessors: int) -> float:
    """How long a call takes, in blocks of keys for 64 rows, roughly."""
    tiles, heads, height, _ = _tiles(x, s)
    if x.packed:
        tiles -= x.batch - with_tokens(x)
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
    queries = -(-x.queries // with_tokens(x)) if x.packed else x.queries
    # Heads side by side in a tile share what a float mask adds.
    grouped = x.group > 1 and (queries < 128 or of.adds) and _can_group(x)
    rows = queries * (x.group if grouped else 1)
    least = HopperSchedule(1, 3, grouped, dynamic=is_uneven(x), few=rows <= 8)
    sizes = (1,) if rows <= 64 else (2, 3) if x.mask is None else (2, 1)  # rows of a mask may come one by one
    found = [replace(least, warpgroups=n) for n in sizes]
    s = min((s for s in found if s.fits(of)), key=lambda s: cost(x, s, multiprocessors))
    if shares_of(x, s) > 1 and _has_scratch(x, of):
        s = replace(s, split=True, dynamic=False)
    elif s.few and x.mask is None and _blocks(x, s) > multiprocessors:
        s = replace(s, resident=2)  # one block streams while the other is between tiles
    return s.filled(of)


def is_uneven(x: Attention) -> bool:
    """Whether tiles differ so much that blocks best take them as they come."""
    lengths = x.packed or x.key_start is not None or x.key_length is not None
    return lengths or (x.window != (-1, -1) and x.queries >= _LONG)


def _blocks(x: Attention, s: HopperSchedule) -> int:
    """Tiles of queries, of all heads."""
    tiles, heads, *_ = _tiles(x, s)
    return tiles * heads


def _has_scratch(x: Attention, of: HopperVariant) -> bool:
    return x.q.shape[:-1].numel() * _segments(x) * (of.values + 2) * 4 <= _SCRATCH


def _segments(x: Attention) -> int:
    return -(-x.keys // SEGMENT)


def shares_of(x: Attention, s: HopperSchedule) -> int:
    """How many tiles best share the segments of their rows."""
    tiles, heads, height, members = _tiles(x, s)
    multiprocessors = devices.device_info(x.q.get_device()).sm_count
    return best_shares(tiles * heads, _segments(x), height * members, multiprocessors)


@functools.lru_cache(maxsize=4096)
def best_shares(tiles: int, segments: int, rows: int, multiprocessors: int) -> int:
    """How many best share the segments of each of so many tiles, of `rows` rows."""

    def cost(shares: int) -> float:  # in blocks of keys
        waves = -(-tiles * shares // multiprocessors)
        share = -(-segments // shares) * SEGMENT // BLOCK
        if shares == 1:
            return 0.85 * waves * (share + 1.5)
        return waves * (share * (1 + rows / 256) + 1.5) + 1.5  # segments are written, and merged

    return min(range(1, max(1, segments) + 1), key=cost)


def _can_group(x: Attention, rows: int = 64) -> bool:
    return x.group <= rows and x.q.stride(-2) != 0 and not _mask_of_heads(x)


def _mask_of_heads(x: Attention) -> bool:
    """Whether each head has a mask of its own."""
    return x.mask is not None and x.mask.stride(1) != 0 and x.heads > 1


def _tiles(x: Attention, s: HopperSchedule) -> tuple[int, int, int, int]:
    """Tiles of queries, heads or groups of heads, queries in a tile, and heads in it."""
    members = x.group if s.grouped else 1
    height = s.most_rows // members
    tiles = -(-x.queries // height) + (x.batch if x.packed else 0)
    return tiles, (1 if x.packed else x.batch) * x.heads // members, height, members


def l2_promotion(s: HopperSchedule) -> int:
    """The least bytes of keys and values that L2 fetches. Those that stream from memory do so 6 % faster."""
    return 128 if s.warpgroups == 1 else 256


def supports(x: Attention, largest_head: int = _LARGEST_HEAD) -> bool:
    """Whether the kernel takes the call. The universal kernels take all others."""
    head, values = x.q.shape[-1], x.v.shape[-1]
    return (
        x.q.dtype in (torch.bfloat16, torch.float16)
        and (x.mask is None or (x.block_table is None and x.window == (-1, -1)))
        and (x.block_table is None or (x.key_start is None and _box(x) >= _SMALLEST_BOX))
        and contract_from_key(x.contract).step == "mma"
        and devices.device_info(x.q.get_device()).arch.runs("attention_sm90")
        and 0 < head <= largest_head
        and 0 < values <= largest_head
        and head % 8 == values % 8 == 0
        and x.q.numel() > 0
        and x.k.numel() > 0
        and x.keys > 0  # a block table may have no columns
        and all(map(readable, (x.q, x.k, x.v)))
    )


def _box(x: Attention) -> int:
    """Lines of a page that one copy brings: they divide the page, and a block of keys."""
    return math.gcd(x.k.shape[1], BLOCK)


def variant(x: Attention) -> HopperVariant:
    """What the kernel is specialised to for a call."""
    head, values = (round_up(t.shape[-1], 16) for t in (x.q, x.v))
    of_mask = None if x.mask is None else x.mask.dtype
    return HopperVariant(x.q.dtype, head, values, x.softcap != 0, x.block_table is not None, of_mask)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a launch that a call's geometry decides: everything but addresses.

    Attributes:
        kernel: under its schedule.
        maps: of q, k and v, and of a float mask, or of q again where the copy engine does not read the mask.
        grid: blocks.
        sizes: members of ``struct Params`` between the addresses of results and those of sequences.
        problem: those after the mask's.
        strides: with a mask, those of k and v, and `bias_lines`.
        scratch: floats that hold segments, if they are merged by a kernel of their own.
        dynamic: whether blocks take tiles as they come.
        merge: that kernel.
    """

    kernel: runtime.Kernel
    maps: tuple[Maps, ...]
    grid: int
    sizes: tuple[int, ...]
    problem: tuple[Any, ...]
    strides: tuple[int, ...]
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
        rows = None if x.mask is None else mask.find_rows(x, by_head=True)
        of_q, of_k, of_v, *of_mask = self.maps
        added = address(x.mask if self.strides and self.strides[-1] else q)
        self.kernel.launch(
            (self.grid, 1, 1),
            *(of_q[q.data_ptr()], of_k[k.data_ptr()], of_v[v.data_ptr()]),
            *(of[added] for of in of_mask),
            *map(address, (out, x.sinks, lse, lse2, scratch, following)),
            *self.sizes,
            *sequences(x),
            *self.problem,
            *(() if rows is None else (*rows.values, address(k), address(v), *self.strides)),
        )
        if scratch is not None and self.merge is not None:
            self.merge.run(x, out, lse, lse2, scratch, rows)
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
    maps: tuple[Maps, ...] = (
        query_maps(of.dtype, layouts[0], height, members),
        tile_maps(of.dtype, layouts[1], lines, 64, promotion),
        tile_maps(of.dtype, layouts[2], lines, of.width, promotion),
    )
    lines_of_mask = 0
    if x.mask is not None and of.adds:
        if copyable_mask(x.mask):
            lines_of_mask = min(height, 16 // members if 16 % members == 0 else 15 // members + 2)
            maps += (mask_maps(x.mask.dtype, tuple(x.mask.shape), x.mask.stride(), lines_of_mask),)
        else:
            maps += (maps[0],)
    of_head = 2 * x.keys * (x.k.shape[-1] + x.v.shape[-1])
    together = min(heads, max(1, _L2 // of_head) * (x.group // members))
    segments = _segments(x)
    share = -(-segments // min(segments, max(shares_of(x, s), 2))) if s.split else segments
    shares = -(-segments // share)
    sizes = (*lse_strides(x), tiles, heads, together, segments, shares, share, members, height)
    count, blocks = tiles * heads * shares, devices.device_info(device).sm_count * s.resident
    runtime.announce((spec(of, s), universal.Merge.spec(x)) if s.split else (spec(of, s),), device)
    return Plan(
        kernel=runtime.load(spec(of, s), device),
        maps=maps,
        grid=min(count, blocks),
        sizes=(*sizes, shared_matrices(layouts), lines if of.paged else 0),
        problem=problem(x)[7:],
        strides=() if x.mask is None else (*universal.strides(x.k), *universal.strides(x.v), lines_of_mask),
        scratch=x.q.shape[:-1].numel() * segments * (of.values + 2) if s.split else 0,
        dynamic=s.dynamic and not (of.paged and count <= blocks),  # the counter costs a launch
        merge=universal.Merge.of(x) if s.split else None,
    )


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
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return None
    key = (
        *(q.dtype, q.get_device(), q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(x.contract, x.scale, x.softcap, x.window, x.align, None if offsets is None else len(offsets)),
        *(x.cu_seqlens_k is None, x.key_start is None, x.key_length is None),
        *((None,) if table is None else (table.shape[1], table.stride(0))),
        *((None,) if x.mask is None else (x.mask.dtype, x.mask.stride(), x.mask.data_ptr() % 16 == 0)),
    )
    try:
        return _plans[key]
    except KeyError:
        return _plans.keep(key, make_plan(x, tuned_schedule(x)) if supports(x) else None)


def tuned_schedule(x: Attention) -> HopperSchedule | None:
    """A tuned table's schedule for a call; None if :func:`choose` should say: of pages and masks tables know
    nothing.
    """
    if x.block_table is not None or x.mask is not None:
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
