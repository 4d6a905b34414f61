"""What runs in a contest: the ways to compute a shape that could be the fastest, and tensors for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda.shapes import ProductShape, Shape
from samebits.backends.product import Matrix, Operands, Product

__all__ = ["MOST", "PLAUSIBLE", "Contest", "Way", "contest", "few", "make", "product"]

PLAUSIBLE = 1.6
"""Schedules are timed if their estimated cost is at most this many times the least cost."""

MOST = 8
"""The most schedules that are timed for a shape: the cost model's choice, and those that it likes next."""


@dataclass(frozen=True, slots=True)
class Way:
    """A kernel under a schedule.

    Attributes:
        plan: compiles and loads it; returns what computes a call from its operands.
    """

    kernel: str
    schedule: Any
    plan: Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Contest:
    """The ways to compute a shape.

    Attributes:
        ways: the cost model's choice first.
        flop, bytes: what a call computes and moves, to tell which of the two bounds it.
        operands: new operands of a call.
    """

    shape: Shape
    ways: list[Way]
    flop: float
    bytes: float
    operands: Callable[[], tuple[Tensor, ...]]

    @property
    def in_float32(self) -> bool:
        return getattr(self.shape, "step", "mma") == "fma"


def contest(shape: Shape, device: int, *, alone: bool = False) -> Contest | None:
    """The contest of a shape on a GPU; None if there is one way only, unless that may run `alone`."""
    found = _product(shape, device)
    return found if alone or len(found.ways) > 1 else None


def few(choice: Any, costs: dict[Any, float], most: int = MOST) -> list[Any]:
    """The choice, then the schedules of the least cost that are plausible, at most `most` in all."""
    least = min(costs.values())
    others = sorted((cost, i, s) for i, (s, cost) in enumerate(costs.items()) if s != choice)
    return [choice, *(s for cost, _, s in others[: most - 1] if cost <= PLAUSIBLE * least)]


def make(x: Matrix, device: int) -> Tensor:
    """A tensor of normal values with these sizes, strides and misalignment."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    start = x.misalignment // x.dtype.itemsize
    room = torch.randn(extent + start, dtype=x.dtype, device=f"cuda:{device}")
    return room.as_strided(x.shape, x.strides, start)


# ---- Products ----


def _matrix(dtype: str, rows: int, columns: int, batch: int, by_columns: bool, aligned: bool) -> Matrix:
    """A matrix that is contiguous along its columns, or along its rows; if not aligned, nor is its pitch."""
    kind: torch.dtype = getattr(torch, dtype)
    outer, inner = (rows, columns) if by_columns else (columns, rows)
    units = 16 // kind.itemsize
    pitch = -(-inner // units) * units if aligned else inner + (inner % units == 0)
    strides = (pitch, 1) if by_columns else (1, pitch)
    if batch == 1:
        return Matrix(kind, (rows, columns), strides)
    return Matrix(kind, (batch, rows, columns), (outer * pitch, *strides))


def product(s: ProductShape, device: int) -> Product:
    """A product of this shape, without tensors."""
    return Product(
        s.step,
        device,
        _matrix(s.a, s.m, s.k, s.batch, s.a_by_k, s.aligned),
        _matrix(s.b, s.k, s.n, s.batch, not s.b_by_k, s.aligned),
        _matrix(s.out, s.m, s.n, s.batch, True, s.aligned),
        start="out" if s.accumulate else "zero",
        sequences=s.sequences,
    )


def _product(shape: ProductShape, device: int) -> Contest:
    from samebits.backends.cuda import matmul

    p = product(shape, device)
    first = matmul.fastest(p)
    kernels = {(kernel, s): kernel.cost(p, s) for kernel, s in matmul.ways(p)}
    choice = first, first.choose(p)
    kernels.setdefault(choice, first.cost(p, choice[1]))
    found: Sequence[tuple[Any, Any]] = few(choice, kernels)

    def way(kernel: Any, s: Any) -> Way:
        def plan() -> Callable[..., Any]:
            made = kernel.plan(p, s)

            def run(a: Tensor, b: Tensor, *out: Tensor) -> Tensor:
                to = out[0] if out else torch.empty_strided(p.out.shape, p.out.strides, **kind)
                made.run(Operands(a, b, to, start=to if out else None))
                return to

            return run

        return Way(kernel.name, s, plan)

    kind: dict[str, Any] = {"dtype": p.out.dtype, "device": f"cuda:{device}"}
    matrices = (p.a, p.b, p.out) if shape.accumulate else (p.a, p.b)
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (p.a, p.b, p.out))
    return Contest(
        shape,
        [way(kernel, s) for kernel, s in found],
        2.0 * shape.m * shape.n * shape.k * shape.batch,
        float(moved),
        lambda: tuple(make(x, device) for x in matrices),
    )
