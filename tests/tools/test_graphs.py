"""CUDA graphs are captured while Python collects no garbage."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import samebits
from samebits.tools.graphs import capture


@pytest.mark.gpu
def test_a_graph_among_the_garbage_does_not_end_the_capture_of_another() -> None:
    x = torch.zeros(64, device="cuda")
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000)
    gc.enable()
    try:
        cycle: list[object] = [*capture(lambda: x + 1)]
        cycle.append(cycle)
        del cycle

        def collecting() -> Tensor:
            gc.set_threshold(1)  # Python would collect now
            assert [[] for _ in range(9)]
            return x + 1

        graph, y = capture(collecting)
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert y.eq(1).all()


def test_the_graph_before_outlives_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop, too, whose variable holds it."""
    gone: list[str] = []

    class Graph:
        def __del__(self) -> None:
            gone.append("a graph")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    for i in range(3):
        graph, found = capture(lambda: list(gone))
        assert len(found) == max(0, i - 1)
        assert len(gone) == i
    del graph


@pytest.mark.parametrize("collects", [True, False])
def test_python_collects_again(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    if not collects:
        gc.disable()
    try:
        graph, found = capture(gc.isenabled)
        assert (type(graph), found) == (object, False)
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError):
            capture(lambda: 1 / 0)
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_nothing_else_captures() -> None:
    package = Path(samebits.__file__).parent
    sources = [*package.rglob("*.py"), *(package.parent / "benchmarks").rglob("*.py")]
    assert {path.name for path in sources if "torch.cuda.graph(" in path.read_text()} == {"graphs.py"}
