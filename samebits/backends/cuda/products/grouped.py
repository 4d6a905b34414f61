"""Grouped products by the universal kernels: host side of their form with ``GROUPED``.

``kernels/tensor_core.cu`` and ``kernels/fma.cu`` take every layout, stride, alignment and size here, too.
Their schedules are those of plain products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from samebits.backends.cuda import runtime
from samebits.backends.cuda.products import fma, tensor_core
from samebits.backends.cuda.products.fma import FmaSchedule
from samebits.backends.cuda.products.plan import (
    TYPES,
    CudaKernel,
    CudaPlan,
    TileLayout,
    matrix_strides,
    nothing,
    tile_layout,
    writes_vectors,
)
from samebits.backends.cuda.products.tensor_core import TensorCoreSchedule
from samebits.backends.grouped import GroupedProduct, refuse_large

__all__ = ["GROUPED_FMA", "GROUPED_TENSOR_CORE", "Balanced", "balanced"]


class Balanced(NamedTuple):
    """The batch of products that a grouped product would be if all its groups had as many rows."""

    device: int
    m: int
    n: int
    k: int
    batch: int


def balanced(p: GroupedProduct) -> Balanced:
    """What schedules are chosen for: no host code knows the groups' sizes."""
    parts = max(1, min(p.groups, p.rows))
    share = -(-p.rows // parts)
    if p.of_terms:
        return Balanced(p.device, p.m, p.n, share, p.groups)
    return Balanced(p.device, share, p.n, p.k, parts)


class GroupedUniversal(CudaKernel[GroupedProduct, Any]):
    """A universal kernel in its grouped form.

    Args:
        of: the kernel of plain products: `TENSOR_CORE` or `FMA`.
        chunk: elements that it copies at once.
    """

    def __init__(self, of: Any, chunk: int) -> None:
        self._of, self._chunk = of, chunk
        self.name, self.step, self.sources = f"grouped_{of.name}", of.step, (f"{of.name}.cu",)

    @property
    def catalogue(self) -> Sequence[Any]:
        return self._of.catalogue  # type: ignore[no-any-return]

    def supports(self, p: GroupedProduct) -> bool:
        return p.step == self.step

    def all(self, p: GroupedProduct) -> Sequence[Any]:
        return self._of.all(p)  # type: ignore[no-any-return]

    def cost(self, p: GroupedProduct, s: Any) -> float:
        return float(self._of.cost(balanced(p), s))

    def choose(self, p: GroupedProduct) -> Any:
        return self._of.choose(balanced(p))

    def plan(self, p: GroupedProduct, s: Any = None) -> CudaPlan:
        s = s or self.choose(p)
        a = tile_layout(p.a, -2, -1, chunk=self._chunk, ragged=p.of_terms)
        b = tile_layout(p.b, -1, -2, chunk=self._chunk, ragged=p.of_terms)
        if not p.of_terms and not a.k_major:
            a = a._replace(vector=False)  # groups start at any row
        tiles_m = -(-p.m // s.tile_m) if p.of_terms else p.most_tiles(s.tile_m)
        tiles_n = -(-p.n // s.tile_n)
        blocks = tiles_m * tiles_n * (p.groups if p.of_terms else 1)
        refuse_large(p, blocks)
        if p.out.empty:
            return CudaPlan(nothing)
        kernel = runtime.load(self._spec(p, s, a, b), p.device)
        grid, out_strides = (blocks, 1, 1), matrix_strides(p.out)
        start_strides = out_strides if p.accumulate else (0, 0, 0)
        bias_group, bias_column = (0, 0) if p.bias is None else p.bias.strides
        last = TYPES[p.out.dtype] if p.step == "mma" else p.of_terms
        sizes = (
            *(p.m, p.n, p.k, 1, tiles_m, tiles_n, last, writes_vectors(p.out)),
            0 if p.bias is None else TYPES[p.bias.dtype],
            False,
        )
        of_groups = p.groups, p.rows, bias_group

        def launch(a_at: int, b_at: int, out: int, offs: int, bias: int, runs: int) -> None:
            start = out if p.accumulate else 0
            kernel.launch(
                grid,
                *(a_at, *a.strides, b_at, *b.strides, out, *out_strides, start, *start_strides),
                *(bias, bias_column, 0, *sizes, offs, runs, *of_groups),
            )

        return CudaPlan(launch)

    def _spec(self, p: GroupedProduct, s: Any, a: TileLayout, b: TileLayout) -> Any:
        form = "OF_TERMS" if p.of_terms else "OF_ROWS"
        if isinstance(s, TensorCoreSchedule):
            return tensor_core.kernel_spec(s, p.a.dtype, a, b, form)
        assert isinstance(s, FmaSchedule)
        return fma.kernel_spec(s, (p.a.dtype, p.b.dtype, p.out.dtype), a, b, p.of_terms, form)


GROUPED_TENSOR_CORE = GroupedUniversal(tensor_core.TENSOR_CORE, chunk=8)
GROUPED_FMA = GroupedUniversal(fma.FMA, chunk=4)
