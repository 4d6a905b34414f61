"""CUDA graphs of what tools measure and prove."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture(run: Callable[[], T], **options: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of `run`, with options of :class:`torch.cuda.graph`, and what `run` returned.

    If another graph is destroyed meanwhile, the capture may fail. So Python collects no garbage, and a
    variable that held the graph before this one lets go of it only after the capture.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            found = run()
    finally:
        if collects:
            gc.enable()
    return graph, found
