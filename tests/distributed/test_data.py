"""Gradients of all ranks, in a fixed order, at 1, 2, 4 and 8 processes."""

from __future__ import annotations

import pytest

from tests.support.ranks import SIZES, assert_passed, checks, needs_gloo

CHECKS = "tests.distributed.data_checks"


@needs_gloo
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", checks(CHECKS))
def test_on_ranks(name: str, ranks: int) -> None:
    assert_passed(CHECKS, ranks, name)
