"""Timing of calls as CUDA graphs, in turns, by the median."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.tools.bench.cases import F32, BenchCase, Run
from samebits.tools.graphs import capture

ALONE = 0.08
"""Seconds after which a GPU's clock follows the power of the code that runs."""


class Race:
    """Contestants as CUDA graphs of the same number of calls."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Any]] = {}  # and what it reads: it stays alive
        self._pool = torch.cuda.graph_pool_handle()  # of the outputs, which nobody reads

    def add(self, name: str, run: Run, sets: Sequence[Sequence[Tensor]]) -> None:
        for operands in sets[:2]:
            run(*operands)
        torch.cuda.synchronize()
        # One output for each set of operands stays alive, so that results do not stay in the L2 cache.
        outputs: list[Any] = [None] * len(sets)

        def calls() -> None:
            for i in range(self._calls):
                outputs[i % len(sets)] = run(*sets[i % len(sets)])

        graph, _ = capture(calls, pool=self._pool)
        self._graphs[name] = graph, (run, sets)

    def only(self, names: Iterable[str]) -> Race:
        """A race of these contestants, in this order."""
        some = copy.copy(self)
        some._graphs = {name: self._graphs[name] for name in names}
        return some

    def run(self, rounds: int) -> dict[str, float]:
        """Median microseconds of a call, over `rounds` turns of one replay each."""
        return {name: median(t) for name, t in self.turns(rounds).items()}

    def turns(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds of a call in each of `rounds` turns of one replay."""
        times: dict[str, list[float]] = {name: [] for name in self._graphs}
        for turn in range(rounds + 1):
            names = list(self._graphs)
            for name in names if turn % 2 else reversed(names):
                found = self._replay(name)
                if turn:
                    times[name].append(found)
        return times

    def alone(self) -> dict[str, float]:
        """Median microseconds of a call. Each contestant runs alone."""
        return {name: median(t) for name, t in self.turns_alone().items()}

    def turns_alone(self) -> dict[str, list[float]]:
        """Microseconds of a call in each replay that counts. Each contestant runs alone, in two turns."""
        return alone({name: partial(self._replay, name) for name in self._graphs})

    def _replay(self, name: str) -> float:
        """Microseconds of a call."""
        return timed(self._graphs[name][0].replay) / self._calls


def how(flop: float, moved: float, in_float32: bool) -> tuple[int, bool]:
    """How many calls a graph has, some 3 ms, and whether arithmetic bounds them, so that each runs alone."""
    arithmetic, memory = flop / (50e12 if in_float32 else 600e12), moved / 3.5e12
    return max(2, min(300, math.ceil(3e-3 / max(arithmetic, memory, 3e-6)))), arithmetic > memory


def medians(case: BenchCase, runs: dict[str, Run], sets: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Microseconds of each function on the operands of a case."""
    calls, by_itself = how(case.flop, case.bytes, case.dtype == F32)
    race = Race(calls)
    for name, run in runs.items():
        race.add(name, run, sets)
    return race.alone() if by_itself else race.run(11)


def timed(run: Callable[[], object]) -> float:
    """Microseconds on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def alone(runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The results of each function in two turns. A turn counts calls after ALONE seconds, at least five.

    The first turn after a pause is slower, so it does not count. The order of turns is A, B, B, A.
    """

    def heat(run: Callable[[], float]) -> int:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < ALONE:
            run()
            count += 1
        return count

    found: dict[str, list[float]] = {name: [] for name in runs}
    heat(runs[[*runs][-1]])
    for name in [*runs, *reversed(runs)]:
        found[name] += [runs[name]() for _ in range(max(5, heat(runs[name]) // 2))]
    return found


def median(times: list[float]) -> float:
    return float(f"{statistics.median(times):.5g}")
