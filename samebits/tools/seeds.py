"""Random numbers that are the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the generators of the CPU and of GPUs, if any is in use. Afterwards they go on as before."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(0)
        if gpus:
            torch.cuda.manual_seed_all(0)
        yield
