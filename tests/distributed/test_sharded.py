"""Training with FSDP2, at 1, 2, 4 and 8 processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import SIZES, needs_gloo, run

CHECKS = "tests.distributed.sharded_checks"
PLACES = [
    *(pytest.param("cpu", ranks, marks=pytest.mark.long) for ranks in SIZES[:-1]),
    pytest.param("cpu", SIZES[-1], marks=[pytest.mark.long, pytest.mark.nightly]),
    *(pytest.param("cuda", ranks, marks=pytest.mark.gpu) for ranks in SIZES),
]


@needs_gloo
@pytest.mark.parametrize(("device", "ranks"), PLACES)
def test_on_ranks(device: str, ranks: int, tmp_path: Path) -> None:
    run(CHECKS, device, ranks, tmp_path)
