"""Threads of the reference: as many as PyTorch's, and none that an exiting interpreter could not start."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import samebits


def test_as_many_threads_as_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads: int) -> None:
            made.append(threads)
            super().__init__(threads)

    monkeypatch.setattr("samebits.backends.reference.matmul.ThreadPoolExecutor", Pool)
    before, x = torch.get_num_threads(), torch.ones(600, 600)
    torch.set_num_threads(3)
    try:
        samebits.logp(samebits.linear(x, x).repeat(9, 9), torch.zeros(5400, dtype=torch.int64))
    finally:
        torch.set_num_threads(before)
    assert set(made) == {3}


@pytest.mark.long
def test_products_while_the_interpreter_shuts_down() -> None:
    code = """
import atexit, torch, samebits
torch.set_num_threads(2)
x, target = torch.ones(300, 300), torch.zeros(2700, dtype=int)
samebits.linear(x, x)

def last():
    print(samebits.linear(x, x).sum().item(), samebits.logp(x.repeat(9, 9), target).shape)

atexit.register(last)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["27000000.0", "torch.Size([2700])"], done.stderr
