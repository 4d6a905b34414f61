"""Products in segments on Hopper: host side of ``kernels/tensor_core_sm90.cu`` with ``SEGMENTS``.

The kernel takes a tile's segments in turn, and adds their sums on the way: those that wait stay in registers,
in shared memory or in L2. So nothing is written but the output. Schedules are those of plain products, and
tiles of two warpgroups small enough that sums of the lowest levels stay in registers. Tensor maps have the
segments as a batch of matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products import choice_sm90, kinds_sm90
from samebits.backends.cuda.products.choice_sm90 import estimate
from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.plan import ScratchPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.segmented import part_of
from samebits.backends.cuda.products.tensor_core_sm90 import (
    NO_MAP,
    TENSOR_CORE_SM90,
    Sm90Variant,
    gemm,
    spec,
    tables,
    variant,
)
from samebits.backends.product import Product, need

__all__ = [
    "candidates",
    "catalogue",
    "choose",
    "held",
    "in_shared",
    "plan",
    "schedules",
    "segmented_spec",
    "supports",
]

_OTHER_REGISTERS = 38  # of a consumer, besides sums
_MOST_HELD = 3  # levels in registers: the kernel has the code of 2^HELD segments
_TILES = ((128, 192), (256, 96), (128, 96))  # that two warpgroups share
_MAIN = Sm90Schedule(128, 128, 64, 0, 2, 2)  # the same, alone or in pairs, with a whole ring or a short one
_SHORT = 5  # stages of a ring that leaves room for a level in shared memory
_STALL = 400  # cycles between the segments of a warpgroup
_STALL_JOINED = 3500  # cycles between its groups of segments, if segments of a group follow without a break
_TO_L2 = 18  # bytes a cycle between a multiprocessor and L2, of sums that wait, beside loads of operands
_TO_SHARED = 100  # to shared memory: assumed
_SMEM = 227 * 1024
_CLOCK = 1750.0  # MHz


def _accumulators(s: Sm90Schedule) -> int:
    """Floats of a thread."""
    return round_up(s.block_m // s.share, 64) * s.block_n // 128


def _levels(segments: int) -> int:
    return segments.bit_length() - 1


def held(s: Sm90Schedule, segments: int) -> int:
    """The levels of the tree whose sums wait in registers: the kernel's ``HELD``."""
    if s.warpgroups == 1:
        warps = round_up(5 * s.blocks, 4)  # as many for each quarter of the multiprocessor
        registers = min(255, 65536 // (32 * warps) // 8 * 8)
    else:
        registers = {2: 232, 3: 152}.get(s.warpgroups, 88) if s.blocks == 1 else 0
    free = (registers - _OTHER_REGISTERS) // _accumulators(s) - 1
    return min(max(free, 0), _levels(segments), _MOST_HELD)


def _sums(s: Sm90Schedule) -> int:
    """Bytes of a block's sums of one level."""
    return _accumulators(s) * 4 * 128 * s.warpgroups


def in_shared(s: Sm90Schedule, segments: int) -> int:
    """The levels above those whose sums wait in shared memory, 0 or 1: the kernel's ``SHARED``."""
    ring = max(s.smem(0, a_mn, b_mn) for a_mn in (False, True) for b_mn in (False, True))
    fits = s.blocks == 1 and ring + _sums(s) <= _SMEM
    return min(int(fits), _levels(segments) - held(s, segments))


def _in_l2(s: Sm90Schedule, segments: int) -> int:
    """The levels whose sums wait in L2."""
    return _levels(segments) - held(s, segments) - in_shared(s, segments)


def _usable(s: Sm90Schedule, light: bool) -> bool:
    """Whether sums stay in registers while a segment is multiplied. Others would be spilled.

    `light`: whether the epilogue takes few registers, see :func:`_light`.
    """
    teams = s.warpgroups > s.share
    return (light or _accumulators(s) < 160) and not (teams and (s.swap or s.cluster > 1))


def _light(v: Sm90Variant) -> bool:
    return v.aligned and v.bias_dtype is None and v.out_dtype != torch.float32


@functools.cache
def catalogue(v: Sm90Variant) -> list[Sm90Schedule]:
    """Every kind of schedule that :func:`choose` can return for kernels of `v`."""
    some = [*kinds_sm90.catalogue(v.a_mn, v.b_mn), *_shared(v.a_mn, v.b_mn)]
    return [s for s in some if _usable(s, _light(v))]


def _shared(a_mn: bool, b_mn: bool, most: int = 2) -> list[Sm90Schedule]:
    """Schedules for many rows whose sums wait in registers, of at most so many blocks in a cluster."""
    main = [replace(_MAIN, cluster=blocks) for blocks in range(1, most + 1)]
    others = [Sm90Schedule(*tile, 64, 0, 2, 2) for tile in _TILES]
    filled = [s.filled(s.panels, a_mn, b_mn) for s in main + others]
    return [*filled, *(replace(s, stages=_SHORT) for s in filled[:most])]


def _cost(s: Sm90Schedule, p: Gemm, sms: int, segments: int) -> float:
    """Estimated microseconds, to compare schedules: those of the plain product, and what the tree adds."""
    rounds = -(-s.tiles(p.swapped() if s.swap else p) // (sms * s.blocks))
    waits = segments >> _levels(segments) - _in_l2(s, segments)  # sums that wait in L2, and the last one
    l2 = 2 * (waits - 1) * _sums(s) / _TO_L2
    shared = 2 * ((segments >> held(s, segments)) - waits) * _sums(s) / _TO_SHARED
    joined = s.warpgroups == s.share > 1 and held(s, segments) > 0  # as in the kernel
    others = s.warpgroups > s.share or s.blocks > 1  # which multiply meanwhile
    stop = _STALL_JOINED / (1 << held(s, segments)) if joined else _STALL * (0.25 if others else 1.0)
    padded = replace(p, k=segments * round_up(p.k // segments, s.block_k))
    return estimate(s, padded, sms) + rounds * (l2 + shared + segments * stop) / _CLOCK


def candidates(p: Gemm, sms: int, light: bool) -> list[Sm90Schedule]:
    """The schedules that :func:`choose` picks from, each as it would run."""
    some = [s for s in choice_sm90.candidates(p, sms) if s.cluster == 1 or p.k > kinds_sm90.LONG]
    if p.m > 128:
        most = 2 if _MAIN.tiles(p) > 2 * sms else 1  # with fewer tiles, pairs were up to 6 % slower
        some += [choice_sm90.completed(s, p, sms) for s in _shared(p.a_mn, p.b_mn, most)]
    return [s for s in some if _usable(s, light)]


@functools.lru_cache(maxsize=4096)
def choose(p: Gemm, sms: int, segments: int, light: bool) -> Sm90Schedule:
    """The schedule of product ``p`` in `segments`, on a GPU with `sms` multiprocessors.

    `light`: whether the epilogue adds no bias, and stores 16 bits by TMA.
    """
    return min(candidates(p, sms, light), key=lambda s: _cost(s, p, sms, segments))


def _by_segments(p: Product, segments: int) -> Product:
    """The product whose operands have a batch of segments, but not the output."""
    k = p.k // segments
    a = part_of(p.a, (segments, p.m, k), (k * p.a.strides[-1], *p.a.strides[-2:]))
    b = part_of(p.b, (segments, k, p.n), (k * p.b.strides[-2], *p.b.strides[-2:]))
    return replace(p, a=a, b=b)


def supports(p: Product, segments: int) -> bool:
    """Whether TMA can read the segments of one product."""
    if p.a.ndim != 2 or p.b.ndim != 2 or p.k < segments or p.k % segments:
        return False
    one = p.start == "zero" and not p.sequences and p.cu_seqlens is None
    return one and TENSOR_CORE_SM90.supports(_by_segments(p, segments))


def schedules(p: Product) -> Sequence[Sm90Schedule]:
    """The schedules of the catalogue for `p`."""
    return catalogue(variant(p))


def segmented_spec(v: Sm90Variant, s: Sm90Schedule) -> compiler.KernelSpec:
    """The kernel of `v`, of a product by segments, under schedule `s`."""
    assert v.segments > 1, v
    plain, shared = spec(v, s), in_shared(s, v.segments)
    a_mn, b_mn = (v.b_mn, v.a_mn) if s.swap else (v.a_mn, v.b_mn)
    more = ("SEGMENTS", v.segments), ("HELD", held(s, v.segments)), ("SHARED", shared)
    smem = max(plain.smem, s.smem(0, a_mn, b_mn) + shared * _sums(s))  # they wait where panels are
    return replace(plain, params=plain.params + "P", constants=plain.constants + more, smem=smem)


def plan(p: Product, segments: int, s: Sm90Schedule | None = None) -> ScratchPlan:
    """The plan of `p` in `segments` under schedule `s`, or under that of :func:`choose`."""
    need(supports(p, segments), f"expected {p} in {segments} segments that TMA can read, on sm_90")
    parts = _by_segments(p, segments)
    v, sms = replace(variant(parts), segments=segments), devices.device_info(p.device).sm_count
    s = s or choose(gemm(p), sms, segments, _light(v))
    grid, a_maps, b_maps, out_maps, rest = tables(parts, v, s)
    kernel = runtime.load(segmented_spec(v, s), p.device)
    swap = s.swap

    def launch(room: int, a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
        tall, wide = a_maps[a], b_maps[b]
        if swap:  # the kernel's A is on the tall side of its tiles
            tall, wide = wide, tall
        out_map = NO_MAP if out_maps is None else out_maps[out]
        kernel.launch(grid, tall, wide, out_map, out, bias, 0, *rest, room)

    return ScratchPlan(
        p.device, grid[0] * _in_l2(s, segments) * _sums(s) // 4, launch, a_maps, b_maps, out_maps
    )
