"""Grouped products of bf16 and f16 matrices on Hopper: host side of ``kernels/grouped_sm90.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products import choice_sm90, kinds_sm90, tensor_core_sm90
from samebits.backends.cuda.products.gemm_sm90 import Gemm, reached
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan, nothing
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule
from samebits.backends.cuda.products.tensor_core_sm90 import NO_MAP, Sm90Variant, in_units
from samebits.backends.cuda.tensor_maps import Side, operand_maps
from samebits.backends.grouped import GroupedProduct, refuse_large
from samebits.backends.product import need

__all__ = [
    "GROUPED_SM90",
    "MOST_GROUPS",
    "balanced",
    "chosen",
    "estimate",
    "for_sequences",
    "kind",
    "output_strides",
    "spec",
    "variant",
    "with_table",
]

_PARAMS = "128s128s128sPPPqq8iPP2iq"
MOST_GROUPS = 1024
"""Groups whose table fits into shared memory beside the ring."""
_OF_CLUSTERS = 1.02  # factor of the estimate for tiles in clusters, where groups differ


def _sides(p: GroupedProduct) -> tuple[Side, Side]:
    return Side.of(p.a, -2, -1), Side.of(p.b, -1, -2)


def balanced(p: GroupedProduct) -> Gemm:
    """The batch of products that it would be if all its groups had as many rows."""
    a, b = _sides(p)
    parts = max(1, min(p.groups, p.rows))
    share, moved = -(-p.rows // parts), p.out.dtype.itemsize * (2 if p.accumulate else 1)
    hbm = reached(devices.device_info(p.device).memory_rate)
    if p.of_terms:
        return Gemm(p.m, p.n, share, p.groups, not a.k_major, not b.k_major, moved, hbm)
    return Gemm(share, p.n, p.k, parts, not a.k_major, not b.k_major, moved, hbm)


def _few_rows(p: Gemm) -> Sm90Schedule:
    """A tile that holds all rows of most groups, so that their matrix is read once: twice the mean.

    A panel of tiles is as tall as of many rows, for each reads the matrix again.
    """
    tokens = next((n for n in (8, 16, 32, 48, 64) if n >= 2 * p.m), 64)
    group = choice_sm90.TOGETHER // tokens
    found = Sm90Schedule(64, tokens, 128, 0, 1, 1, swap=True, blocks=2, group=group)
    return found.filled(found.panels, p.b_mn, p.a_mn)


def kind(s: Sm90Schedule) -> Sm90Schedule:
    """The schedule without the fields that no kernel is compiled for."""
    return replace(s, group=16, early=False)


def _tiles(a_mn: bool, b_mn: bool) -> list[Sm90Schedule]:
    """Those for many rows."""
    return [replace(s, ahead=0) for s in kinds_sm90.catalogue(a_mn, b_mn) if not s.swap]


class GroupedSm90Kernel(CudaKernel[GroupedProduct, Sm90Schedule]):
    name, step = "grouped_sm90", "mma"

    @functools.cached_property
    def catalogue(self) -> Sequence[Sm90Schedule]:
        """Every kind of schedule that :meth:`choose` can return."""
        of_terms = _tiles(True, True)
        found = [*_tiles(False, False), *_tiles(False, True), *of_terms]
        found += [
            _few_rows(Gemm(m, 1, 1, 1, False, b_mn)) for m in (4, 8, 16, 24, 32) for b_mn in (False, True)
        ]
        found += [for_sequences(s, Gemm(1, 1, 1024, 1, True, True)) for s in of_terms]
        return tuple({kind(s): s for s in found}.values())

    def supports(self, p: GroupedProduct) -> bool:
        """Whether TMA can read the operands, as groups of rows along k, and there are few enough groups."""
        if not (
            p.step == self.step
            and devices.device_info(p.device).arch.runs(self.name)
            and not p.out.empty
            and p.k > 0
            and p.groups <= MOST_GROUPS
            and p.out.strides[-1] == 1
            and (p.bias is None or p.bias.strides[-1] == 1 or p.n == 1)
            and p.a.misalignment == p.b.misalignment == 0
        ):
            return False
        a, b = _sides(p)
        if any(side.k_major is None or side.batch % 8 for side in (a, b)):
            return False
        return not (a.k_major or b.k_major) if p.of_terms else bool(a.k_major)

    def all(self, p: GroupedProduct) -> Sequence[Sm90Schedule]:
        a, b = (not side.k_major for side in _sides(p))
        return [s for s in self.catalogue if s.fits(a, b) and not (p.of_terms and s.swap)]

    def candidates(self, p: GroupedProduct) -> Sequence[Sm90Schedule]:
        """The choice, and others of the kinds in the catalogue."""
        g, sms = balanced(p), devices.device_info(p.device).sm_count
        many = choice_sm90.candidates(replace(g, m=max(g.m, 129)), sms)
        found = [replace(s, ahead=0) for s in many if not s.swap]
        if not p.of_terms and g.m <= 64:
            found += [_few_rows(replace(g, m=m)) for m in (-(-g.m // 2), g.m)]
        a, b = (not side.k_major for side in _sides(p))
        right = (s for s in found if kind(s) in self.kinds and s.fits(a, b))
        return tuple(dict.fromkeys((self.choose(p), *right)))

    @functools.cached_property
    def kinds(self) -> set[Sm90Schedule]:
        """Schedules of the catalogue that differ in compiled code, for one layout."""
        return {kind(s) for s in self.catalogue}

    def cost(self, p: GroupedProduct, s: Sm90Schedule) -> float:
        g, sms = balanced(p), devices.device_info(p.device).sm_count
        of_tiles = choice_sm90.estimate if s.swap or p.of_terms else estimate
        return of_tiles(s, g if s.swap else replace(g, m=max(g.m, 129)), sms)

    def choose(self, p: GroupedProduct) -> Sm90Schedule:
        g = balanced(p)
        found = chosen(g, devices.device_info(p.device).sm_count, p.of_terms)
        return for_sequences(found, g) if p.runs else found

    def plan(self, p: GroupedProduct, s: Sm90Schedule | None = None) -> CudaPlan:
        need(p.out.empty or self.supports(p), f"{self.name}: expected {p} that TMA can read, on sm_90")
        if p.out.empty:
            return CudaPlan(nothing)
        v, (a, b) = variant(p), _sides(p)
        s = with_table(s or self.choose(p), v, p.groups)
        swap = s.swap
        a_block, b_block = (s.block_n, s.block_m) if swap else (s.block_m, s.block_n)
        a_sharers, b_sharers = (1, s.cluster) if swap else (s.cluster, 1)
        how, matrices = (v.folded and s.block_k > 64, s.l2_promotion), 1 if p.of_terms else p.groups
        a_maps = operand_maps(v.dtype, a, 1, v.a_mn, a_block, s.block_k, a_sharers, *how)
        b_maps = operand_maps(v.dtype, b, matrices, v.b_mn, b_block, s.block_k, b_sharers, *how)
        row_stride, batch_stride = output_strides(p)
        sizes = p.n, p.m, p.groups if p.of_terms else 1
        out_maps = tensor_core_sm90.output_maps(v, s, sizes, (row_stride, batch_stride))
        rows, columns = (p.n, p.m) if swap else (p.m, p.n)
        batched = (0, 0) if p.of_terms else (int(b.batch != 0), 0) if swap else (0, int(b.batch != 0))
        batch = p.groups if p.of_terms else 1
        rest = (row_stride, batch_stride, rows, columns, p.k, batch, *batched, 0, s.group)
        of_groups = p.groups, p.rows, 0 if p.bias is None else p.bias.strides[0]
        grid = _grid(p, s)
        kernel = runtime.load(spec(v, s, p.groups), p.device)

        def launch(a_at: int, b_at: int, out: int, offs: int, bias: int, runs: int) -> None:
            tall, wide = a_maps[a_at], b_maps[b_at]
            if swap:  # the kernel's A is on the tall side of its tiles
                tall, wide = wide, tall
            out_map = NO_MAP if out_maps is None else out_maps[out]
            kernel.launch(grid, tall, wide, out_map, out, bias, 0, *rest, offs, runs, *of_groups)

        return CudaPlan(launch, a_maps, b_maps, out_maps)


@functools.lru_cache(maxsize=4096)
def chosen(g: Gemm, sms: int, of_terms: bool) -> Sm90Schedule:
    """The schedule for groups of which each is as `g`, a batch of products."""
    if not of_terms and g.m <= 32:
        return _few_rows(g)
    g = replace(g, m=max(g.m, 129))  # the schedules for many rows: others count on one matrix
    found = [s for s in choice_sm90.candidates(g, sms) if not s.swap]
    cost = choice_sm90.estimate if of_terms else estimate
    return replace(min(found, key=lambda s: cost(s, g, sms)), ahead=0)


def for_sequences(s: Sm90Schedule, g: Gemm) -> Sm90Schedule:
    """`s` for groups whose terms are in sequences. Each begins a new block of k, so blocks are short."""
    if g.k < 128:  # what is written is the bound
        return s
    s = replace(s, block_k=32)
    return s.filled(s.panels, True, True)


def estimate(s: Sm90Schedule, g: Gemm, sms: int) -> float:
    """The cost where groups differ. On average, half of each group's last tile has no rows."""
    tiles = g.m / s.block_m + 0.5
    low = max(1, int(tiles))
    few, more = (choice_sm90.estimate(s, replace(g, m=n * s.block_m), sms) for n in (low, low + 1))
    found = few + (more - few) * max(0.0, tiles - low)
    return found * (_OF_CLUSTERS if s.cluster > 1 else 1)


