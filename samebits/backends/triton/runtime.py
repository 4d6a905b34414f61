"""Whether Triton can run here. Importing this module imports no Triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import threading
from contextlib import suppress
from dataclasses import dataclass

import torch

from samebits.backends import UnavailableError

__all__ = ["Status", "bind", "require", "status"]


OLDEST = 3, 6


@dataclass(frozen=True, slots=True)
class Status:
    """Whether Triton's kernels can run here, and if not, why and what to do."""

    available: bool
    reason: str
    remedy: str
    triton: str | None


def status() -> Status:
    """What ``samebits info`` shows of the Triton backend. Never raises."""
    version = _version()
    try:
        require(0)
    except UnavailableError as error:
        reason, _, remedy = str(error).partition(" — ")
        return Status(False, reason, remedy, version)
    return Status(True, "", "", version)


def _version() -> str | None:
    """Triton's, as its package or that of a PyTorch for other GPUs tells."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def require(device: int) -> None:
    """Raise UnavailableError unless Triton is here, and a GPU for it."""
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError("there is no package triton — pip install triton")
    version = _version()
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise UnavailableError(f"triton {version} is older than 3.6 — pip install --upgrade triton")
    if not torch.cuda.is_available():
        raise UnavailableError("PyTorch finds no GPU — use CPU tensors, or a PyTorch built for your GPU")


class _Bound(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()


_bound = _Bound()


def bind(device: int) -> None:
    """Give this thread a context on GPU `device`: Triton makes tensor maps before it calls what would."""
    if device not in _bound.devices:
        torch.cuda.mem_get_info(device)
        _bound.devices.add(device)
