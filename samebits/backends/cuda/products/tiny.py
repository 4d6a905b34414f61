"""Batches of tiny matrices: host side of ``kernels/tiny.cu``, under both contracts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from samebits.backends.arch import OLDEST, SM_80
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products.plan import TYPES, CudaKernel, CudaPlan, nothing
from samebits.backends.kernel import Step
from samebits.backends.product import LARGEST as MOST
from samebits.backends.product import Matrix, Product, need

__all__ = ["SCHEDULES", "TINY", "TINY_FMA", "TinyMatrices", "TinySchedule", "choose_schedule", "kernel_spec"]

LARGEST = 64
"""m, n and k up to this are tiny."""


@dataclass(frozen=True, slots=True)
class TinySchedule:
    """The schedule of the kernel for tiny matrices.

    Attributes:
        threads: threads of a block.
        tile: rows and columns that a thread multiplies under FMA. Columns are a multiple of four.
        per_block: matrices that a block takes, if its shared memory holds them.
        staged: load operands through shared memory. Otherwise they go straight into registers, where their
            layout allows it.
        in_flight: tiles that a warp loads at once under TENSOR_CORE, if not staged.
        parts: number of parts in which k is copied, 1 or 2. Multiplication can begin with the first. The
            number is 1 unless :meth:`TinyMatrices.parts` allows more for the operands.
    """

    threads: int
    tile: tuple[int, int]
    per_block: int
    staged: bool = True
    in_flight: int = 1
    parts: int = 1


SCHEDULES = (
    TinySchedule(64, (4, 4), 1),
    TinySchedule(128, (1, 4), 3),
    TinySchedule(128, (8, 4), 2),
    TinySchedule(256, (2, 4), 64),
    TinySchedule(64, (8, 8), 1),
    TinySchedule(128, (4, 8), 1, parts=2),
    TinySchedule(128, (1, 4), 3, staged=False),
    TinySchedule(64, (4, 4), 32, staged=False, in_flight=4),
    TinySchedule(256, (2, 8), 16, staged=False, in_flight=2),
)
"""Some schedules of each kind. Verification shows that none changes a bit."""


class LineLayout(NamedTuple):
    """The layout of an operand's lines in memory: along k, or along m (of a) or n (of b)."""

    k_major: bool
    vector: int  # bytes that are contiguous and aligned everywhere, up to 16
    strides: Three  # batch, line and inner dimension, in bytes


Three = tuple[int, int, int]
"""A value for each of a, b and out."""

# struct Params of the kernel.
_PARAMS = "P3q P3q P3q q 7i".replace(" ", "")

SLACK = 2304
"""Bytes after the last operand that fragments may read: 16 lines of 64 16-bit elements."""


