"""Batched products of tiny matrices on CUDA tensors: ``kernels/bmm_tiny.cu``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.backends.cuda import matmul_fma, matmul_sm80, runtime

__all__ = ["LARGEST", "SCHEDULES", "Plan", "Schedule", "bmm", "choose_schedule", "kernel_spec", "plan"]

LARGEST = 64
"""m, n and k up to this are tiny."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the work is cut. It never changes a bit.

    Attributes:
        threads: of a block.
        tile: rows and columns that a thread multiplies under FMA; columns are a multiple of four.
        per_block: matrices that a block takes, if its shared memory holds them.
        staged: through shared memory. Else straight into registers, where the operands' layout allows it.
        in_flight: tiles that a warp loads at once under TENSOR_CORE, if not staged.
        parts: in which k is copied, 1 or 2, so that multiplication can begin with the first. It is 1 all the
            same unless :meth:`Product.parts` says that the operands allow more.
    """

    threads: int
    tile: tuple[int, int]
    per_block: int
    staged: bool = True
    in_flight: int = 1
    parts: int = 1


SCHEDULES = (
    Schedule(64, (4, 4), 1),
    Schedule(128, (1, 4), 3),
    Schedule(128, (8, 4), 2),
    Schedule(256, (2, 4), 64),
    Schedule(64, (8, 8), 1),
    Schedule(128, (4, 8), 1, parts=2),
    Schedule(128, (1, 4), 3, staged=False),
    Schedule(64, (4, 4), 32, staged=False, in_flight=4),
    Schedule(256, (2, 8), 16, staged=False, in_flight=2),
)
"""Some of each kind, to prove that none changes a bit."""


class Layout(NamedTuple):
    """How an operand's lines lie in memory: along k, or else along its rows (of a) or columns (of b)."""

    k_major: bool
    vector: int  # bytes that are contiguous and aligned everywhere, up to 16
    strides: Three  # batch, line and inner dimension, in bytes


