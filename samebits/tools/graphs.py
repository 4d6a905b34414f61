"""CUDA graphs of what tools measure and prove."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(**options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """A CUDA graph of the block, with options of :class:`torch.cuda.graph`.

    Python collects no garbage there: if a graph among it is destroyed, the capture of this one fails.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield graph
    finally:
        if collects:
            gc.enable()
