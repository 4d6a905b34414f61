"""Grouped products as data, for the kernels that compute them: :mod:`samebits.backends.kernel`.

As :mod:`samebits.backends.product` has it for one product: :class:`GroupedOperands` are the tensors of a
call, and :class:`GroupedProduct` is the problem. Groups lie between offsets on the GPU, whose values no host
code knows. So a grid has blocks for every way to cut the rows, and a block finds its group by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.backends.kernel import Step
from samebits.backends.product import FLOATS, LARGEST, Matrix, need

__all__ = ["GroupedOperands", "GroupedProduct", "refuse_large"]


class GroupedOperands(NamedTuple):
    """The tensors of one grouped product of T rows in G groups. The first group starts at row 0.

    *Groups of rows*: every group of rows of ``a`` has a matrix of its own.
    ``out[t] = a[t] @ b[g] + bias[g]`` for the rows t of group g. Rows after the last offset get +0.

    *Groups of terms*: every group of terms has a result of its own.
    ``out[g] = out[g] + a[:, t] @ b[t]`` over the rows t of group g: a chain over sequences.

    Attributes:
        a: ``[T, K]``, or with groups of terms ``[M, T]``.
        b: ``[G, K, N]``, or with groups of terms ``[T, N]``.
        out: ``[T, N]``, or with groups of terms ``[G, M, N]``. It decides which of the two it is.
        offs: the groups' ends: int32 ``[G]``, contiguous, on the GPU.
        bias: ``[G, N]``, of groups of rows.
        runs: the sequences of groups of terms: int32 ``[T + 2 G]``, contiguous. Element ``start + g``, and
            those after it, are the first rows of the sequences of group ``g``, whose first row is ``start``,
            and then its end. Element ``T + G + g`` is the number of them. With None every group is one
            sequence.
        accumulate: whether the chains of groups of terms start from ``out``, which is float32; else from +0.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    offs: Tensor
    bias: Tensor | None = None
    runs: Tensor | None = None
    accumulate: bool = False

    def problem(self, step: Step) -> GroupedProduct:
        return GroupedProduct.of(self, step)

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """Those of a, b, out, offs, bias and runs. A missing one is 0."""
        return (
            self.a.data_ptr(),
            self.b.data_ptr(),
            self.out.data_ptr(),
            self.offs.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            0 if self.runs is None else self.runs.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """A grouped product without values. Attributes as in :class:`GroupedOperands`.

    Attributes:
        runs: whether there are sequences.
    """

    step: Step
    device: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: Matrix | None = None
    runs: bool = False
    accumulate: bool = False

    @classmethod
    def of(cls, x: GroupedOperands, step: Step) -> GroupedProduct:
        """The product of these operands.

        Raises:
            ValueError: they do not fit together, or to `step`.
        """
        _check(x, step)
        bias = None if x.bias is None else Matrix.of(x.bias)
        matrices = Matrix.of(x.a), Matrix.of(x.b), Matrix.of(x.out)
        return cls(step, x.a.get_device(), *matrices, bias, x.runs is not None, x.accumulate)

    @property
    def of_terms(self) -> bool:
        """Whether terms are grouped, and not rows."""
        return self.out.ndim == 3

    @property
    def groups(self) -> int:
        return self.out.shape[0] if self.of_terms else self.b.shape[0]

    @property
    def rows(self) -> int:
        """T: the rows, or terms, of all groups, and after them."""
        return self.a.shape[1] if self.of_terms else self.a.shape[0]

    @property
    def m(self) -> int:
        """Rows of the output: of all groups together, or of terms' groups, of each."""
        return self.out.shape[-2]

    @property
    def n(self) -> int:
        return self.out.shape[-1]

    @property
    def k(self) -> int:
        """The length of all chains of groups of rows, or T."""
        return self.a.shape[1]

    def most_tiles(self, tile_m: int) -> int:
        """The most tiles of `tile_m` rows that groups of rows, and the rows after them, can have."""
        parts = min(self.groups + 1, self.rows)
        return (self.rows + (tile_m - 1) * parts) // tile_m

    def __str__(self) -> str:
        kind = "terms" if self.of_terms else "rows"
        return f"a product of {self.groups} groups of {kind}, a {self.a.shape} by b {self.b.shape}"


def refuse_large(p: GroupedProduct, *sizes: int) -> None:
    """Refuse a product with a size, or one of `sizes`, above :data:`LARGEST`."""
    if max(p.m, p.n, p.k, p.rows, p.groups, *sizes) > LARGEST:
        raise ValueError(f"samebits: {p} has a size above {LARGEST}")


def _check(x: GroupedOperands, step: Step) -> None:
    """Refuse operands that are on different devices or do not fit together."""
    a, b, out, offs = x.a, x.b, x.out, x.offs
    named = {"b": b, "out": out, "offs": offs, "bias": x.bias, "runs": x.runs}
    for name, t in named.items():
        if t is not None:
            need(t.device == a.device, f"{name}: expected a tensor on {a.device}, got {t.device}")
    for name, t in {"a": a, "b": b, "out": out, "bias": x.bias}.items():
        if t is not None:
            need(t.dtype in FLOATS, f"{name}: expected float32, bfloat16 or float16, got {t.dtype}")
    if step == "mma":
        need(a.dtype in FLOATS[1:], f"a: expected bfloat16 or float16, got {a.dtype}")
        need(b.dtype == a.dtype, f"b: expected a's dtype {a.dtype}, got {b.dtype}")
    need(offs.dtype == torch.int32 and offs.ndim == 1, f"offs: expected 1-D int32, got {offs.dtype}")
    need(offs.is_contiguous(), "offs: expected contiguous")
    groups = offs.shape[0]
    want: tuple[int, ...]
    need(a.ndim == 2, f"a: expected 2-D, got {tuple(a.shape)}")
    if out.ndim == 3:
        rows, want = a.shape[1], (groups, a.shape[0], b.shape[-1])
        need(tuple(b.shape) == (rows, want[2]), f"b: expected {rows} rows, got {tuple(b.shape)}")
        need(x.bias is None, "bias: expected none with groups of terms")
        need(not x.accumulate or out.dtype == torch.float32, f"out: expected float32, got {out.dtype}")
    else:
        rows, want = a.shape[0], (a.shape[0], b.shape[-1])
        need(
            tuple(b.shape) == (groups, a.shape[1], want[1]),
            f"b: expected {groups} matrices, got {tuple(b.shape)}",
        )
        need(x.runs is None and not x.accumulate, "runs, accumulate: expected groups of terms")
        if x.bias is not None:
            need(tuple(x.bias.shape) == (groups, want[1]), f"bias: got {tuple(x.bias.shape)}")
    need(tuple(out.shape) == want, f"out: expected {want}, got {tuple(out.shape)}")
    if x.runs is not None:
        runs = x.runs
        need(runs.dtype == torch.int32, f"runs: expected int32, got {runs.dtype}")
        need(tuple(runs.shape) == (rows + 2 * groups,), f"runs: got {tuple(runs.shape)}")
        need(runs.is_contiguous(), "runs: expected contiguous")
