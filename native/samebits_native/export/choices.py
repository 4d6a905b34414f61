"""The choice of schedules, as tables by ranges of sizes. The library's own choice fills them in.

A range is known by its last size. Where the sizes are a model's (:data:`SHAPES` and :data:`ROWS`), the table
has exactly the schedule that the library chooses for them. Elsewhere it has the best of those that they need
anyway, so that the number of kernels stays small. No schedule changes a bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from samebits.backends.cuda import linear_logp_sm90, matmul, tuned
from samebits.backends.cuda.products import choice_sm90, grouped_sm90
from samebits.backends.cuda.products.fma import FMA
from samebits.backends.cuda.products.fma_sm90 import FMA_SM90, TERMS
from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.cuda.shapes import ProductShape
from samebits.backends.kernel import Step
from samebits.backends.product import LARGEST, Matrix, Product
from samebits.functions import VOCAB_BLOCK
from samebits.tools.tune.families import product

__all__ = [
    "BATCH",
    "EXPERTS",
    "GROUPS",
    "HEADS",
    "ROWS",
    "SHAPES",
    "Layout",
    "Sizes",
    "Table3",
    "fma_sm90",
    "grouped_tables",
    "layout_tables",
    "plain",
    "statistics",
    "universal",
]

SHAPES = (
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    *((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    *((4096, 24576), (12288, 4096), (5120, 10240), (8192, 5120), (5120, 51200), (25600, 5120)),
    *((7168, 256), (768, 3072), (3072, 768), (4096, 1024)),
)
"""(K, N) of models' projections: those of ``samebits bench``."""

ROWS = (
    *(1, 2, 4, 8, 16, 20, 32, 48, 64, 96, 128, 160, 200, 256, 300),
    *(512, 1024, 2048, 4096, 8192, 16384),
)
"""Numbers of rows that a schedule is chosen for exactly."""

_MORE_ROWS = (384, 768, 1536, 3072)
_MORE_N, _MORE_K = (16, 64, 512, 2048, 16384, 131072), (64, 256, 1024, 2048)
BATCHED = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes m, n and k of matrices in batches."""

BATCH = 32
"""The number of matrices that schedules of batches are chosen for."""

EXPERTS = (
    *((2048, 1536), (768, 2048), (4096, 28672), (14336, 4096)),
    *((7168, 4096), (2048, 7168), (2880, 5760), (2880, 2880)),
)
"""(K, N) of matrices of models' experts."""

HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Sizes of models' heads: of q and k, and of v."""

GROUPS = (8, 32, 128, 256)
"""Numbers of groups that schedules are chosen for: where ranges end, but for the last one."""

_SHARES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
"""Rows of a group."""


class Sizes(NamedTuple):
    """The sizes that tables are for.

    Attributes:
        shapes: (K, N) of weights.
        rows: numbers of rows.
        experts: (K, N) of a group's matrix.
        heads: sizes of attention's heads: of q and k, and of v.
        batched: sizes m, n and k of matrices in batches.
        more: also the sizes between them, by the best schedules among those that are needed anyway.
    """

    shapes: Sequence[tuple[int, int]] = SHAPES
    rows: Sequence[int] = ROWS
    experts: Sequence[tuple[int, int]] = EXPERTS
    heads: Sequence[tuple[int, int]] = HEADS
    batched: Sequence[int] = BATCHED
    more: bool = True

    @property
    def m(self) -> list[int]:
        return sorted({*self.rows, *(_MORE_ROWS if self.more else ())})

    @property
    def k(self) -> list[int]:
        return sorted({*(k for k, _ in self.shapes), *(_MORE_K if self.more else ())})

    @property
    def n(self) -> list[int]:
        return sorted({*(n for _, n in self.shapes), *(_MORE_N if self.more else ())})


@dataclass(frozen=True)
class Table3:
    """A table of any schedules: :class:`samebits_native.export.archive.Table` without its numbers."""

    bounds: tuple[Sequence[int], Sequence[int], Sequence[int]]
    cells: list[Any]


ANY = (LARGEST,)
"""One range for all sizes."""


# ---- 16 bits on Hopper ----

PLAIN = Sm90Schedule(128, 128, 64, 0, 2, 1)
"""The tiles of the schedule that has a kernel for every variant."""

_MOVED = (2, 4, 8)
"""Bytes moved for an element of the output: 16 bits, float32, and float32 that is read, too."""


