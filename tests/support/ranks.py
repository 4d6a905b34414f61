"""Checks in several processes that exchange bytes by gloo, on one CPU.

``python -m tests.support.ranks MODULE RANKS FOLDER`` runs every function ``check_...`` of a module in RANKS
processes, in turn, and stops at the first failure. All are forked from one process that has imported the
module, which takes longer than the checks. (It has run no parallel region before, so a fork is safe.)
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SIZES = (1, 2, 4, 8)

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


def checks(module: str) -> list[str]:
    return [name for name in vars(importlib.import_module(module)) if name.startswith("check_")]


@functools.cache
def results(module: str, ranks: int) -> dict[str, str]:
    """What every check said that began: nothing, or its errors."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.ranks", module, str(ranks), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        said: dict[str, str] = {}
        for name in checks(module):
            files = sorted(Path(folder).glob(f"{name}.*"))
            errors = "\n".join(f"rank {f.suffix[1:]}: {f.read_text()}" for f in files if f.read_text())
            unfinished = "" if len(files) == ranks else "it did not end on all ranks"
            said[name] = errors or (unfinished and f"{unfinished}: {done.stdout}{done.stderr}")
            if said[name]:
                break
        return said


def assert_passed(module: str, ranks: int, name: str) -> None:
    said = results(module, ranks)
    if name not in said:
        pytest.skip(f"not reached: {next(reversed(said), 'nothing')} failed before")
    assert said[name] == "", said[name]


def _rank(module: str, rank: int, ranks: int, folder: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timeout, rank=rank, world_size=ranks)
    for name in checks(module):
        check: Callable[[], None] = getattr(importlib.import_module(module), name)
        try:
            check()
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            return
        (folder / f"{name}.{rank}").write_text("")
        yield name
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    count = int(sys.argv[2])
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            passed = [*_rank(sys.argv[1], rank, count, Path(sys.argv[3]))]
            os._exit(len(passed) != len(checks(sys.argv[1])))
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
