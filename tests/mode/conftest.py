"""Both forms of the mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from samebits.mode import batch_invariant, set_batch_invariant_mode

Within = Callable[..., AbstractContextManager[None]]


def process(on_uncovered: Any = "warn") -> AbstractContextManager[None]:
    return set_batch_invariant_mode(True, on_uncovered)


@pytest.fixture(params=[batch_invariant, process], ids=["context", "process"])
def within(request: pytest.FixtureRequest) -> Within:
    """The context of one thread, and the switch of the process."""
    form: Within = request.param
    return form
