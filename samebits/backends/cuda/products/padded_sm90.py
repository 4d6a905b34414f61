"""Products on Hopper by copies of matrices that TMA cannot read or write: ``kernels/padded_sm90.cu``.

Rows of 4,095 elements, say, are no multiple of 16 bytes apart. The universal kernel loads their elements one
by one, and takes several times as long as a copy and the kernel of :mod:`.tensor_core_sm90`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan, ScratchPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90, variant
from samebits.backends.cuda.tensor_maps import Side
from samebits.backends.product import LARGEST, Matrix, Product, need

__all__ = ["PADDED_SM90", "spec"]

_LAUNCH, _BYTES_IN_A_US = 2.0, 3.0e6
"""Microseconds of a launch, and bytes that a copy reads and writes in one."""
_ONE_BY_ONE = 3
"""How many times as long as it estimates the universal kernel takes for elements that it loads one by one."""

Copy = Callable[[int, int], None]
"""Launch on the addresses of a matrix and of its copy."""


def spec() -> compiler.KernelSpec:
    """The kernel that copies an operand."""
    return compiler.KernelSpec("padded_sm90.cu", "padded_sm90", "PqqqP3Ii", (), block=256)


def spec_back() -> compiler.KernelSpec:
    """The kernel that copies an output."""
    return compiler.KernelSpec("padded_sm90.cu", "back", "PqPqqii", (), block=256)


def _readable(x: Matrix, row: int, k: int) -> bool:
    side = Side.of(x, row, k)
    return x.misalignment == 0 and side.k_major is not None and side.batch % 8 == 0


def _inner(x: Matrix) -> int:
    """The dimension along which a copy is contiguous: that of `x`, or the one with the shorter steps."""
    steps = [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]
    return -1 if steps[-1] == 1 or (steps[-2] != 1 and steps[-1] <= steps[-2]) else -2


def _matrices(x: Matrix) -> int:
    return x.shape[0] if x.ndim == 3 and x.strides[0] else 1


def _copied(x: Matrix) -> Matrix:
    """The copy of `x`."""
    inner = _inner(x)
    outer = -3 - inner
    row = round_up(x.shape[inner], 8)
    strides: tuple[int, ...] = (row, 1) if inner == -1 else (1, row)
    if x.ndim == 3:
        strides = (row * x.shape[outer] if _matrices(x) > 1 else 0, *strides)
    return Matrix(x.dtype, x.shape, strides)


def _eights(x: Matrix) -> int:
    """How many times eight elements the copy of `x` has."""
    inner = _inner(x)
    return _matrices(x) * x.shape[-3 - inner] * (round_up(x.shape[inner], 8) // 8)


def _copy(x: Matrix, device: int) -> Copy:
    inner = _inner(x)
    outer, count = -3 - inner, _eights(x)
    kernel = runtime.load(spec(), device)
    steps = x.strides[0] if x.ndim == 3 else 0, x.strides[outer], x.strides[inner]
    sizes = count, round_up(x.shape[inner], 8) // 8, x.shape[outer], x.shape[inner]
    grid = -(-count // 256), 1, 1

    def launch(at: int, to: int) -> None:
        kernel.launch(grid, at, *steps, to, *sizes)

    return launch


def _copy_back(p: Product) -> Copy:
    """From rows of a multiple of 8 columns to the output."""
    kernel, columns = runtime.load(spec_back(), p.device), round_up(p.n, 8)
    steps = (p.out.strides[0] if p.batch > 1 else 0), p.out.strides[-2]
    grid = p.batch * p.m, 1, 1

    def launch(at: int, to: int) -> None:
        kernel.launch(grid, at, columns, to, *steps, p.m, p.n)

    return launch


def _parts(p: Product) -> tuple[Matrix | None, Matrix | None]:
    """The operands that are copied."""
    a = None if _readable(p.a, -2, -1) else p.a
    return a, None if _readable(p.b, -1, -2) else p.b


def _inside(p: Product) -> Product:
    """The product of readable operands and copies, and into memory of its own if :func:`_comes_back`."""
    a, b = _parts(p)
    inside = replace(p, a=p.a if a is None else _copied(a), b=p.b if b is None else _copied(b))
    if not _comes_back(p):
        return inside
    columns = round_up(p.n, 8)
    out = Matrix(p.out.dtype, (*p.out.shape[:-1], columns), (*_rows_before(p, columns), columns, 1))
    return replace(inside, b=_with_columns(inside.b, columns), out=out)


def _rows_before(p: Product, columns: int) -> tuple[int, ...]:
    return (p.m * columns,) if p.out.ndim == 3 else ()


def _with_columns(b: Matrix, columns: int) -> Matrix:
    """`b` with the zeros after its rows, which are columns of the product."""
    return b._replace(shape=(*b.shape[:-1], columns))


def _comes_back(p: Product) -> bool:
    """Whether an output that TMA cannot write is a copy. The copy of b has the columns after it."""
    _, b = _parts(p)
    plain = p.start == "zero" and p.bias is None and p.out.dtype.itemsize == 2 and p.out.strides[-1] == 1
    return plain and b is not None and _inner(b) == -1 and not variant(p).aligned


class PaddedSm90Kernel(CudaKernel[Sm90Schedule]):
    name, step = "padded_sm90", "mma"

    @property
    def catalogue(self) -> Sequence[Sm90Schedule]:
        """A few: the others are verified without copies."""
        every = TENSOR_CORE_SM90.catalogue
        return every[:: -(-len(every) // 8)]

    def supports(self, p: Product) -> bool:
        """Whether there is something to copy, and then TMA can read it."""
        if p.step != self.step or p.a.ndim > 3 or p.b.ndim > 3 or p.k == 0 or p.out.empty:
            return False
        copied = [x for x in _parts(p) if x is not None]
        small = all(_eights(x) <= LARGEST for x in copied)
        return bool(copied) and small and TENSOR_CORE_SM90.supports(_inside(p))

    def schedules(self, p: Product) -> Sequence[Sm90Schedule]:
        every = TENSOR_CORE_SM90.schedules(_inside(p))
        return [s for s in self.catalogue if s in every]

    def candidates(self, p: Product) -> Sequence[Sm90Schedule]:
        return TENSOR_CORE_SM90.candidates(_inside(p))

    def variations(self, p: Product, s: Sm90Schedule) -> Sequence[Sm90Schedule]:
        return TENSOR_CORE_SM90.variations(_inside(p), s)

    def choose(self, p: Product) -> Sm90Schedule:
        return TENSOR_CORE_SM90.choose(_inside(p))

    def cost(self, p: Product, s: Sm90Schedule) -> float:
        """Estimated microseconds, copies included."""
        copied = [8 * _eights(x) for x in _parts(p) if x is not None]
        if _comes_back(p):
            copied.append(p.batch * p.m * p.n)
        copies = sum(_LAUNCH + 4 * n / _BYTES_IN_A_US for n in copied)
        return copies + TENSOR_CORE_SM90.cost(_inside(p), s)

    def pays(self, p: Product) -> bool:
        """Whether copies should cost less than they save."""
        if not self.supports(p):
            return False
        universal = _ONE_BY_ONE * TENSOR_CORE.cost(p, TENSOR_CORE.choose(p))
        return self.cost(p, self.choose(p)) < universal

    def plan(self, p: Product, s: Sm90Schedule | None = None) -> CudaPlan:
        need(self.supports(p), f"{self.name}: expected matrices of 16 bits that TMA cannot read, on sm_90")
        return _PaddedPlan(p, TENSOR_CORE_SM90.plan(_inside(p), s))


class _PaddedPlan(ScratchPlan):
    """Copies, the plan of their product, and its way back."""

    __slots__ = ("_a", "_b", "_back", "_inside", "_places")

    def __init__(self, p: Product, inside: CudaPlan) -> None:
        a, b = _parts(p)
        self._a = None if a is None else _copy(a, p.device)
        self._b = None if b is None else _copy(b, p.device)
        self._back = _copy_back(p) if _comes_back(p) else None
        of_out = p.batch * p.m * round_up(p.n, 8) * 2 if self._back else 0
        sizes = [0 if x is None else 16 * _eights(x) for x in (a, b)]
        self._places = tuple(itertools.accumulate((0, *(round_up(n, 256) for n in sizes))))
        self._inside = inside
        super().__init__(p.device, (self._places[-1] + of_out) // 4, self._copy_and_launch)

    def _inner(self, room: int, *addresses: int) -> list[int]:
        """The addresses of a, b and out for the product of copies."""
        copies = self._a, self._b, self._back
        return [
            given if copy is None else room + place
            for given, copy, place in zip(addresses, copies, self._places, strict=True)
        ]

    def encode_in(self, room: int, *addresses: int) -> None:
        self._inside.encode(*self._inner(room, *addresses))

    def _copy_and_launch(self, room: int, a: int, b: int, out: int, *rest: int) -> None:
        inner = self._inner(room, a, b, out)
        for copy, at, to in zip((self._a, self._b), (a, b), inner, strict=False):
            if copy is not None:
                copy(at, to)
        self._inside.launch(*inner, *rest)
        if self._back is not None:
            self._back(inner[2], out)


PADDED_SM90 = PaddedSm90Kernel()
