"""Schedules that cases share out, where there are too many for every case."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any


def shared_out(schedules: Sequence[tuple[Hashable, Sequence[Any]]], times: int) -> list[list[Any]]:
    """The schedules that each case runs, such that none of its kind is left out.

    Args:
        schedules: of each case its kind, and the schedules that it could run.
        times: how many cases of a kind run each schedule, if so many could.
    """
    takers: dict[tuple[Hashable, Any], list[int]] = {}
    for case, (kind, every) in enumerate(schedules):
        for s in every:
            takers.setdefault((kind, s), []).append(case)
    found: list[list[Any]] = [[] for _ in schedules]
    for turn, ((_, s), cases) in enumerate(takers.items()):
        for i in range(min(times, len(cases))):
            found[cases[(turn + i) % len(cases)]].append(s)
    return found
