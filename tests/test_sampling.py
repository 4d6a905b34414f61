"""The cases of a test that run each time."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.support.sampling import sample

KINDS, NAMES, FORMS = range(4), "abc", (True, False)
CASES = [dict(zip(("kind", "name", "form"), c, strict=True)) for c in itertools.product(KINDS, NAMES, FORMS)]


@pytest.mark.parametrize("parts", [2, 3, 4, 100])
def test_a_sample_has_every_value_and_as_many_of_each(parts: int) -> None:
    found = [CASES[i] for i in sorted(sample(CASES, parts, "seed"))]
    assert len(found) == max(-(-len(CASES) // parts), len(KINDS))
    for name, values in (("kind", KINDS), ("name", NAMES), ("form", FORMS)):
        counts = Counter(case[name] for case in found)
        assert counts.keys() == {*values}
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_sample_has_every_pair_where_there_is_room() -> None:
    found = [CASES[i] for i in sample(CASES, 2, "seed")]
    for some in itertools.combinations(CASES[0], 2):
        assert {tuple(case[name] for name in some) for case in found} == {
            tuple(case[name] for name in some) for case in CASES
        }


def test_a_sample_is_the_same_each_time_and_another_for_another_test() -> None:
    assert sample(CASES, 3, "one") == sample(CASES, 3, "one") != sample(CASES, 3, "two")


def test_one_parameter_needs_no_value() -> None:
    assert len(sample([{"kind": kind, "device": "cpu"} for kind in KINDS], 2, "seed")) == 2
