"""``torch.linalg.solve_triangular``, by substitution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, broadcast
from samebits.ops._checks import check_operands, shape
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._products import product
from samebits.ops.expand import expand

__all__ = ["solve_triangular"]


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X with ``A X = B`` for a triangular A, as :func:`torch.linalg.solve_triangular`.

    Row i of X is that of B, less ``RNE(A[i, j] * X[j])`` for one j after the other, in the order in which
    rows are solved, divided by ``A[i, i]``. Each operation is rounded to float32. So a system does not depend
    on the others. It takes a few launches for each row, so it is for small systems, as those of linear
    attention in chunks.

    Args:
        a: float32 ``[..., n, n]``. Only its triangle is read.
        b: float32 ``[..., n, k]``, or ``[..., k, n]`` without `left`.
        upper: whether that is the upper triangle.
        left: without it, ``X A = B``.
        unitriangular: the diagonal is taken as 1, and not read.

    Raises:
        TypeError: a tensor is not dense float32.
        ValueError: shapes or devices do not match.
    """
    (a, b), key, _ = check_operands("solve_triangular", None, {"a": a, "b": b}, autocast=False)
    if a.dtype != torch.float32:
        raise TypeError(f"samebits.solve_triangular: a: expected float32, got {a.dtype}")
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            "samebits.solve_triangular: a, b: expected square matrices and as many rows, got"
            f" {shape(a)} and {shape(b)}"
        )
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    a, b = (expand(t, (*batch, *t.shape[-2:])) for t in (a, b))
    out: Tensor = _operator(a, b, upper, unitriangular, key)
    return out


def _forward(a: Tensor, b: Tensor, upper: bool, unit: bool, key: Key) -> Tensor:
    if upper:  # from the last row to the first
        return _forward(a.flip(-2, -1), b.flip(-2), False, unit, key).flip(-2).contiguous()
    rest, rows = b, []
    for i in range(b.shape[-2]):
        row = rest[..., :1, :]
        if not unit:
            row = row / a[..., i : i + 1, i : i + 1]
        rows.append(row)
        rest = rest[..., 1:, :] - a[..., i + 1 :, i : i + 1] * row
    return torch.cat(rows, -2) if rows else b.clone()


def _fake(a: Tensor, b: Tensor, upper: bool, unit: bool, key: Key) -> Tensor:
    return b.new_empty(b.shape)


_operator = Operator(
    "solve_triangular(Tensor a, Tensor b, bool upper, bool unit, str contract) -> Tensor",
    cpu=_forward,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, ctx.upper, ctx.unit, ctx.key = inputs
    ctx.save_for_backward(a, output)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives("solve_triangular")
    a, x = saved
    of_b = _operator(a.mT, grad, not ctx.upper, ctx.unit, ctx.key)
    of_a = None
    if ctx.needs_input_grad[0]:
        whole = -product(of_b, x.mT, None, torch.float32, ctx.key)
        of_a = whole.triu(int(ctx.unit)) if ctx.upper else whole.tril(-int(ctx.unit))
    return of_a, of_b, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
