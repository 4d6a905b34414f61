"""Matrix products as data, for the kernels that compute them: :mod:`samebits.backends.kernel`.

:class:`Operands` are the tensors of one call, and :class:`Product` is the problem: shapes, strides, dtypes,
alignment, where chains start, and which contract's step they follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samebits.backends.kernel import Step

__all__ = [
    "LARGEST",
    "Matrix",
    "Operands",
    "Product",
    "need",
    "refuse_large",
]

LARGEST = 2**31 - 2048
"""The largest size. Kernels count in 32 bits, and round sizes up to all the tiles in flight at once."""


class Operands(NamedTuple):
    """The tensors of one product.

    Attributes:
        a: ``[M, K]``, ``[B, M, K]`` or ``[B, S, M, K]``. With four dimensions the chain runs over k of every
            sequence s in turn.
        b: ``[K, N]``, ``[B, K, N]`` or ``[B, S, K, N]``. B may be 1 or missing in either operand.
        out: ``[M, N]`` or ``[B, M, N]``.
        bias: ``[N]``.
        start: the values that chains start from: float32, of the shape of ``out``, which it may be itself.
            With None they start at +0.
        cu_seqlens: offsets in k of packed sequences: int32 or int64 ``[sequences + 1]``, contiguous.
        sequences: whether the terms belong to sequences. Under FMA each sequence then ends with the term
            0 * 0.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bias: Tensor | None = None
    start: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sequences: bool = False

    def problem(self, step: Step) -> Product:
        return Product.of(self, step)

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """Those of a, b, out, bias, cu_seqlens and start. A missing one is 0."""
        bias, cu_seqlens, start = self.bias, self.cu_seqlens, self.start
        return (
            self.a.data_ptr(),
            self.b.data_ptr(),
            self.out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            0 if start is None else start.data_ptr(),
        )


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
    """The product ``out = start + a @ b + bias``, without values. Attributes as in :class:`Operands`."""

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
        """:meth:`of` for operands that an operation has already checked."""
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
    def sequence_count(self) -> int:
        """The number of sequences in the chain: on an axis of a and b, or packed along k."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.shape[0] - 1
        return self.a.shape[1] if self.a.ndim == 4 else 1

    def __str__(self) -> str:
        return f"a product of a {self.a.shape} by b {self.b.shape}"


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(x: Operands, step: Step) -> None:
    """Refuse operands that are on different devices or do not fit together."""
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
    """Refuse a product with a size, or one of `sizes`, above :data:`LARGEST`."""
    if max(p.m, p.n, p.k, p.sequence_count, *sizes) > LARGEST:
        raise ValueError(f"samebits: {p} has a size above {LARGEST}")


def need(condition: bool, what: str) -> None:
    """Refuse operands unless `condition` holds."""
    if not condition:
        raise ValueError(f"samebits.backends: {what}")
