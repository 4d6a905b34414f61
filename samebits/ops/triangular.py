"""Systems of linear equations with a triangular matrix, as in chunks of a gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops._checks import shape
from samebits.ops.bmm import bmm

__all__ = ["solve_triangular"]


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """``x`` with ``a x = b``, as :func:`torch.linalg.solve_triangular`, in float32. Batches broadcast.

    Rows of `x` come one after the other: what is known of a row is one product (:func:`samebits.bmm`), then
    there is one difference and, unless `unitriangular`, one quotient. So a matrix of n rows takes n products,
    and no element depends on the batch.

    Raises:
        TypeError: an operand is not float32.
        ValueError: `a` is not square, or shapes do not match.
    """
    for name, t in (("a", a), ("b", b)):
        if t.dtype != torch.float32:
            raise TypeError(f"samebits.solve_triangular: {name}: expected float32, got {t.dtype}")
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != a.shape[-2] or b.shape[-2] != a.shape[-1]:
        raise ValueError(
            "samebits.solve_triangular: a, b: expected [..., n, n] and [..., n, k],"
            f" got shapes {shape(a)} and {shape(b)}"
        )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    n = a.shape[-1]
    matrices, sides = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    if upper:
        matrices, sides = matrices.flip(1, 2), sides.flip(1)
    rows: list[Tensor] = []
    for i in range(n):
        row = sides[:, i : i + 1]
        if rows:
            row = row - bmm(matrices[:, i : i + 1, :i], torch.cat(rows, 1))
        rows.append(row if unitriangular else row / matrices[:, i : i + 1, i : i + 1])
    x = torch.cat(rows, 1) if rows else sides
    return (x.flip(1) if upper else x).reshape(*batch, n, b.shape[-1])
