"""CUDA graphs are captured while Python collects no garbage."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import samebits
from samebits.tools.graphs import captured


@pytest.mark.gpu
def test_a_graph_among_the_garbage_does_not_end_the_capture_of_another() -> None:
    x = torch.zeros(64, device="cuda")
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000)
    gc.enable()
    try:
        with captured() as graph:
            x + 1
        cycle: list[object] = [graph]
        cycle.append(cycle)
        del graph, cycle
        with captured() as graph:
            gc.set_threshold(1)  # Python would collect now
            assert [[] for _ in range(9)]
            y = x + 1
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert y.eq(1).all()


@pytest.mark.parametrize("collects", [True, False])
def test_python_collects_again(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    if not collects:
        gc.disable()
    try:
        with captured():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(ValueError, match="in the block"), captured():
            raise ValueError("in the block")
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_nothing_else_captures() -> None:
    package = Path(samebits.__file__).parent
    sources = [*package.rglob("*.py"), *(package.parent / "benchmarks").rglob("*.py")]
    assert {path.name for path in sources if "torch.cuda.graph(" in path.read_text()} == {"graphs.py"}
