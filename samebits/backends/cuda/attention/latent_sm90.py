"""Latent attention on Hopper, forward: host side of ``kernels/attention_latent_sm90.cu``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.backends.arch import SM_90
from samebits.backends.attention import SEGMENT, Attention
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.attention import sm90, universal
from samebits.backends.cuda.attention.maps_sm90 import (
    layout,
    query_maps,
    readable,
    shared_matrices,
    tile_maps,
)
from samebits.backends.cuda.attention.problem import (
    PROBLEM,
    check,
    empty_results,
    lse_strides,
    problem,
    sequences,
)
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.plans import Plans
from samebits.backends.cuda.tensor_maps import Maps
from samebits.contract import contract_from_key

__all__ = [
    "LatentPlan",
    "LatentSchedule",
    "choose",
    "make_plan",
    "plan",
    "schedules",
    "spec",
    "specs",
    "supports",
]

_HEAD, _VALUES = 576, 512
_ROWS, _BLOCK = 64, 128
_PARAMS = "128s128sPPPPPqqiiiiiiii" + PROBLEM
_SMEM = 1024 + (_ROWS + _BLOCK) * _HEAD * 2 + 128 * 32 + 2 * (_HEAD // 64 + 2) * 8
_SCRATCH = 512 << 20  # bytes that segments may take
_SMALLEST_BOX = 8  # lines: the period of the swizzle


@dataclass(frozen=True, slots=True)
class LatentSchedule:
    """A schedule of ``attention_latent_sm90``.

    Attributes:
        shares: tiles that share the segments of their rows, which a second kernel merges; 1: none do.
    """

    shares: int


def supports(x: Attention) -> bool:
    """Whether the kernel takes the call. The universal kernels take all others."""
    q, k, v = x.q, x.k, x.v
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and (q.shape[-1], v.shape[-1]) == (_HEAD, _VALUES)
        and v.data_ptr() == k.data_ptr()
        and v.stride() == k.stride()
        and x.mask is None
        and not x.softcap
        and (x.block_table is None or x.key_start is None)
        and _box(x) >= _SMALLEST_BOX
        and contract_from_key(x.contract).step == "mma"
        and devices.device_info(q.get_device()).arch.runs("attention_latent_sm90")
        and q.numel() > 0
        and k.numel() > 0
        and x.keys > 0  # a block table may have no columns
        and q.stride(-2) != 0
        and readable(q)
        and readable(k)
    )


def _box(x: Attention) -> int:
    """Keys that one copy brings: a block's, or those of them that are in one page."""
    return _BLOCK if x.block_table is None else math.gcd(x.k.shape[1], _BLOCK)


def _members(x: Attention) -> int:
    """Heads of a tile."""
    return max(n for n in range(1, _ROWS + 1) if x.group % n == 0)


