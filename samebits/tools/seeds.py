"""Random operands that are the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the generators of the CPU and of the current GPU. Afterwards they go on as before."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(0)
        torch.cuda.manual_seed(0)
        yield
