"""What state spaces check."""

from __future__ import annotations

from torch import Tensor

from samebits.ops._checks import shape

MOST_STATES = 256


def dimensions(op: str, name: str, t: Tensor, expected: str) -> tuple[int, ...]:
    if t.ndim != expected.rpartition("[")[2].count(",") + 1:
        raise ValueError(f"samebits.{op}: {name}: expected {expected}, got shape {shape(t)}")
    return tuple(t.shape)


def expect(op: str, name: str, t: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if t is not None and tuple(t.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"samebits.{op}: {name}: expected shape {wanted}, got {shape(t)}")


def bounds_of(op: str, dt_limit: tuple[float, float]) -> tuple[float, float]:
    found = tuple(map(float, dt_limit))
    if len(found) != 2 or not found[0] <= found[1]:
        raise ValueError(f"samebits.{op}: dt_limit: expected a lower and an upper bound, got {dt_limit}")
    return found


def check_sizes(op: str, heads: int, groups: int, states: int) -> None:
    if groups < 1 or heads % groups:
        raise ValueError(f"samebits.{op}: B: expected groups that divide {heads}, got {groups}")
    if not 1 <= states <= MOST_STATES:
        raise ValueError(f"samebits.{op}: B: expected a state N of 1 to {MOST_STATES}, got {states}")
