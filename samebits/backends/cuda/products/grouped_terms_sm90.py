"""Grouped sums over rows, of bf16 and f16 matrices on Hopper: host side of ``kernels/grouped_terms_sm90.cu``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products import schedule_sm90, tensor_core_sm90
from samebits.backends.cuda.products.grouped import GroupedCudaPlan, nothing
from samebits.backends.cuda.products.grouped_sm90 import GROUPED_SM90, balanced, output_strides, variant
from samebits.backends.cuda.products.schedule_sm90 import Gemm, Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core_sm90 import NO_MAP, Sm90Variant
from samebits.backends.cuda.tensor_maps import Maps
from samebits.backends.grouped import GroupedKernel, GroupedProduct, refuse_large
from samebits.backends.product import Matrix, need

__all__ = ["GROUPED_TERMS_SM90", "spec", "with_table"]

_PARAMS = "128s128s128s128s128sPPPqq8iPP2iq"
_STEP = 16
STAGE_COPIES = 1
_TEAMS = ((128, 128), (128, 192), (192, 128))
_SHARED = ((256, 128), (128, 256), (256, 192))


def _schedules() -> list[Sm90Schedule]:
    tiles = [(*tile, share) for share, some in ((1, _TEAMS), (2, _SHARED)) for tile in some]
    found = [Sm90Schedule(m, n, 64, 0, 2, share, c) for m, n, share in tiles for c in (1, 2)]
    return [s.filled(s.panels, True, True) for s in found if s.block_m // 64 % s.cluster == 0]


class GroupedTermsSm90Kernel(GroupedKernel[Sm90Schedule]):
    name, step = "grouped_terms_sm90", "mma"

    @functools.cached_property
    def catalogue(self) -> Sequence[Sm90Schedule]:
        return tuple(_schedules())

    def supports(self, p: GroupedProduct) -> bool:
        """Whether TMA can read the operands in columns of 64."""
        return p.of_terms and p.m % 64 == p.n % 64 == 0 and GROUPED_SM90.supports(p)

    def cost(self, p: GroupedProduct, s: Sm90Schedule) -> float:
        return schedule_sm90.estimate(s, balanced(p), devices.device_info(p.device).sm_count)

    def choose(self, p: GroupedProduct) -> Sm90Schedule:
        return chosen(balanced(p), devices.device_info(p.device).sm_count)

    def plan(self, p: GroupedProduct, s: Sm90Schedule | None = None) -> GroupedCudaPlan:
        need(p.out.empty or self.supports(p), f"{self.name}: expected {p} that TMA can read, on sm_90")
        if p.out.empty:
            return GroupedCudaPlan(nothing)
        v = replace(variant(p), cu_seqlens_dtype=None, folded=False)
        s = with_table(s or self.choose(p), p.groups)
        a_maps = _step_maps(p.a, 0, s.block_m // s.cluster, 1), _step_maps(p.a, 0, s.block_m, s.block_k // 16 // s.cluster)
        b_maps = _step_maps(p.b, 1, s.block_n, 1), _step_maps(p.b, 1, s.block_n, s.block_k // 16)
        if not STAGE_COPIES:
            a_maps, b_maps = (a_maps[0], a_maps[0]), (b_maps[0], b_maps[0])
        row_stride, batch_stride = output_strides(p)
        out_maps = None
        if v.aligned and v.out_dtype != torch.float32 and s.panel:
            sizes, strides = (p.n, p.m, p.groups), (row_stride * 2, batch_stride * 2)
            out_maps = Maps(v.out_dtype, sizes, strides, (s.panel, 64, 1), s.panel * 2)
        rest = (row_stride, batch_stride, p.m, p.n, p.k, p.groups, 0, 0, 0, s.group)
        tiles = -(-p.m // s.block_m) * -(-p.n // (s.block_n * s.cluster)) * p.groups
        refuse_large(p, tiles)
        sms = devices.device_info(p.device).sm_count
        grid = min(tiles, s.resident(sms)) * s.cluster, 1, 1
        kernel = runtime.load(spec(v, s, p.groups), p.device)

        def launch(a: int, b: int, out: int, offs: int, bias: int, runs: int) -> None:
            maps = a_maps[0][a], b_maps[0][b], NO_MAP if out_maps is None else out_maps[out]
            stages = a_maps[1][a], b_maps[1][b]
            kernel.launch(grid, *maps, *stages, out, 0, 0, *rest, offs, runs, p.groups, p.rows, 0)

        return GroupedCudaPlan(launch, a_maps[0], b_maps[0], out_maps)


def _step_maps(x: Matrix, along: int, columns: int, steps: int) -> Maps:
    """The tensor maps for boxes of some `columns` in some k16 `steps`."""
    size, k = x.shape[along], x.shape[1 - along]
    row = (x.strides[1 - along] if k > 1 else round_up(size, 8)) * x.dtype.itemsize
    shape, strides = (64, k, size // 64, steps), (row, 128, _STEP * row)
    return Maps(x.dtype, shape, strides, (64, _STEP, columns // 64, steps), 128, 256)


@functools.lru_cache(maxsize=4096)
def chosen(g: Gemm, sms: int) -> Sm90Schedule:
    """The schedule for groups of which each is as `g`, a batch of products."""
    g = replace(g, m=max(g.m, 129))
    found = [schedule_sm90.settle(s, g, sms) for s in _schedules()]
    return replace(min(found, key=lambda s: schedule_sm90.estimate(s, g, sms)), ahead=0)


def _table(s: Sm90Schedule, groups: int) -> int:
    """Bytes of shared memory for the barriers of stages, and the table of groups."""
    return s.stages * 12 + 8 + groups * 24


def with_table(s: Sm90Schedule, groups: int) -> Sm90Schedule:
    """`s` with a ring that leaves room for the table of groups."""
    longest = s.filled(s.panels + _table(replace(s, stages=16), groups), True, True)
    return replace(s, stages=min(s.stages, longest.stages))


def spec(v: Sm90Variant, s: Sm90Schedule, groups: int) -> compiler.KernelSpec:
    """The kernel of `v`, beside whose ring the table of so many groups has room."""
    of = tensor_core_sm90.spec(v, s)
    return replace(
        of,
        source="grouped_terms_sm90.cu",
        entry="grouped_terms_sm90",
        params=_PARAMS,
        constants=(*of.constants, ("GROUPED", "OF_TERMS"), ("STAGE_COPIES", STAGE_COPIES)),
        smem=of.smem + _table(s, groups),
    )


GROUPED_TERMS_SM90 = GroupedTermsSm90Kernel()
