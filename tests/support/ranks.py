"""Checks in several processes that exchange bytes: by gloo on one CPU, or by NCCL, each on a GPU of its own.

``python -m tests.support.ranks MODULE RANKS FOLDER DEVICE`` runs every function ``check_...`` of a module in
RANKS processes, in turn, and stops at the first failure. All are forked from one process that has imported
the module, which takes longer than the checks. (It has run no parallel region before and has not used a GPU,
so a fork is safe.)
"""

from __future__ import annotations

import datetime
import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (1, 2, 4, 8)
PLACES = [
    *(("cpu", ranks) for ranks in SIZES),
    *(pytest.param("cuda", ranks, marks=pytest.mark.gpu) for ranks in SIZES),
]

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


_device = torch.device("cpu")


def device() -> torch.device:
    """This rank's."""
    return _device


def place(t: Tensor) -> Tensor:
    """`t` on the device of this rank."""
    return t.to(_device)


def run(module: str, device: str, ranks: int, folder: Path) -> None:
    """Run a module's checks in `ranks` processes. The error has what each of them raised."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, one for each rank, got {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "tests.support.ranks", module, str(ranks), str(folder), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    errors = "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("rank *")))
    assert not errors, errors
    assert done.returncode == 0, done.stdout + done.stderr


def _rank(module: str, rank: int, ranks: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    here = importlib.import_module("tests.support.ranks")  # which is not this module, __main__
    if kind == "cuda":
        here._device = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=120)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", timeout=timeout, rank=rank, world_size=ranks)
    checks: dict[str, Callable[[], None]] = vars(importlib.import_module(module))
    for name in [name for name in checks if name.startswith("check_")]:
        try:
            checks[name]()
        except BaseException:
            (folder / f"rank {rank}, {name}").write_text(traceback.format_exc())
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    count = int(sys.argv[2])
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _rank(sys.argv[1], rank, count, Path(sys.argv[3]), sys.argv[4])
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