def _pitch(inner: int, size: int) -> int:
    """Bytes from line to line in shared memory, as in the kernel."""
    return -(-inner * size // 16) * 16 | 16


@dataclass(frozen=True, slots=True)
class TinyMatrices:
    """The sizes, dtypes and layouts that a kernel and a schedule are chosen for."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    a_k_major: bool
    b_k_major: bool
    step: Step

    @property
    def smem(self) -> int:
        """Bytes of shared memory for one matrix of each operand."""
        a_lines, a_inner = (self.m, self.k) if self.a_k_major else (self.k, self.m)
        b_lines, b_inner = (self.n, self.k) if self.b_k_major else (self.k, self.n)
        operands = a_lines * _pitch(a_inner, self.a.itemsize) + b_lines * _pitch(b_inner, self.b.itemsize)
        return max(1, operands + (0 if self.step == "fma" else self.m * _pitch(self.n, self.out.itemsize)))

    @property
    def compiled_in(self) -> bool:
        """Whether the sizes are compile-time constants. All other sizes share a kernel that takes them."""
        return self.k > 0 and all(size % 4 == 0 for size in (self.m, self.n, self.k))

    def dense(self, batches: Three, lines: Three, inners: Three) -> bool:
        """Whether matrices with these strides in bytes have no gaps, and are contiguous or broadcast."""
        sizes = self.a.itemsize, self.b.itemsize, self.out.itemsize
        shapes = (self.m, self.k), (self.n, self.k), (self.m, self.n)
        k_major = self.a_k_major, self.b_k_major, True
        return all(
            inner == size and line == shape[along] * size and batch in (0, shape[0] * shape[1] * size)
            for batch, line, inner, shape, along, size in zip(
                batches, lines, inners, shapes, k_major, sizes, strict=True
            )
        )

    def tile(self, s: TinySchedule, dense: bool = True) -> tuple[int, int]:
        """Rows and columns of a thread under FMA. Fewer than in `s` where registers would spill."""
        rows, columns = s.tile
        return (rows, 4 if self.b_k_major else columns) if dense else (min(4, rows), 4)

    def direct(self, s: TinySchedule, vectors: Three) -> bool:
        """Whether a schedule that is not staged can run dense matrices that are loaded in these vectors."""
        rows, columns = self.tile(s)
        whole = self.step == "mma" or self.m % rows == self.n % columns == 0
        a, b = (4 * self.a.itemsize, 4 * self.b.itemsize) if self.step == "fma" else (4, 4)
        return whole and all(v >= w for v, w in zip(vectors, (a, b, 4 * self.out.itemsize), strict=True))

    def parts(self, s: TinySchedule, dense: bool, vectors: Three) -> int:
        """Number of parts in which k is copied.

        It is 1 unless under FMA, staged, with sizes compiled in and tiles without edges. Then each thread has
        one tile of the block's one matrix, and a part is a multiple of four k, in whole vectors.
        """
        rows, columns = self.tile(s, dense)
        k, rest = divmod(self.k, s.parts)
        moved = ((self.a, self.a_k_major, vectors[0]), (self.b, self.b_k_major, vectors[1]))
        can = (
            self.step == "fma"
            and s.staged
            and self.compiled_in
            and self.m % rows == self.n % columns == rest == k % 4 == 0
            and self.m // rows * (self.n // columns) == s.threads
            and not any(k_major and k * x.itemsize % vector for x, k_major, vector in moved)
        )
        return s.parts if can else 1

    def threads(self, s: TinySchedule) -> float:
        """The number of threads that work on one matrix."""
        if self.step == "fma":
            rows, columns = self.tile(s)
            return -(-self.m // rows) * -(-self.n // columns)
        if s.staged:
            return 32 * -(-self.m // 16)
        side = max(self.m, self.n)
        share = 4 if side <= 4 else 2 if side <= 8 else 1
        return 32 * -(-self.m // 16) * -(-self.n // 16) / (share * s.in_flight)


_SMEM = 26 << 10
"""Shared memory of a block, unless one matrix needs more. So eight blocks fit on a multiprocessor."""


_STAGED, _DIRECT = TinySchedule(128, (4, 4), 0), TinySchedule(128, (4, 4), 0, staged=False)

# (m n, k, schedule) under FMA and under TENSOR_CORE. The first that reaches a product's m n and k is chosen.
_CHOICES: dict[Step, tuple[tuple[int, int, TinySchedule], ...]] = {
    "fma": (
        (16, 16, replace(_DIRECT, tile=(1, 4))),
        (64, 16, replace(_DIRECT, tile=(2, 4))),
        (768, 16, _DIRECT),
        (256, 64, _STAGED),
        (1024, 32, replace(_DIRECT, tile=(8, 4))),
        (1024, 64, _STAGED),
        (4096, 16, _STAGED),
        (4096, 64, replace(_STAGED, tile=(8, 4), parts=2)),
    ),
    "mma": (
        (16, 16, replace(_DIRECT, threads=256, in_flight=8)),
        (64, 16, replace(_DIRECT, in_flight=8)),
        (256, 64, _DIRECT),
        (768, 16, replace(_DIRECT, in_flight=4)),
        (1024, 32, replace(_DIRECT, in_flight=2)),
        (2304, 16, replace(_DIRECT, in_flight=2)),
        (4096, 64, _STAGED),
    ),
}
"""Chosen by the times of ``benchmarks.tune`` on an H200."""


def choose_schedule(p: TinyMatrices, batch: int, sms: int) -> TinySchedule:
    """The schedule that should be fastest. The operands' layout may not allow it."""
    s = next(s for area, k, s in _CHOICES[p.step] if p.m * p.n <= area and p.k <= k)
    return completed(s, p, batch, sms)


def completed(s: TinySchedule, p: TinyMatrices, batch: int, sms: int) -> TinySchedule:
    """`s` with matrices for all threads of a block; if staged, for half, with the whole batch on the GPU."""
    busy = p.threads(s)
    if s.staged:
        return replace(s, per_block=max(1, -(-batch // (8 * sms)), int(s.threads // (2 * busy))))
    return replace(s, per_block=max(1, int(s.threads // busy)))


def kernel_spec(
    s: TinySchedule,
    p: TinyMatrices,
    vectors: Three,
    broadcast: tuple[bool, bool] | None,
    *,
    accumulate: bool,
    programmatic: bool,
) -> compiler.KernelSpec:
    """The kernel for these matrices. `vectors` are the bytes in which a, b and out are moved.

    `broadcast`: whether a and b broadcast if all matrices are dense; otherwise None.
    """
    known, dense = p.compiled_in, broadcast is not None
    parts = p.parts(s, dense, vectors)
    constants = {
        "TENSOR_CORE": int(p.step == "mma"),
        "STAGED": int(s.staged),
        "THREADS": s.threads,
        "BLOCKS": _resident_threads(s, p, parts) // s.threads,
        **dict(zip(("TILE_M", "TILE_N"), p.tile(s, dense) if p.step == "fma" else (0, 0), strict=True)),
        "IN_FLIGHT": 0 if p.step == "fma" or s.staged else s.in_flight,
        "PARTS": parts,
        "A_TYPE": TYPES[p.a],
        "B_TYPE": TYPES[p.b],
        "OUT": TYPES[p.out],
        "A_K_MAJOR": int(p.a_k_major),
        "B_K_MAJOR": int(p.b_k_major),
        **dict(zip(("A_VECTOR", "B_VECTOR", "OUT_VECTOR"), vectors, strict=True)),
        "DENSE": int(dense),
        **dict(zip(("A_BROADCAST", "B_BROADCAST"), map(int, broadcast or (0, 0)), strict=True)),
        "ACCUMULATE": int(accumulate),
        **dict(zip("MNK", (p.m, p.n, p.k) if known else (0, 0, 0), strict=True)),
    }
    largest = p if known else replace(p, m=LARGEST, n=LARGEST, k=LARGEST)
    return compiler.KernelSpec(
        "tiny.cu",
        "tiny",
        _PARAMS,
        tuple(constants.items()),
        block=s.threads,
        smem=max(_SMEM, largest.smem + SLACK) if s.staged else 0,
        programmatic=programmatic,
        oldest=OLDEST if p.step == "fma" else SM_80,
    )


def _resident_threads(s: TinySchedule, p: TinyMatrices, parts: int) -> int:
    """Threads that must fit on a multiprocessor by their registers. 0 leaves it to the compiler."""
    if p.step == "mma":
        return 768 if s.staged else s.threads
    if not s.staged or (s.tile[0] > 4 and p.b_k_major):
        return 256
    if math.prod(s.tile) > 16:
        return 640 if parts == 2 and math.prod(s.tile) <= 32 and p.a is p.b is torch.float32 else 384
    return 0 if p.a is p.b is torch.float32 else 512


class TinyKernel(CudaKernel[Product, TinySchedule]):
    name = "tiny"

    def __init__(self, step: Step) -> None:
        self.step = step

    @property
    def catalogue(self) -> Sequence[TinySchedule]:
        return SCHEDULES

    def supports(self, p: Product) -> bool:
        """Whether this is a batch of matrices of at most 64 rows, columns and k."""
        return (
            p.step == self.step
            and p.bias is None
            and p.cu_seqlens is None
            and p.a.ndim == p.b.ndim == 3
            and max(*p.a.shape[1:], p.n) <= LARGEST
            and 1 < max(p.a.shape[0], p.b.shape[0]) <= MOST
            and isinstance(p.start, str)
        )

    def candidates(self, p: Product) -> Sequence[TinySchedule]:
        given, sms = _arranged(p), devices.device_info(p.device).sm_count
        found = (completed(s, given.matrices, p.batch, sms) for _, _, s in _CHOICES[self.step])
        return list(dict.fromkeys((self.choose(p), *filter(given.runs, found))))

    def choose(self, p: Product) -> TinySchedule:
        return choose_schedule(_arranged(p).matrices, p.batch, devices.device_info(p.device).sm_count)

    def cost(self, p: Product, s: TinySchedule) -> float:
        """The least time of the memory traffic under any schedule. The choice comes from a table of times."""
        sizes = ((p.a, p.m * p.k), (p.b, p.k * p.n), (p.out, p.m * p.n))
        return sum(x.dtype.itemsize * size * x.shape[0] for x, size in sizes) / _BYTES_A_MICROSECOND

    def plan(self, p: Product, s: TinySchedule | None = None) -> CudaPlan:
        need(self.supports(p), f"{self.name}: expected a batch of matrices of sizes up to {LARGEST}, got {p}")
        if p.out.empty:
            return CudaPlan(nothing)
        info = devices.device_info(p.device)
        of, vectors, (a_strides, b_strides, out_strides) = given = _arranged(p)
        s = s or choose_schedule(of, p.batch, info.sm_count)
        if not given.runs(s):
            s = completed(replace(s, staged=True), of, p.batch, info.sm_count)
        broadcast = (not a_strides[0], not b_strides[0]) if given.dense else None
        accumulate, programmatic = p.start == "out", info.arch.copies_tiles
        spec = kernel_spec(s, of, vectors, broadcast, accumulate=accumulate, programmatic=programmatic)
        per_block = min(s.per_block, (spec.smem - SLACK) // of.smem) if s.staged else s.per_block
        if ("PARTS", 1) not in spec.constants:
            per_block = 1
        kernel, grid = runtime.load(spec, info.index), (-(-p.batch // per_block), 1, 1)
        sizes = p.batch, per_block, p.m, p.n, p.k, p.sequences, _dense_bytes(p.a), _dense_bytes(p.b)

        def launch(a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
            kernel.launch(grid, a, *a_strides, b, *b_strides, out, *out_strides, *sizes)

        return CudaPlan(launch)


_BYTES_A_MICROSECOND = 4.2e6


class _Arranged(NamedTuple):
    """The matrices of a product, the bytes in which each moves, and their strides in bytes."""

    matrices: TinyMatrices
    vectors: Three
    strides: tuple[Three, Three, Three]

    @property
    def dense(self) -> bool:
        """Whether sizes and strides are compile-time constants."""
        batches, lines, inners = zip(*self.strides, strict=True)
        return self.matrices.compiled_in and self.matrices.dense(batches, lines, inners)

    def runs(self, s: TinySchedule) -> bool:
        """Whether `s` runs unchanged. A staged schedule always does."""
        return s.staged or (self.dense and self.matrices.direct(s, self.vectors))


def _arranged(p: Product) -> _Arranged:
    a, b, (out_vector, out_strides) = _layout(p.a, 1, 2), _layout(p.b, 2, 1), _lines(p.out, 1, 2)
    dtypes = p.a.dtype, p.b.dtype, p.out.dtype
    matrices = TinyMatrices(p.m, p.n, p.k, *dtypes, a.k_major, b.k_major, p.step)
    return _Arranged(matrices, (a.vector, b.vector, out_vector), (a.strides, b.strides, out_strides))


def _dense_bytes(x: Matrix) -> int:
    """Bytes of one matrix if the matrices of the batch are contiguous and aligned, else 0."""
    matrix = x.shape[1] * x.shape[2]
    dense = (
        x.shape[0] > 1
        and x.strides[0] == matrix
        and {x.strides[1], x.strides[2]} in ({x.shape[2], 1}, {1, x.shape[1]})
    )
    size = matrix * x.dtype.itemsize
    return size if dense and size % 16 == x.misalignment % 16 == 0 else 0


def _lines(x: Matrix, line_dim: int, inner_dim: int) -> tuple[int, tuple[int, int, int]]:
    """Bytes of the widest vectors along `inner_dim`, and strides in bytes. 0 for a dimension of size one."""
    size = x.dtype.itemsize
    batch, line, inner = (0 if x.shape[d] == 1 else x.strides[d] * size for d in (0, line_dim, inner_dim))
    extent = x.shape[inner_dim] * size
    contiguous = inner == size or x.shape[inner_dim] == 1
    for vector in (16, 8, 4):
        if vector > size and contiguous and (x.misalignment | extent | batch | line) % vector == 0:
            return vector, (batch, line, inner)
    return size, (batch, line, inner)


def _layout(x: Matrix, row_dim: int, k_dim: int) -> LineLayout:
    """An operand's layout, with lines along k or along its rows, whichever allows wider vectors."""
    along_k, along_rows = _lines(x, row_dim, k_dim), _lines(x, k_dim, row_dim)
    k_major = along_k[0] > along_rows[0] or (
        along_k[0] == along_rows[0] and x.strides[k_dim] <= x.strides[row_dim]
    )
    return LineLayout(k_major, *(along_k if k_major else along_rows))


TINY, TINY_FMA = TinyKernel("mma"), TinyKernel("fma")
