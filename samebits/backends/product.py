"""What a matrix product is, as data, and what every kernel that computes one offers. Read this file first.

The route of a product:

1. :class:`Operands` are the tensors of one call.
2. :class:`Product` is all that a kernel may know of them before it runs: shapes, strides, dtypes, alignment,
   where chains start, and which contract's step they follow. It holds no address and no value.
3. A :class:`ProductKernel` says which products it supports, and under which schedules. A schedule is frozen
   data: tiles, stages, clusters. It decides the speed and never a bit.
4. A :class:`Plan` is a kernel, compiled and loaded, with all of a launch but the addresses.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = [
    "LARGEST",
    "Matrix",
    "Operands",
    "Plan",
    "Product",
    "ProductKernel",
    "Step",
    "need",
    "refuse_large",
]

Step = Literal["mma", "fma"]
"""How a contract adds a group of terms: by the tensor core, or by one fused multiply-add each."""

LARGEST = 2**31 - 2048
"""Sizes up to this can be counted in 32 bits, and rounded up to all the tiles that are in flight at once."""


class Operands(NamedTuple):
    """The tensors of one product.

    Attributes:
        a: ``[M, K]``, ``[B, M, K]`` or ``[B, S, M, K]``. With four dimensions the chain runs over k of every
            sequence s in turn.
        b: ``[K, N]``, ``[B, K, N]`` or ``[B, S, K, N]``. B may be 1 or missing in either operand.
        out: ``[M, N]`` or ``[B, M, N]``.
        bias: ``[N]``.
        start: float32, of the shape of ``out``: where chains start. None: at +0. It may be ``out`` itself.
        cu_seqlens: int32 or int64 ``[sequences + 1]``, contiguous: where sequences begin and end in k.
        sequences: whether the terms belong to sequences. Under FMA each then ends with the term 0 * 0.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    start: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sequences: bool = False


class Matrix(NamedTuple):
    """One tensor of a product without its values.

    Attributes:
        shape, strides: in elements.
        misalignment: the address of its first element modulo 16.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int = 0

    @classmethod
    def of(cls, x: Tensor) -> Matrix:
        return cls(x.dtype, tuple(x.shape), x.stride(), x.data_ptr() % 16)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def empty(self) -> bool:
        return 0 in self.shape


@dataclass(frozen=True, slots=True)
class Product:
    """What is to be computed: ``out = start + a @ b + bias``. Attributes as in :class:`Operands`."""

    step: Step
    device: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: Matrix | None = None
    start: Literal["zero", "out"] | Matrix = "zero"
    cu_seqlens: Matrix | None = None
    sequences: bool = False

    @classmethod
    def of(cls, x: Operands, step: Step) -> Product:
        """The product of these operands.

        Raises:
            ValueError: they do not fit together, or to `step`.
        """
        _check(x, step)
        return cls.unchecked(x, step)

    @classmethod
    def unchecked(cls, x: Operands, step: Step) -> Product:
        """:meth:`of` for what an operation has checked."""
        start: Literal["zero", "out"] | Matrix
        start = "zero" if x.start is None else "out" if x.start is x.out else Matrix.of(x.start)
        bias, cu_seqlens = (None if t is None else Matrix.of(t) for t in (x.bias, x.cu_seqlens))
        a, b, out = Matrix.of(x.a), Matrix.of(x.b), Matrix.of(x.out)
        return cls(step, x.a.get_device(), a, b, out, bias, start, cu_seqlens, x.sequences)

    @property
    def m(self) -> int:
        return self.a.shape[-2]

    @property
    def n(self) -> int:
        return self.b.shape[-1]

    @property
    def k(self) -> int:
        return self.a.shape[-1]

    @property
    def batch(self) -> int:
        return self.out.shape[0] if self.out.ndim == 3 else 1

    @property
    def segments(self) -> int:
        """Sequences of the chain: an axis of a and b, or spans of k."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.shape[0] - 1
        return self.a.shape[1] if self.a.ndim == 4 else 1

    def __str__(self) -> str:
        return f"a product of a {self.a.shape} by b {self.b.shape}"


class Plan(Protocol):
    """A kernel with everything of a launch but the addresses."""

    def run(self, x: Operands) -> None:
        """Run on these operands, or others of their :class:`Product`."""


S = TypeVar("S")