def _table(v: Sm90Variant, groups: int) -> int:
    """Bytes of shared memory that the kernel's scheduler takes."""
    return groups * 24 if v.cu_seqlens_dtype is not None else (2 * groups + 1) * 4


def with_table(s: Sm90Schedule, v: Sm90Variant, groups: int) -> Sm90Schedule:
    """`s` with a ring that leaves room for the table of groups."""
    layouts = (v.b_mn, v.a_mn) if s.swap else (v.a_mn, v.b_mn)
    longest = s.filled(s.panels + _table(v, groups), *layouts)
    return replace(s, stages=min(s.stages, longest.stages))


def output_strides(p: GroupedProduct) -> tuple[int, int]:
    """Strides of rows and of matrices of the output. Groups of rows have one matrix."""
    row = p.out.strides[-2] if p.m > 1 else -(-p.n // 8) * 8
    return row, p.out.strides[0] if p.of_terms and p.groups > 1 else -(-row * p.m // 8) * 8


def variant(p: GroupedProduct) -> Sm90Variant:
    """The variant that `p` needs."""
    aligned = in_units(p.out.dtype, p.out.misalignment, p.n, *output_strides(p))
    a, b = _sides(p)
    return Sm90Variant(
        *(p.a.dtype, p.out.dtype, not a.k_major, not b.k_major),
        *(None if p.bias is None else p.bias.dtype, p.accumulate, aligned, p.k % 64 == 0),
        torch.int32 if p.of_terms else None,
    )


def spec(v: Sm90Variant, s: Sm90Schedule, groups: int) -> compiler.KernelSpec:
    """The kernel of `v`, beside whose ring the table of so many groups has room."""
    of = tensor_core_sm90.spec(v, s)
    form = ("GROUPED", "OF_ROWS" if v.cu_seqlens_dtype is None else "OF_TERMS")
    return replace(
        of,
        source="grouped_sm90.cu",
        entry="grouped_sm90",
        params=_PARAMS,
        constants=(*of.constants, form),
        smem=of.smem + _table(v, groups),
    )


def _grid(p: GroupedProduct, s: Sm90Schedule) -> tuple[int, int, int]:
    """As many blocks as run at once, or as there can be tiles."""
    sms = devices.device_info(p.device).sm_count
    if p.of_terms:
        tiles = -(-p.m // s.block_m) * -(-p.n // (s.block_n * s.cluster)) * p.groups
    elif s.swap:
        tiles = p.most_tiles(s.block_n) * -(-p.n // s.block_m)
    else:
        tiles = p.most_tiles(s.block_m) * -(-p.n // (s.block_n * s.cluster))
    refuse_large(p, tiles)
    return min(tiles, s.resident(sms)) * s.cluster, 1, 1


GROUPED_SM90 = GroupedSm90Kernel()
