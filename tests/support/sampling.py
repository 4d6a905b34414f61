"""Which cases of a test run each time, and which ``--nightly`` alone runs.

``@pytest.mark.nightly`` leaves a case for the night. ``@pytest.mark.sampled(n)`` leaves all but one of `n`
cases of a test. GPUs run all of theirs.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def sample(cases: Sequence[Mapping[str, Any]], parts: int, seed: str) -> set[int]:
    """One of `parts` of these cases, each a test's parameters: their indices, the same for the same `seed`.

    Values of parameters, and pairs of them, are in as equal numbers as can be. Where several parameters
    differ, each of their values is in one of the cases at least.
    """
    differ = [name for name in cases[0] if len({id(case[name]) for case in cases}) > 1]
    values = [[(name, id(case[name])) for name in differ] for case in cases]
    facts: list[list[Any]] = [[*some, *itertools.combinations(some, 2)] for some in values]
    needed = set(itertools.chain(*values)) if len(differ) > 1 else set()
    left = random.Random(seed).sample(range(len(cases)), len(cases))
    used: Counter[Any] = Counter()
    found: set[int] = set()
    while len(found) * parts < len(cases) or not needed <= used.keys():
        # A value that is in no case yet counts more than all that are.
        i = min(left, key=lambda i: sum(used[fact] or (-999 if fact in needed else 0) for fact in facts[i]))
        left.remove(i)
        found.add(i)
        used.update(facts[i])
    return found


def left_for_the_night(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of `items` that only ``--nightly`` runs."""
    here = [item for item in items if not item.get_closest_marker("gpu")]
    left = {item for item in here if item.get_closest_marker("nightly")}
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in here:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        (parts,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = sample([case.callspec.params for case in cases], parts, name)
        left.update(case for i, case in enumerate(cases) if i not in kept)
    return left
