"""Checks in several processes that exchange bytes: by gloo on one CPU, or by NCCL, each on a GPU of its own.

On a CPU all ranks are forked from one process, ``python -m tests.support.ranks``, which has imported what
they need: that takes longer than the checks. (It has run no parallel region before, so a fork is safe. What
has used a GPU may not be forked, so on GPUs each rank is a process of its own.) A line ``MODULE RANKS FOLDER
DEVICE`` on its input runs every function ``check_...`` of a module in RANKS processes, in turn, up to the
first failure. It answers with a line, their exit code.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import importlib
import os
import select
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
    *(pytest.param("cpu", ranks, marks=pytest.mark.long) for ranks in SIZES[:-1]),
    # Each time, sums alone have as many ranks.
    pytest.param("cpu", SIZES[-1], marks=[pytest.mark.long, pytest.mark.nightly]),
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
    if device == "cuda":
        codes = _started(module, ranks, folder)
        assert not any(codes), f"exit codes {codes}\n{_said(folder)}"
        return
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(module, ranks, folder, device, file=server.stdin, flush=True)
    answers, _, _ = select.select([server.stdout], [], [], 600)
    code = server.stdout.readline().strip() if answers else "none in 600 s"
    if code != "0":
        _server.cache_clear()
        server.kill()
    assert code == "0", f"exit code {code or 'none'}\n{_said(folder)}"


def _said(folder: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("rank *")))


def _started(module: str, ranks: int, folder: Path) -> list[int]:
    """The exit codes of processes, each with a GPU."""
    command = [sys.executable, "-m", "tests.support.ranks", module, str(ranks), str(folder)]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
    try:
        return [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.ranks"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def _rank(module: str, rank: int, ranks: int, folder: Path, kind: str) -> None:
    output = os.open(folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
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
            print(name, traceback.format_exc(), flush=True)
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def _forked(module: str, ranks: int, folder: Path, kind: str) -> int:
    """The first exit code that is not 0. A signal's is below."""
    importlib.import_module(module)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                _rank(module, rank, ranks, folder, kind)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        of, count, where, on = sys.argv[1:]
        _rank(of, int(on), int(count), Path(where), "cuda")
        sys.exit()
    for kernels in ("attention", "logp", "matmul", "rows"):
        importlib.import_module(f"samebits.backends.reference.{kernels}")
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))  # imports much, which each rank would
    for line in sys.stdin:
        of, count, where, on = line.split()
        print(_forked(of, int(count), Path(where), on), flush=True)
