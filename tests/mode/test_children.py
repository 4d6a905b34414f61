"""The mode of the process in processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import samebits
from samebits.mode import inherit_mode, is_batch_invariant_mode_enabled, set_batch_invariant_mode

VARIABLE = "SAMEBITS_BATCH_INVARIANT_MODE"

# What the children run: it does not import samebits. A data loader's worker is a child of a child.
CHILD = """
import sys
import torch
from torch.utils.data import DataLoader

def product():
    return torch.arange(384.0).sin() @ torch.arange(384.0 * 512).cos().view(384, 512)

class Products:
    def __len__(self): return 1
    def __getitem__(self, index): return product()

def send(queue, of_worker):
    loaded = DataLoader(Products(), num_workers=1, multiprocessing_context="spawn")
    queue.put((product().tolist(), next(iter(loaded))[0].tolist() if of_worker else None))
"""

PARENT = """
import multiprocessing, child, samebits, torch

theirs = child.product().tolist()
with samebits.set_batch_invariant_mode():
    ours = child.product().tolist()
assert ours != theirs

multiprocessing.set_forkserver_preload(["child"])

def product_of(method, of_worker=False):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child.send, args=(queue, of_worker))
    process.start()
    found = queue.get()
    process.join()
    return found

with samebits.set_batch_invariant_mode():
    assert product_of("spawn", True) == (ours, ours), "spawn"
    assert product_of("forkserver") == (ours, None), "forkserver"
assert product_of("forkserver") == (theirs, None), "forkserver, whose environment is older"
"""


@pytest.mark.long
def test_processes_of_multiprocessing_are_as_their_parent(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    subprocess.run([sys.executable, "-c", PARENT], cwd=tmp_path, check=True)


ENTERED = """
import sys, samebits, torch
from samebits.mode.calls import outermost
assert outermost.process == "error"
assert "torch._dynamo" not in sys.modules  # which takes seconds
calls = []
f = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: calls.append(graph) or graph.forward)
f(torch.ones(2))
assert "torch._dynamo" in sys.modules and not calls
samebits.disable_batch_invariant_mode()
f(torch.ones(2))
assert calls
"""


@pytest.mark.long
def test_others_are_in_the_mode_by_the_environment() -> None:
    subprocess.run([sys.executable, "-c", ENTERED], env=os.environ | {VARIABLE: "error"}, check=True)


def test_a_wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ValueError, match=f"{VARIABLE}: on_uncovered: expected \"warn\", .* got 'no'"):
        inherit_mode()
    assert not is_batch_invariant_mode_enabled()


def test_the_environment_is_as_the_mode() -> None:
    assert VARIABLE not in os.environ
    with set_batch_invariant_mode(True, "error"):
        assert os.environ[VARIABLE] == "error"
        samebits.enable_batch_invariant_mode("ignore")
        assert os.environ[VARIABLE] == "ignore"
        with set_batch_invariant_mode(False):
            assert VARIABLE not in os.environ
        assert os.environ[VARIABLE] == "ignore"
    assert not is_batch_invariant_mode_enabled()
    assert VARIABLE not in os.environ
