"""What runs in a contest: the ways to compute a shape that could be the fastest, and tensors for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.backends.cuda.shapes import Shape
from samebits.backends.product import Matrix

__all__ = ["MOST", "PLAUSIBLE", "Contest", "Way", "few", "make", "place"]

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


def few(choice: Any, costs: dict[Any, float], before: Sequence[Any] = (), most: int = MOST) -> list[Any]:
    """The choice, then plausible schedules, `most` in all: those of `before`, and of the least cost."""
    bound = PLAUSIBLE * min(costs.values())
    ranked = dict.fromkeys([*before, *sorted(costs, key=lambda s: costs[s])])
    return [choice, *(s for s in ranked if s != choice and costs[s] <= bound)][:most]


def place(device: int) -> str:
    """Where tensors for CUDA device `device` are."""
    return f"cuda:{device}"


def make(x: Matrix, device: int) -> Tensor:
    """A tensor of normal values with these sizes, strides and misalignment."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    start = x.misalignment // x.dtype.itemsize
    room = torch.randn(extent + start, dtype=x.dtype, device=place(device))
    return room.as_strided(x.shape, x.strides, start)
