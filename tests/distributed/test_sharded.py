"""Training with FSDP2, at 1, 2, 4 and 8 processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import PLACES, needs_gloo, run

CHECKS = "tests.distributed.sharded_checks"


@needs_gloo
@pytest.mark.parametrize(("device", "ranks"), PLACES)
def test_on_ranks(device: str, ranks: int, tmp_path: Path) -> None:
    run(CHECKS, device, ranks, tmp_path)
