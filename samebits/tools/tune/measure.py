"""One run of ``samebits tune``: contests by the clock of ``samebits bench``, until the budget is spent."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from samebits.backends.cuda import precompile
from samebits.backends.cuda.shapes import Shape
from samebits.backends.cuda.tuned import Entry, schedule_data
from samebits.testing import bits
from samebits.tools.bench.clock import Race, how, median
from samebits.tools.seeds import seeded
from samebits.tools.tune import families
from samebits.tools.tune.contest import Contest

__all__ = [
    "Clock",
    "GraphClock",
    "Outcome",
    "decide",
    "finalists",
    "label",
    "loaded",
    "operand_sets",
    "tidy",
    "tune",
    "winner",
]

MARGIN = 0.01
"""A schedule that is faster than the choice by less is no winner, however little the times spread."""

_FINALISTS = 4
"""How many are timed again beside the choice. Before, large products take turns, at another clock."""

_CLOSE, _BEHIND = 1.08, 1.03
"""How far behind the best, and behind the choice, they may be in those turns."""


class Clock(Protocol):
    """Times the ways of a contest, by their names."""

    def first(self) -> dict[str, list[float]]:
        """Microseconds of a call in a few turns of each."""

    def final(self, names: Sequence[str]) -> dict[str, list[float]]:
        """The same of some of them, as ``samebits bench`` measures."""


class GraphClock:
    """Replays of CUDA graphs over rotating operands."""

    def __init__(
        self, of: Contest, runs: dict[str, Callable[..., Any]], sets: Sequence[tuple[Tensor, ...]]
    ) -> None:
        tidy()
        calls, self._alone = how(of.flop, of.bytes, of.in_float32)
        self._race = Race(calls)
        for name, run in runs.items():
            self._race.add(name, run, sets)

    def first(self) -> dict[str, list[float]]:
        return self._race.turns(5)

    def final(self, names: Sequence[str]) -> dict[str, list[float]]:
        race = self._race.only(names)
        return race.turns_alone() if self._alone else race.turns(15)


def tidy() -> None:
    """Give back the memory of earlier graphs, if they have much."""
    if torch.cuda.memory_reserved() > 0.4 * torch.cuda.get_device_properties().total_memory:
        torch.cuda.empty_cache()


Times = Callable[[Contest, dict[str, Callable[..., Any]], Sequence[tuple[Tensor, ...]]], Clock]


@dataclass(slots=True)
class Outcome:
    """What a run has found.

    Attributes:
        entries: by shape.
        left: shapes that were not measured within the budget.
        alone: shapes that have one way only.
        wrong: ways whose bits were others, in words.
    """

    entries: dict[Shape, Entry]
    left: list[Shape]
    alone: list[Shape]
    wrong: list[str]


def label(s: Any) -> str:
    """A name for a schedule, unlike those of all others of its kernel."""
    return _named(schedule_data(s))


def _named(data: dict[str, Any]) -> str:
    values = {
        x: f"({_named(of)})" if isinstance(of, dict) else str(of).replace(" ", "") for x, of in data.items()
    }
    kind = values.pop("kind").removesuffix("Schedule")
    return f"{kind} " + " ".join(f"{name}={value}" for name, value in values.items())


def finalists(early: dict[str, float]) -> list[str]:
    """Those that are timed again beside the choice, which is "0", by the first times of all."""
    most = min(_CLOSE * min(early.values()), _BEHIND * early["0"])
    close = [name for name in early if name != "0" and early[name] <= most]
    return sorted(close, key=lambda name: early[name])[:_FINALISTS]


def decide(of: Contest, clock: Clock) -> Entry:
    """The entry of a contest whose ways run by the names that are their places."""
    first = clock.first()
    others = finalists({name: statistics.median(t) for name, t in first.items()})
    times = clock.final(["0", *others]) if others else first
    best = winner(times) if others else "0"
    won = of.ways[int(best)]
    kept = None if best == "0" else schedule_data(won.schedule)
    return Entry(won.kernel, kept, median(times[best]), median(times["0"]))


def winner(times: dict[str, list[float]]) -> str:
    """The fastest by the median, if it is faster than the choice, "0", by more than the noise; else "0"."""
    us = {name: statistics.median(t) for name, t in times.items()}
    best = min(us, key=us.__getitem__)
    noise = max(MARGIN, _spread(times["0"]), _spread(times[best]))
    return best if us["0"] / us[best] - 1 > noise else "0"


def _spread(times: Sequence[float]) -> float:
    """How far the medians of both halves are from each other."""
    half = len(times) // 2
    if half == 0:
        return 0.0
    early, late = statistics.median(times[:half]), statistics.median(times[half:])
    return abs(early - late) / min(early, late)


def _results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(t for t in found if t is not None)


def operand_sets(of: Contest, l2_bytes: int) -> list[tuple[Tensor, ...]]:
    """Operands of several calls: together larger than the L2 cache."""
    return [of.operands() for _ in range(max(1, min(64, math.ceil(4.5 * l2_bytes / of.bytes))))]


def loaded(of: Contest, operands: tuple[Tensor, ...]) -> dict[str, Callable[..., Any]]:
    """What computes each way, by its place, once all have given the same bits.

    Raises:
        AssertionError: they have not.
    """
    runs: dict[str, Callable[..., Any]] = {}
    want: tuple[Tensor, ...] = ()
    for i, way in enumerate(of.ways):
        runs[str(i)] = run = way.plan()
        given = tuple(t.clone() for t in operands) if getattr(of.shape, "accumulate", False) else operands
        got = tuple(map(bits, _results(run(*given))))
        want = want or got
        if not all(torch.equal(x, y) for x, y in zip(got, want, strict=True)):
            choice = of.ways[0].schedule
            raise AssertionError(f"{of.shape}: {way.kernel}, {way.schedule}: other bits than {choice}")
    return runs


def tune(
    shapes: Iterable[Shape],
    *,
    device: int = 0,
    budget: float = math.inf,
    progress: Callable[[float, str], None] = lambda done, what: None,
    times: Times = GraphClock,
) -> Outcome:
    """Measure the shapes on a GPU.

    Args:
        shapes: what to measure, the most important first.
        device: index of the GPU.
        budget: seconds after which no other shape is begun. Kernels are compiled meanwhile.
        progress: receives the fraction done, and the current work.
        times: the clock.
    """
    from samebits.backends.cuda import devices

    start, found = time.monotonic(), Outcome({}, [], [], [])
    every = list(dict.fromkeys(shapes))
    todo: list[tuple[Contest, list[Future[bool]]]] = []
    progress(0.0, "choosing kernels")
    with torch.cuda.device(device), seeded(), torch.no_grad(), precompile.Ahead() as ahead:
        for shape in every:
            of = families.contest(shape, device)
            if of is None:
                found.alone.append(shape)
            else:
                todo.append((of, ahead.add(way.plan for way in of.ways)))
        for i, (of, compiling) in enumerate(todo):
            spent = time.monotonic() - start
            progress(i / len(todo), str(of.shape))
            if spent < budget:
                wait(compiling, budget - spent if budget < math.inf else None)
            if time.monotonic() - start >= budget:
                found.left.append(of.shape)
                continue
            for job in compiling:
                job.result()  # a kernel that does not compile is an error of samebits
            sets = operand_sets(of, devices.device_info(device).l2_bytes)
            try:
                found.entries[of.shape] = decide(of, times(of, loaded(of, sets[0]), sets))
            except AssertionError as error:
                found.wrong.append(str(error))
    return found
