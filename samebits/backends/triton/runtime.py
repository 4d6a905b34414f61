"""Availability of Triton, and the GPUs it can use. Importing this module imports no Triton."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from samebits.backends import UnavailableError
from samebits.backends.arch import arch_of
from samebits.remedies import see

__all__ = ["Gpu", "Status", "bind", "gpu", "require", "status"]

OLDEST = 3, 6


@dataclass(frozen=True, slots=True)
class Status:
    """Whether Triton's kernels can run here. If not: why, and what to do."""

    available: bool
    reason: str
    remedy: str
    triton: str | None


def status() -> Status:
    """The status that ``samebits info`` shows for the Triton backend. Never raises."""
    version = _version()
    try:
        require(0)
    except UnavailableError as error:
        reason, _, remedy = str(error).partition(" — ")
        return Status(False, reason, remedy, version)
    return Status(True, "", "", version)


def _version() -> str | None:
    """The version of the package triton, or of the one that a PyTorch for other GPUs brings."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def require(device: int) -> None:
    """Raise UnavailableError unless Triton is installed and there is a GPU for it."""
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError("there is no package triton — pip install triton" + see("no-compiler"))
    version = _version()
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise UnavailableError(
            f"triton {version} is older than 3.6 — pip install --upgrade triton" + see("no-compiler")
        )
    if not torch.cuda.is_available():
        raise UnavailableError("PyTorch finds no GPU — use CPU tensors, or a PyTorch built for your GPU")


class _Bound(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


def bind(device: int) -> None:
    """Give this thread a context on GPU `device`, because Triton makes tensor maps before it needs one."""
    if device not in _bound.devices:
        torch.cuda.mem_get_info(device)
        _bound.devices.add(device)


class Gpu(NamedTuple):
    """The properties of a GPU that schedules depend on.

    Attributes:
        shared_memory: bytes that a program's tiles may take. The last kilobyte is for barriers.
        fetches_tiles: whether it has a copy engine for tiles. Elsewhere Triton emulates it slowly.
        third_half: whether an output that is written in two parts takes the shared memory of three, as on
            sm_100.
    """

    multiprocessors: int
    shared_memory: int
    fetches_tiles: bool
    third_half: bool = False


@functools.cache
def gpu(device: int) -> Gpu:
    """The properties of GPU `device`. -1 is the CPU, on which Triton's interpreter runs."""
    if device < 0:
        return Gpu(1, 1 << 18, True)
    p: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None or not (arch := arch_of((p.major, p.minor))).copies_tiles:
        return Gpu(p.multi_processor_count, 0, False)
    shared_memory = p.shared_memory_per_block_optin - 1024
    return Gpu(p.multi_processor_count, shared_memory, True, arch.third_half)
