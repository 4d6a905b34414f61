"""Styles of ``parallelize_module``, at 1, 2, 4 and 8 processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import SIZES, needs_gloo, run

CHECKS = "tests.distributed.styles_checks"


@needs_gloo
@pytest.mark.parametrize("ranks", SIZES)
def test_on_ranks(ranks: int, tmp_path: Path) -> None:
    run(CHECKS, ranks, tmp_path)