Three = tuple[int, int, int]
"""Something of a, b and out."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# struct Params of the kernel.
_PARAMS = "P3q P3q P3q q 7i".replace(" ", "")

SLACK = 2304
"""Bytes after the last operand that fragments may reach into: 16 lines of 64 16-bit elements."""


def _pitch(inner: int, size: int) -> int:
    """Bytes from line to line in shared memory, as the kernel has it."""
    return -(-inner * size // 16) * 16 | 16


@dataclass(frozen=True, slots=True)
class Product:
    """What a kernel is chosen for."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    a_k_major: bool
    b_k_major: bool
    fused: bool

    @property
    def smem(self) -> int:
        """Bytes of shared memory for one matrix of each."""
        a_lines, a_inner = (self.m, self.k) if self.a_k_major else (self.k, self.m)
        b_lines, b_inner = (self.n, self.k) if self.b_k_major else (self.k, self.n)
        operands = a_lines * _pitch(a_inner, self.a.itemsize) + b_lines * _pitch(b_inner, self.b.itemsize)
        return max(1, operands + (0 if self.fused else self.m * _pitch(self.n, self.out.itemsize)))

    @property
    def compiled_in(self) -> bool:
        """Whether the sizes are; all others share a kernel that learns them when it runs."""
        return self.k > 0 and all(size % 4 == 0 for size in (self.m, self.n, self.k))

    def dense(self, batches: Three, lines: Three, inners: Three) -> bool:
        """Whether matrices of such strides in bytes have no gaps, and lie end to end or broadcast."""
        sizes = self.a.itemsize, self.b.itemsize, self.out.itemsize
        shapes = (self.m, self.k), (self.n, self.k), (self.m, self.n)
        k_major = self.a_k_major, self.b_k_major, True
        return all(
            inner == size and line == shape[along] * size and batch in (0, shape[0] * shape[1] * size)
            for batch, line, inner, shape, along, size in zip(
                batches, lines, inners, shapes, k_major, sizes, strict=True
            )
        )

    def tile(self, s: Schedule, dense: bool = True) -> tuple[int, int]:
        """Rows and columns of a thread under FMA: fewer where registers would spill."""
        rows, columns = s.tile
        return (rows, 4 if self.b_k_major else columns) if dense else (min(4, rows), 4)

    def direct(self, s: Schedule, vectors: Three) -> bool:
        """Whether a schedule that is not staged can run dense matrices that move in such vectors."""
        rows, columns = self.tile(s)
        whole = not self.fused or self.m % rows == self.n % columns == 0
        a, b = (4 * self.a.itemsize, 4 * self.b.itemsize) if self.fused else (4, 4)
        return whole and all(v >= w for v, w in zip(vectors, (a, b, 4 * self.out.itemsize), strict=True))

    def parts(self, s: Schedule, dense: bool, vectors: Three) -> int:
        """In which k is copied: 1 unless under FMA, staged, with sizes compiled in and tiles without edges.

        Each thread then has one tile of the block's one matrix, and a part is a multiple of four k, in whole
        vectors.
        """
        rows, columns = self.tile(s, dense)
        k, rest = divmod(self.k, s.parts)
        moved = ((self.a, self.a_k_major, vectors[0]), (self.b, self.b_k_major, vectors[1]))
        can = (
            self.fused
            and s.staged
            and self.compiled_in
            and self.m % rows == self.n % columns == rest == k % 4 == 0
            and self.m // rows * (self.n // columns) == s.threads
            and not any(k_major and k * x.itemsize % vector for x, k_major, vector in moved)
        )
        return s.parts if can else 1

    def threads(self, s: Schedule) -> float:
        """That one matrix keeps busy."""
        if self.fused:
            rows, columns = self.tile(s)
            return -(-self.m // rows) * -(-self.n // columns)
        if s.staged:
            return 32 * -(-self.m // 16)
        side = max(self.m, self.n)
        share = 4 if side <= 4 else 2 if side <= 8 else 1
        return 32 * -(-self.m // 16) * -(-self.n // 16) / (share * s.in_flight)


_SMEM = 26 << 10
"""Shared memory of a block, unless one matrix wants more: so eight blocks fit on a multiprocessor."""


_STAGED, _DIRECT = Schedule(128, (4, 4), 0), Schedule(128, (4, 4), 0, staged=False)

# (m n, k, schedule) under FMA and under TENSOR_CORE: the first that reach a product's m n and k.
_CHOICES: dict[bool, tuple[tuple[int, int, Schedule], ...]] = {
    True: (
        (16, 16, replace(_DIRECT, tile=(1, 4))),
        (64, 16, replace(_DIRECT, tile=(2, 4))),
        (768, 16, _DIRECT),
        (256, 64, _STAGED),
        (1024, 32, replace(_DIRECT, tile=(8, 4))),
        (1024, 64, _STAGED),
        (4096, 16, _STAGED),
        (4096, 64, replace(_STAGED, tile=(8, 4), parts=2)),
    ),
    False: (
        (16, 16, replace(_DIRECT, threads=256, in_flight=8)),
        (64, 16, replace(_DIRECT, in_flight=8)),
        (256, 64, _DIRECT),
        (768, 16, replace(_DIRECT, in_flight=4)),
        (1024, 32, replace(_DIRECT, in_flight=2)),
        (2304, 16, replace(_DIRECT, in_flight=2)),
        (4096, 64, _STAGED),
    ),
}
"""From the times of ``benchmarks.tiny_tune`` on an H200."""


def choose_schedule(p: Product, batch: int, sms: int) -> Schedule:
    """The schedule that should be fastest, if the operands' layout allows it."""
    s = next(s for area, k, s in _CHOICES[p.fused] if p.m * p.n <= area and p.k <= k)
    return settle(s, p, batch, sms)


def settle(s: Schedule, p: Product, batch: int, sms: int) -> Schedule:
    """With matrices for all threads of a block; if staged, for half, but with all of the batch on the GPU."""
    busy = p.threads(s)
    if s.staged:
        return replace(s, per_block=max(1, -(-batch // (8 * sms)), int(s.threads // (2 * busy))))
    return replace(s, per_block=max(1, int(s.threads // busy)))


def kernel_spec(
    s: Schedule,
    p: Product,
    vectors: Three,
    broadcast: tuple[bool, bool] | None,
    *,
    accumulate: bool,
    programmatic: bool,
) -> runtime.KernelSpec:
    """The kernel for such operands; a, b and out are moved in vectors of so many bytes.

    `broadcast`: whether a and b do, if all matrices are dense, else None.
    """
    known, dense = p.compiled_in, broadcast is not None
    parts = p.parts(s, dense, vectors)
    constants = {
        "TENSOR_CORE": int(not p.fused),
        "STAGED": int(s.staged),
        "THREADS": s.threads,
        "BLOCKS": _resident_threads(s, p, parts) // s.threads,
        **dict(zip(("TILE_M", "TILE_N"), p.tile(s, dense) if p.fused else (0, 0), strict=True)),
        "IN_FLIGHT": 0 if p.fused or s.staged else s.in_flight,
        "PARTS": parts,
        "A_TYPE": _KINDS[p.a],
        "B_TYPE": _KINDS[p.b],
        "OUT": _KINDS[p.out],
        "A_K_MAJOR": int(p.a_k_major),
        "B_K_MAJOR": int(p.b_k_major),
        **dict(zip(("A_VECTOR", "B_VECTOR", "OUT_VECTOR"), vectors, strict=True)),
        "DENSE": int(dense),
        **dict(zip(("A_BROADCAST", "B_BROADCAST"), map(int, broadcast or (0, 0)), strict=True)),
        "ACCUMULATE": int(accumulate),
        **dict(zip("MNK", (p.m, p.n, p.k) if known else (0, 0, 0), strict=True)),
    }
    largest = p if known else replace(p, m=LARGEST, n=LARGEST, k=LARGEST)
    return runtime.KernelSpec(
        "bmm_tiny.cu",
        "bmm_tiny",
        _PARAMS,
        tuple(constants.items()),
        block=s.threads,
        smem=max(_SMEM, largest.smem + SLACK) if s.staged else 0,
        programmatic=programmatic,
        oldest=runtime.OLDEST if p.fused else (8, 0),
    )


def _resident_threads(s: Schedule, p: Product, parts: int) -> int:
    """Threads that registers shall allow on a multiprocessor; 0 leaves it to the compiler."""
    if not p.fused:
        return 768 if s.staged else s.threads
    if not s.staged or (s.tile[0] > 4 and p.b_k_major):
        return 256
    if math.prod(s.tile) > 16:
        return 640 if parts == 2 and math.prod(s.tile) <= 32 and p.a is p.b is torch.float32 else 384
    return 0 if p.a is p.b is torch.float32 else 512


class Plan(NamedTuple):
    """Everything of a call but its addresses."""

    kernel: runtime.Kernel | None  # None: there is nothing to compute
    grid: tuple[int, int, int]
    a: tuple[int, int, int]
    b: tuple[int, int, int]
    out: tuple[int, int, int]
    sizes: tuple[int, ...]

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int) -> None:
        """Run on operands at these addresses."""
        if self.kernel is not None:
            self.kernel.launch(self.grid, a, *self.a, b, *self.b, out, *self.out, *self.sizes)


def supports(a: Tensor, b: Tensor, *, bias: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether this is a batch of tiny products."""
    return (
        bias is None
        and cu_seqlens is None
        and a.ndim == b.ndim == 3
        and max(*a.shape[1:], b.shape[2]) <= LARGEST
        and max(a.shape[0], b.shape[0]) > 1
    )


def plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    fused: bool,
    accumulate: bool = False,
    closing: bool = False,
    schedule: Schedule | None = None,
) -> Plan:
    """How :func:`bmm` runs these operands, and others of their shapes, strides, dtypes and alignment."""
    (matmul_fma if fused else matmul_sm80).check(a, b, out if accumulate else None, None, None, out)
    if not a.ndim == b.ndim == out.ndim == 3 or max(*a.shape[1:], b.shape[2]) > LARGEST:
        raise ValueError(
            f"samebits.backends.cuda.bmm_tiny: a, b: expected batches of matrices of sizes up to {LARGEST},"
            f" got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    (batch, m, n), k = out.shape, a.shape[2]
    a_layout, b_layout = _layout(a, 1, 2), _layout(b, 2, 1)
    out_layout = _lines(out, 1, 2)
    info = runtime.device_info(out.get_device())
    if out.numel() == 0:
        return Plan(None, (0, 0, 0), a_layout.strides, b_layout.strides, out_layout[1], ())
    p = Product(m, n, k, a.dtype, b.dtype, out.dtype, a_layout.k_major, b_layout.k_major, fused)
    vectors = a_layout.vector, b_layout.vector, out_layout[0]
    s = schedule or choose_schedule(p, batch, info.sm_count)
    batches, lines, inners = zip(a_layout.strides, b_layout.strides, out_layout[1], strict=True)
    dense = p.compiled_in and p.dense(batches, lines, inners)
    if not s.staged and not (dense and p.direct(s, vectors)):
        s = settle(replace(s, staged=True), p, batch, info.sm_count)
    broadcast = (not batches[0], not batches[1]) if dense else None
    spec = kernel_spec(
        s, p, vectors, broadcast, accumulate=accumulate, programmatic=info.capability >= (9, 0)
    )
    per_block = min(s.per_block, (spec.smem - SLACK) // p.smem) if s.staged else s.per_block
    if ("PARTS", 1) not in spec.constants:
        per_block = 1
    return Plan(
        runtime.load(spec, info.index),
        (-(-batch // per_block), 1, 1),
        a_layout.strides,
        b_layout.strides,
        out_layout[1],
        (batch, per_block, m, n, k, closing, _span(a), _span(b)),
    )


def bmm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    fused: bool,
    accumulate: bool = False,
    closing: bool = False,
    schedule: Schedule | None = None,
) -> None:
    """``out[i] = a[i] @ b[i]``: one chain over ascending k for every output element, then one rounding.

    Args:
        a: ``[batch, M, K]`` or ``[1, M, K]``, any strides; bfloat16 or float16, or float32 if `fused`.
        b: ``[batch, K, N]`` or ``[1, K, N]``; of a's dtype unless `fused`.
        out: ``[batch, M, N]``, float32, bfloat16 or float16, any strides.
        fused: by the chain of FMA, else by that of TENSOR_CORE.
        accumulate: start each chain from ``out``, which is float32.
        closing: if `fused`, end each chain with the term 0 * 0, as sequences do.
        schedule: by default :func:`choose_schedule`'s. Never changes a bit.
    """
    plan(a, b, out, fused=fused, accumulate=accumulate, closing=closing, schedule=schedule).launch(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), 0, 0
    )


def _span(x: Tensor) -> int:
    """Bytes of one matrix, where those of the batch lie end to end and aligned, else 0."""
    matrix = x.shape[1] * x.shape[2]
    dense = (
        x.shape[0] > 1
        and x.stride(0) == matrix
        and {x.stride(1), x.stride(2)} in ({x.shape[2], 1}, {1, x.shape[1]})
    )
    span = matrix * x.element_size()
    return span if dense and span % 16 == x.data_ptr() % 16 == 0 else 0


def _lines(x: Tensor, line_dim: int, inner_dim: int) -> tuple[int, tuple[int, int, int]]:
    """Bytes of the widest vectors along `inner_dim`, and strides in bytes; 0 for a dimension of one."""
    size = x.element_size()
    batch, line, inner = (0 if x.shape[d] == 1 else x.stride(d) * size for d in (0, line_dim, inner_dim))
    extent = x.shape[inner_dim] * size
    contiguous = inner == size or x.shape[inner_dim] == 1
    for vector in (16, 8, 4):
        if vector > size and contiguous and (x.data_ptr() | extent | batch | line) % vector == 0:
            return vector, (batch, line, inner)
    return size, (batch, line, inner)


def _layout(x: Tensor, row_dim: int, k_dim: int) -> Layout:
    """An operand's layout with lines along k or along its rows, whichever moves in wider vectors."""
    along_k, along_rows = _lines(x, row_dim, k_dim), _lines(x, k_dim, row_dim)
    k_major = along_k[0] > along_rows[0] or (
        along_k[0] == along_rows[0] and x.stride(k_dim) <= x.stride(row_dim)
    )
    return Layout(k_major, *(along_k if k_major else along_rows))
