"""Plans of earlier calls: one cache for all kernels, dropped when schedules may be other ones than before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakSet

from samebits.backends import replay

__all__ = ["Plans", "forget_plans", "kept", "on_change"]

P = ParamSpec("P")
T = TypeVar("T")


class Plans(dict[Hashable, T]):
    """Plans by everything that decides them, so that checks and choices are made only once.

    A call asks with ``get``. On a miss it makes the plan and has it kept by :meth:`keep`.
    """

    def __init__(self, most: int = 8192) -> None:
        """`most`: plans that are kept at once. All are dropped when there would be more."""
        self._most = most
        _every.add(self)

    __hash__ = object.__hash__  # type: ignore[assignment]  # a set has it by its identity

    def keep(self, key: Hashable, plan: T) -> T:
        """`plan`, which later calls find by `key`."""
        if len(self) >= self._most:
            self.clear()
        self[key] = plan
        return plan


_every: WeakSet[Plans[Any]] = WeakSet()
_forget: list[Callable[[], object]] = []


def on_change(forget: Callable[[], object]) -> None:
    """Call `forget`, which drops what follows from schedules, whenever plans are dropped."""
    _forget.append(forget)


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, which is called once for the same arguments, until plans are dropped."""
    found = functools.lru_cache(maxsize=4096)(make)
    on_change(found.cache_clear)
    return cast(Callable[P, T], found)


def forget_plans() -> None:
    """Drop all plans and replays, so that every next call chooses its schedule anew."""
    for plans in _every:
        plans.clear()
    for forget in _forget:
        forget()
    replay.forget()