class ProductKernel(abc.ABC, Generic[S]):
    """One kernel that computes products. `S` is the class of its schedules.

    Attributes:
        name: of the kernel, and of its host file and source.
        step: of the contracts that it follows.
        compiled_ahead: whether :mod:`samebits.backends.cuda.precompile` can compile it before it is launched.
    """

    name: str
    step: Step
    compiled_ahead: bool = True

    @property
    @abc.abstractmethod
    def catalogue(self) -> Sequence[S]:
        """Every kind of schedule, to prove that none changes a bit."""

    @abc.abstractmethod
    def supports(self, p: Product) -> bool:
        """Whether it computes `p` at all."""

    def schedules(self, p: Product) -> Sequence[S]:
        """Those of the catalogue that can run `p`."""
        return self.catalogue

    def candidates(self, p: Product) -> Sequence[S]:
        """What :meth:`choose` picks from, each as it would run: to time beside the one that it picks."""
        return self.schedules(p)

    @abc.abstractmethod
    def choose(self, p: Product) -> S:
        """The schedule that should be fastest."""

    @abc.abstractmethod
    def cost(self, p: Product, s: S) -> float:
        """Estimated microseconds of `p` under `s`: to compare schedules, and kernels that say so."""

    @abc.abstractmethod
    def plan(self, p: Product, s: S | None = None) -> Plan:
        """How it runs `p`: under `s`, or what :meth:`choose` says. Compiles and loads the kernel."""

    def run(self, x: Operands, s: S | None = None) -> None:
        """Compute ``x.out``. Used by proofs and tuners; operations keep their plans."""
        self.plan(Product.of(x, self.step), s).run(x)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(x: Operands, step: Step) -> None:
    """Refuse operands of different devices or that do not fit together."""
    a, b, out = x.a, x.b, x.out
    for name, t in (
        ("a", a),
        ("b", b),
        ("out", out),
        ("start", x.start),
        ("bias", x.bias),
        ("cu_seqlens", x.cu_seqlens),
    ):
        if t is not None:
            need(t.device == a.device, f"{name}: expected a tensor on {a.device}, got {t.device}")
    if step == "mma":
        need(a.dtype in FLOATS[1:], f"a: expected bfloat16 or float16, got {a.dtype}")
        need(b.dtype == a.dtype, f"b: expected a's dtype {a.dtype}, got {b.dtype}")
    for name, t in (("a", a), ("b", b), ("out", out), ("bias", x.bias)):
        if t is not None:
            need(t.dtype in FLOATS, f"{name}: expected float32, bfloat16 or float16, got {t.dtype}")
    need(2 <= a.ndim <= 4 and 2 <= b.ndim <= 4, "a, b: expected 2 to 4 dimensions")
    need((a.ndim == 4) == (b.ndim == 4), "a, b: both or neither have sequences (4 dimensions)")
    need(a.shape[-1] == b.shape[-2], f"a, b: K differs: {tuple(a.shape)} and {tuple(b.shape)}")
    batch = {t.shape[0] for t in (a, b) if t.ndim > 2} - {1}
    need(len(batch) <= 1, f"a, b: batches differ: {tuple(a.shape)} and {tuple(b.shape)}")
    if a.ndim == 4:
        need(a.shape[1] == b.shape[1], f"a, b: sequences differ: {tuple(a.shape)} and {tuple(b.shape)}")
    matrix = (a.shape[-2], b.shape[-1])
    shapes = [(*batch, *matrix)] if batch else [matrix, (1, *matrix)]
    need(tuple(out.shape) in shapes, f"out: expected {shapes[0]}, got {tuple(out.shape)}")
    if x.start is not None:
        need(x.start.dtype == torch.float32, f"start: expected float32, got {x.start.dtype}")
        need(x.start.shape == out.shape, f"start: expected {tuple(out.shape)}, got {tuple(x.start.shape)}")
    if x.bias is not None:
        need(tuple(x.bias.shape) == matrix[1:], f"bias: expected {matrix[1:]}, got {tuple(x.bias.shape)}")
    if x.cu_seqlens is not None:
        offsets: Any = x.cu_seqlens
        need(a.ndim < 4, "cu_seqlens: expected a, b without sequences of their own")
        need(offsets.dtype in (torch.int32, torch.int64), f"cu_seqlens: got {offsets.dtype}")
        need(offsets.ndim == 1 and offsets.numel() > 0, f"cu_seqlens: got {tuple(offsets.shape)}")
        need(offsets.is_contiguous(), "cu_seqlens: expected contiguous")


def refuse_large(p: Product, *sizes: int) -> None:
    """Refuse a product with a size, or one of `sizes`, that kernels cannot count."""
    if max(p.m, p.n, p.k, p.segments, *sizes) > LARGEST:
        raise ValueError(f"samebits: {p} has a size above {LARGEST}")


def need(condition: bool, what: str) -> None:
    """Refuse operands unless `condition` holds."""
    if not condition:
        raise ValueError(f"samebits.backends: {what}")
