"""Grouped sums over rows, bf16 and f16, on Hopper: host side of ``kernels/grouped_terms_sm90.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products import choice_sm90, tensor_core_sm90
from samebits.backends.cuda.products.grouped_sm90 import GROUPED_SM90, balanced, output_strides, variant
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan, nothing
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core_sm90 import NO_MAP, Sm90Variant
from samebits.backends.cuda.tensor_maps import Maps
from samebits.backends.grouped import GroupedProduct, refuse_large
from samebits.backends.product import Matrix, need

__all__ = ["GROUPED_TERMS_SM90", "spec", "with_table"]

_PARAMS = "128s128s128s128s128sPPPqq8iPP2iq"
_STEP = 16


def _schedule(m: int, n: int, share: int, group: int) -> Sm90Schedule:
    """A tile of a warpgroup's own, or that two share, in the order of `group` rows of tiles."""
    s = Sm90Schedule(m, n, 32, 0, 2, share, early=True, group=group)
    return s.filled(s.panels, True, True)


_SHORT = _schedule(128, 192, 1, 16)
"""For groups of few rows."""
_LONG = _schedule(256, 192, 2, 8)
_OTHERS = _schedule(192, 128, 1, 11), _schedule(256, 128, 2, 8), _schedule(128, 256, 2, 16)
_FEWEST, _MANY = 100, 300
"""Rows of a group on average, from which on this kernel is faster, and from which on large tiles are."""
_NEAR = 24 << 20
"""Bytes of a group's operands up to which they stay in the L2 cache. Beyond, large tiles are slower."""


class _Pairs(dict[int, tuple[bytes, bytes]]):
    """The tensor maps of one step and of a whole stage, by address."""

    def __init__(self, *maps: Maps) -> None:
        self._maps = maps

    def __missing__(self, address: int) -> tuple[bytes, bytes]:
        step, stage = self._maps
        if len(self) >= 4096:
            self.clear()
        made = self[address] = step[address], stage[address]
        return made


class GroupedTermsSm90Kernel(CudaKernel[GroupedProduct, Sm90Schedule]):
    name, step = "grouped_terms_sm90", "mma"

    @property
    def catalogue(self) -> Sequence[Sm90Schedule]:
        return _SHORT, _LONG, *_OTHERS

    def supports(self, p: GroupedProduct) -> bool:
        """Whether there are sequences, and TMA can read the operands in columns of 64."""
        return p.of_terms and p.runs and p.m % 64 == p.n % 64 == 0 and GROUPED_SM90.supports(p)

    def cost(self, p: GroupedProduct, s: Sm90Schedule) -> float:
        return choice_sm90.estimate(s, balanced(p), devices.device_info(p.device).sm_count)

    def choose(self, p: GroupedProduct) -> Sm90Schedule:
        rows = balanced(p).k
        near = rows * (p.m + p.n) * p.a.dtype.itemsize <= _NEAR
        return _LONG if rows >= _MANY and near else _SHORT

    def pays(self, p: GroupedProduct) -> bool:
        """Whether this kernel should be faster than the one that takes steps of one sequence at a time."""
        return self.supports(p) and balanced(p).k >= _FEWEST

    def plan(self, p: GroupedProduct, s: Sm90Schedule | None = None) -> CudaPlan:
        need(p.out.empty or self.supports(p), f"{self.name}: expected {p} that TMA can read, on sm_90")
        if p.out.empty:
            return CudaPlan(nothing)
        v = replace(variant(p), cu_seqlens_dtype=None, folded=False)
        s = with_table(s or self.choose(p), p.groups)
        a_columns, steps = s.block_m // s.cluster, s.block_k // _STEP
        a_maps = _Pairs(_step_maps(p.a, 0, a_columns, 1), _step_maps(p.a, 0, s.block_m, steps // s.cluster))
        b_maps = _Pairs(_step_maps(p.b, 1, s.block_n, 1), _step_maps(p.b, 1, s.block_n, steps))
        row_stride, batch_stride = output_strides(p)
        sizes = p.n, p.m, p.groups
        out_maps = tensor_core_sm90.output_maps(v, s, sizes, (row_stride, batch_stride))
        rest = (row_stride, batch_stride, p.m, p.n, p.k, p.groups, 0, 0, 0, s.group)
        tiles = -(-p.m // s.block_m) * -(-p.n // (s.block_n * s.cluster)) * p.groups
        refuse_large(p, tiles)
        sms = devices.device_info(p.device).sm_count
        grid = min(tiles, s.resident(sms)) * s.cluster, 1, 1
        kernel = runtime.load(spec(v, s, p.groups), p.device)

        def launch(a: int, b: int, out: int, offs: int, bias: int, runs: int) -> None:
            (a_step, a_stage), (b_step, b_stage) = a_maps[a], b_maps[b]
            maps = a_step, b_step, NO_MAP if out_maps is None else out_maps[out]
            kernel.launch(grid, *maps, a_stage, b_stage, out, 0, 0, *rest, offs, runs, p.groups, p.rows, 0)

        return CudaPlan(launch, a_maps, b_maps, out_maps)


def _step_maps(x: Matrix, along: int, columns: int, steps: int) -> Maps:
    """The tensor maps for boxes of some `columns` in some k16 `steps`."""
    size, k = x.shape[along], x.shape[1 - along]
    row = (x.strides[1 - along] if k > 1 else round_up(size, 8)) * x.dtype.itemsize
    shape, strides = (64, k, size // 64, steps), (row, 128, _STEP * row)
    return Maps(x.dtype, shape, strides, (64, _STEP, columns // 64, steps), 128, 256)


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
        constants=(*of.constants, ("GROUPED", "OF_TERMS")),
        smem=of.smem + _table(s, groups),
    )


GROUPED_TERMS_SM90 = GroupedTermsSm90Kernel()