Point = tuple[int, int, int]
"""m, n and k."""


class Layout(NamedTuple):
    """A layout of both operands, and which sizes m, n and k have in it."""

    a_mn: bool
    b_mn: bool
    outputs: tuple[int, ...]  # indices of _MOVED
    grid: Callable[[Sizes], tuple[list[int], list[int], list[int]]]
    anchors: Callable[[int, int, int], Point]  # of rows, K and N

    def gemm(self, point: Point, batch: int, output: int) -> Gemm:
        m, n, k = point
        return Gemm(m, n, k, batch, self.a_mn, self.b_mn, _MOVED[output])


def _many(rows: Iterable[int]) -> list[int]:
    return [m for m in rows if m >= 256]


LAYOUTS = (
    Layout(False, False, (0, 1), lambda s: (s.m, s.n, s.k), lambda m, k, n: (m, n, k)),
    Layout(False, True, (0, 1), lambda s: (s.m, s.k, s.n), lambda m, k, n: (m, k, n)),
    Layout(True, True, (0, 1, 2), lambda s: (s.n, s.k, _many(s.m)), lambda m, k, n: (n, k, m)),
)
"""x @ weight.T; dy @ weight; dy.T @ x. In the latter two, many rows alone are chosen for exactly."""


def layout_tables(
    sizes: Sizes, sms: int, device: int | None = None
) -> Iterator[tuple[Layout, int, bool, Table3]]:
    """The table of every layout, output (an index of :data:`_MOVED`), for single products and for batches.

    With a device, the tuned table that is in use for it goes before the cost model.
    """
    for layout in LAYOUTS:
        anchored = sizes.rows if not layout.b_mn else _many(sizes.rows)
        points = {layout.anchors(m, k, n) for (k, n) in sizes.shapes for m in anchored}
        for output in layout.outputs:
            exact = {
                point: _tuned(layout, point, output, device)
                or choice_sm90.choose(layout.gemm(point, 1, output), sms)
                for point in points
            }
            kernels = list(dict.fromkeys(replace(s, group=16) for s in exact.values()))
            kernels = kernels or [plain(layout.a_mn, layout.b_mn)]
            bounds = layout.grid(sizes) if exact else ([LARGEST],) * 3
            cells = [
                exact.get(point) or _best(layout.gemm(point, 1, output), kernels, sms)
                for point in _points(*bounds)
            ]
            yield layout, output, False, Table3(bounds, cells)
            if output == 2:
                continue
            cells = [
                _best(layout.gemm(point, BATCH, output), kernels, sms)
                for point in _points(*(sizes.batched,) * 3)
            ]
            yield layout, output, True, Table3((sizes.batched,) * 3, cells)


def _tuned(layout: Layout, point: Point, output: int, device: int | None) -> Sm90Schedule | None:
    """A tuned table's schedule for a product of 16 bits; None if it has none."""
    if device is None:
        return None
    out: Literal["bfloat16", "float32"] = "float32" if output else "bfloat16"
    by_k, accumulate = (not layout.a_mn, not layout.b_mn), output == 2
    shape = ProductShape("mma", "bfloat16", "bfloat16", out, *point, 1, *by_k, accumulate=accumulate)
    found = tuned.find(shape, device, partial(matmul.ways, product(shape, device)))
    return found[1] if found is not None and found[0] is TENSOR_CORE_SM90 else None


def grouped_tables(sizes: Sizes, sms: int) -> Iterator[tuple[bool, int, Table3]]:
    """The tables of grouped products: by the layout of matrices (along n or not), and the range of groups."""
    for b_mn in (False, True):
        of_k, of_n = (sorted({shape[of] for shape in sizes.experts}) for of in (b_mn, not b_mn))
        anchors = [(m, shape[not b_mn], shape[b_mn]) for m in _SHARES for shape in sizes.experts]
        every = [_of_group(point, batch, b_mn) for point in anchors for batch in GROUPS]
        kernels = list(dict.fromkeys(replace(_choice(g, sms), group=16) for g in every))
        for i, batch in enumerate(GROUPS):
            points = _points(_SHARES, of_n, of_k)
            cells = [
                _best(_of_group(point, batch, b_mn), kernels, sms, _choice, grouped_sm90.estimate)
                for point in points
            ]
            yield b_mn, i, Table3((_SHARES, of_n, of_k), cells)