def _tiles(x: Attention) -> tuple[int, int, int, int]:
    """Tiles of queries, groups of heads, queries in a tile, and heads in it."""
    members = _members(x)
    height = _ROWS // members
    tiles = -(-x.queries // height) + (x.batch if x.packed else 0)
    return tiles, (1 if x.packed else x.batch) * x.heads // members, height, members


def _segments(x: Attention) -> int:
    return -(-x.keys // SEGMENT)


def _scratch(x: Attention, s: LatentSchedule, blocks: int) -> int:
    """Floats."""
    if s.shares == 1:
        return blocks * _ROWS * _VALUES
    return x.q.shape[:-1].numel() * _segments(x) * (_VALUES + 2)


def schedules(x: Attention) -> tuple[LatentSchedule, ...]:
    """All kinds that :func:`choose` may return, for tests."""
    return tuple(map(LatentSchedule, (1, 2, 5)))


def choose(x: Attention) -> LatentSchedule:
    """The schedule for a call."""
    tiles, heads, _, _ = _tiles(x)
    multiprocessors = devices.device_info(x.q.get_device()).sm_count
    shares = sm90.best_shares(tiles * heads, _segments(x), _ROWS, multiprocessors)
    fits = _scratch(x, LatentSchedule(2), 0) * 4 <= _SCRATCH
    return LatentSchedule(shares if fits else 1)


def spec(x: Attention, s: LatentSchedule) -> compiler.KernelSpec:
    """The kernel under a schedule."""
    constants: dict[str, int | str] = {
        "INPUT_F16": int(x.q.dtype == torch.float16),
        "SPLIT": int(s.shares > 1),
        "PAGED": int(x.block_table is not None),
    }
    return compiler.KernelSpec(
        *("attention_latent_sm90.cu", "attention_latent_sm90", _PARAMS, tuple(constants.items())),
        block=384,
        smem=_SMEM,
        programmatic=True,
        oldest=SM_90,
    )


def specs(x: Attention) -> tuple[compiler.KernelSpec, ...]:
    """All kernels of calls like `x`."""
    return tuple(dict.fromkeys(spec(x, s) for s in schedules(x)))


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """All of a launch that a call's geometry decides: everything but addresses.

    Attributes:
        kernel: under its schedule.
        maps: of q and k.
        grid: blocks.
        sizes: members of ``struct Params`` between the addresses of results and those of sequences.
        problem: those after the mask's.
        scratch: floats.
        merge: the kernel that merges segments.
    """

    kernel: runtime.Kernel
    maps: tuple[Maps, Maps]
    grid: int
    sizes: tuple[int, ...]
    problem: tuple[Any, ...]
    scratch: int
    merge: universal.Merge | None

    def run(self, x: Attention, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, lse2 = empty_results(x, out, checked=x.block_table is not None)
        scratch = runtime.empty((self.scratch,), torch.float32, x.q.get_device())
        of_q, of_k = self.maps
        self.kernel.launch(
            (self.grid, 1, 1),
            *(of_q[x.q.data_ptr()], of_k[x.k.data_ptr()]),
            *map(address, (out, x.sinks, lse, lse2, scratch)),
            *self.sizes,
            *sequences(x),
            *self.problem,
        )
        if self.merge is not None:
            self.merge.run(x, out, lse, lse2, scratch, None)
        return out, lse, lse2


def make_plan(x: Attention, schedule: LatentSchedule | None = None) -> LatentPlan:
    """The plan of a call that the kernel supports; with a schedule instead of the default choice."""
    check(x)
    s = schedule or choose(x)
    device = x.q.get_device()
    layouts = layout(x.q), layout(x.k)
    tiles, heads, height, members = _tiles(x)
    # All of them, so that a call with another schedule loads nothing in the capture of a graph.
    every = *specs(x), universal.Merge.spec(x)
    runtime.announce(every, device)
    for other in every:
        runtime.load(other, device)
    merge = universal.Merge.of(x)
    grid = min(tiles * heads * s.shares, devices.device_info(device).sm_count)
    sizes = (*lse_strides(x), tiles, heads, _segments(x), s.shares, members, height)
    return LatentPlan(
        kernel=runtime.load(spec(x, s), device),
        maps=(
            query_maps(x.q.dtype, layouts[0], height, members),
            tile_maps(x.q.dtype, layouts[1], _box(x), 64, 256),
        ),
        grid=grid,
        sizes=(*sizes, shared_matrices(layouts), _box(x)),
        problem=problem(x)[7:],
        scratch=_scratch(x, s, grid),
        merge=merge if s.shares > 1 else None,
    )


_plans: Plans[LatentPlan | None] = Plans(1024)


def plan(x: Attention) -> LatentPlan | None:
    """The plan of a call, found by its geometry; None if the kernel does not support it."""
    q, k, v, offsets, table = x.q, x.k, x.v, x.cu_seqlens_q, x.block_table
    if q.shape[-1] != _HEAD or v.data_ptr() != k.data_ptr() or (q.data_ptr() | k.data_ptr()) & 15:
        return None
    key = (
        *(q.dtype, q.get_device(), q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()),
        *(x.contract, x.scale, x.softcap, x.window, x.align, None if offsets is None else len(offsets)),
        *(x.cu_seqlens_k is None, x.key_start is None, x.key_length is None, x.mask is None),
        *((None,) if table is None else (table.shape[1], table.stride(0))),
    )
    try:
        return _plans[key]
    except KeyError:
        return _plans.keep(key, make_plan(x) if supports(x) else None)
