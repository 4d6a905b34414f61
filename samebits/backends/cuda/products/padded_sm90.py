"""Products on Hopper by copies of operands that TMA cannot read: ``kernels/padded_sm90.cu``.

Rows of 4,095 elements, say, are no multiple of 16 bytes apart. The universal kernel loads their elements one
by one, and takes several times as long as a copy and the kernel of :mod:`.tensor_core_sm90`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan, ScratchPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.cuda.tensor_maps import Side
from samebits.backends.product import LARGEST, Matrix, Product, need

__all__ = ["PADDED_SM90", "spec"]

_LAUNCH, _BYTES_IN_A_US = 2.0, 3.0e6
"""Microseconds of a launch, and bytes that a copy reads and writes in one."""
_ONE_BY_ONE = 3
"""How many times as long as it estimates the universal kernel takes for elements that it loads one by one."""
_WRITTEN_IN_A_US = 0.5e6
"""Bytes of such rows that it writes in a microsecond: the bound where terms are few."""

Copy = Callable[[int, int], None]
"""Launch on the addresses of a matrix and of its copy."""


def spec() -> compiler.KernelSpec:
    """The kernel that copies."""
    return compiler.KernelSpec("padded_sm90.cu", "padded_sm90", "PqqqP3Ii", (), block=256, programmatic=True)


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


def _parts(p: Product) -> tuple[Matrix | None, Matrix | None]:
    """The operands that are copied."""
    a = None if _readable(p.a, -2, -1) else p.a
    return a, None if _readable(p.b, -1, -2) else p.b


def _inside(p: Product) -> Product:
    """The product of readable operands and copies."""
    a, b = _parts(p)
    return replace(p, a=p.a if a is None else _copied(a), b=p.b if b is None else _copied(b))


class PaddedSm90Kernel(CudaKernel[Product, Sm90Schedule]):
    name, step = "padded_sm90", "mma"
    sources = "padded_sm90.cu", "tensor_core_sm90.cu"

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

    def all(self, p: Product) -> Sequence[Sm90Schedule]:
        every = TENSOR_CORE_SM90.all(_inside(p))
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
        copies = sum(_LAUNCH + 4 * n / _BYTES_IN_A_US for n in copied)
        return copies + TENSOR_CORE_SM90.cost(_inside(p), s)

    def pays(self, p: Product) -> bool:
        """Whether copies should cost less than they save."""
        if not self.supports(p):
            return False
        writes = p.batch * p.m * p.n * p.out.dtype.itemsize / _WRITTEN_IN_A_US
        universal = _ONE_BY_ONE * TENSOR_CORE.cost(p, TENSOR_CORE.choose(p)) + writes
        return self.cost(p, self.choose(p)) < universal

    def plan(self, p: Product, s: Sm90Schedule | None = None) -> CudaPlan:
        need(self.supports(p), f"{self.name}: expected matrices of 16 bits that TMA cannot read, on sm_90")
        return _PaddedPlan(p, TENSOR_CORE_SM90.plan(_inside(p), s))


class _PaddedPlan(ScratchPlan):
    """Copies, and the plan of their product."""

    __slots__ = ("_copies", "_inside", "_places")

    def __init__(self, p: Product, inside: CudaPlan) -> None:
        parts = _parts(p)
        self._copies = tuple(None if x is None else _copy(x, p.device) for x in parts)
        sizes = [0 if x is None else round_up(16 * _eights(x), 256) for x in parts]
        self._places = 0, sizes[0]
        self._inside = inside
        super().__init__(p.device, sum(sizes) // 4, self._copy_and_launch)

    def _inner(self, room: int, a: int, b: int) -> list[int]:
        """The addresses of a and b for the product of copies."""
        return [
            given if copy is None else room + place
            for given, copy, place in zip((a, b), self._copies, self._places, strict=True)
        ]

    def encode_in(self, room: int, *addresses: int) -> None:
        a, b, out = addresses
        self._inside.encode(*self._inner(room, a, b), out)

    def _copy_and_launch(self, room: int, a: int, b: int, *rest: int) -> None:
        inner = self._inner(room, a, b)
        for copy, at, to in zip(self._copies, (a, b), inner, strict=True):
            if copy is not None:
                copy(at, to)
        self._inside.launch(*inner, *rest)


PADDED_SM90 = PaddedSm90Kernel()