def _of_group(point: Point, batch: int, b_mn: bool) -> Gemm:
    m, n, k = point
    return Gemm(m, n, k, batch, False, b_mn)


def _choice(g: Gemm, sms: int) -> Sm90Schedule:
    return grouped_sm90.chosen(g, sms, False)


def _points(m: Sequence[int], n: Sequence[int], k: Sequence[int]) -> Iterator[Point]:
    return itertools.product(m, n, k)


def plain(a_mn: bool, b_mn: bool) -> Sm90Schedule:
    """:data:`PLAIN` with the longest ring for this layout."""
    return PLAIN.filled(PLAIN.panels, a_mn, b_mn)


def _best(
    p: Gemm,
    kernels: Sequence[Sm90Schedule],
    sms: int,
    choose: Callable[[Gemm, int], Sm90Schedule] = choice_sm90.choose,
    estimate: Callable[[Sm90Schedule, Gemm, int], float] = choice_sm90.estimate,
) -> Sm90Schedule:
    """The choice for `p` if it has a kernel, otherwise the best that has one."""
    chosen = choose(p, sms)
    if replace(chosen, group=16) in kernels:
        return chosen
    best = min(kernels, key=lambda s: estimate(s, p, sms))
    return replace(best, group=chosen.group)


# ---- All others ----


def _product(
    step: Step, device: int, m: int, n: int, k: int, batch: int, a_by_k: bool, b_by_k: bool
) -> Product:
    """A product that the copy engine can read."""
    dtype = torch.float32 if step == "fma" else torch.bfloat16

    def matrix(rows: int, columns: int, transposed: bool = False) -> Matrix:
        pitch = round_up(rows if transposed else columns, 8)
        shape, strides = (rows, columns), (1, pitch) if transposed else (pitch, 1)
        if batch == 1:
            return Matrix(dtype, shape, strides)
        return Matrix(dtype, (batch, *shape), (pitch * (columns if transposed else rows), *strides))

    return Product(step, device, matrix(m, k, not a_by_k), matrix(k, n, b_by_k), matrix(m, n))


def universal(step: Step, sizes: Sizes, device: int, batch: int) -> Table3:
    """The choice of the universal kernel's schedules, which does not depend on k."""
    kernel: Any = FMA if step == "fma" else TENSOR_CORE

    def of(m: int, n: int, k: int) -> Any:
        return kernel.choose(_product(step, device, m, n, k, batch, True, True))

    return _by_products(of, sizes, ANY)


def fma_sm90(sizes: Sizes, device: int, batch: int, a_by_k: bool, b_by_k: bool) -> Table3:
    """The choice of schedules in float32 on Hopper; None where the universal kernel is faster."""

    def of(m: int, n: int, k: int) -> Any:
        p = _product("fma", device, m, n, k, batch, a_by_k, b_by_k)
        s = FMA_SM90.choose(p)
        return s if FMA_SM90.cost(p, s) < FMA.cost(p, FMA.choose(p)) else None

    return _by_products(of, sizes, (*TERMS[:-1], LARGEST))


def _by_products(of: Callable[[int, int, int], Any], sizes: Sizes, terms: Sequence[int]) -> Table3:
    every = sorted({*sizes.k, *sizes.n})  # either is n: of x @ weight.T, and of dy @ weight
    rows = sorted({*sizes.m, *every})
    cells = [of(m, n, min(k, TERMS[-1])) for m, n, k in itertools.product(rows, every, terms)]
    return Table3((rows, every, terms), cells)


def statistics() -> Table3:
    """The choice of schedules of ``statistics_sm90``, exactly: by tokens, and entries of the vocabulary."""

    def of(tokens: int, vocabulary: int) -> Sm90Schedule:
        return linear_logp_sm90.choose("statistics_sm90", tokens, vocabulary)

    few = [1 << i for i in range(3, 13)]
    vocabularies = [*range(1, 64 * VOCAB_BLOCK)]
    chosen = [of(1 << 20, v) for v in vocabularies]
    ends = [v for v, s, after in zip(vocabularies, chosen, chosen[1:], strict=False) if s != after]
    bounds = (few, [*ends, LARGEST], ANY)
    return Table3(bounds, [of(m, v) for m, v in itertools.product(*bounds[:2])])
