"""Which backend computes. None of them changes a bit, so the choice is no part of a contract."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any

import torch

__all__ = ["NAMES", "UnavailableError", "asked", "broadcast", "on_gpu", "use_backend"]

NAMES = ("cuda", "triton", "reference")
AUTOMATIC: tuple[str, ...] = ("cuda", "triton")
"""For GPU tensors without a choice: the first of these that can run."""


class UnavailableError(RuntimeError):
    """A backend cannot run here; the message says why and what to do."""


class _Choice(local):
    # An attribute of a thread-local object, because torch.compile reads and guards that (no ContextVar).
    def __init__(self) -> None:
        self.backend: str | None = None


_choice = _Choice()


def use_backend(name: str | None) -> AbstractContextManager[None]:
    """Compute with one backend, or not at all: an explicit choice never falls back to another.

    ``samebits.use_backend("triton")`` holds for this thread from now on; as ``with
    samebits.use_backend("triton"):``, until the end of the block. An operation's backward uses the backend of
    its forward. Without a choice, GPU tensors are computed by the CUDA kernels, or else by Triton (where
    cuda-core is not installed, or the kernels do not know the GPU), and CPU tensors by the reference. All
    give the same bits. Do not ``await`` inside: the choice belongs to the thread.

    Args:
        name: ``"cuda"``, ``"triton"`` (GPU tensors only), ``"reference"`` (CPU tensors only), or None to
            choose automatically again.

    Raises:
        ValueError: there is no backend of this name. An operation raises it for tensors on a device that the
            backend does not compute on.
        samebits.backends.UnavailableError: raised by an operation if the backend cannot run here.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"samebits.use_backend: name: expected one of {NAMES} or None, got {name!r}")
    before, _choice.backend = _choice.backend, name
    return _until_exit(before)


@contextmanager
def _until_exit(before: str | None) -> Iterator[None]:
    try:
        yield
    finally:
        _choice.backend = before


def asked(device_type: str) -> str:
    """``@`` and the backend that was asked for, which follows a contract's key through ``torch.library``.

    So the choice is read once, where an operation runs forward, and its backward, which may run in a thread
    of its own, follows it.
    """
    name = _choice.backend
    if name is None or device_type == "meta":
        return ""
    if (name == "reference") != (device_type == "cpu"):
        takes = "CPU" if name == "reference" else "GPU"
        raise ValueError(f"samebits: backend {name}: expected {takes} tensors, got {device_type}")
    return "" if name == "reference" else f"@{name}"


def broadcast(*shapes: torch.Size) -> torch.Size:
    """``torch.broadcast_shapes``, which takes longer than a small kernel, unless there is nothing to do."""
    longest = max(shapes, key=len)
    if all(s == longest or not s for s in shapes):
        return longest
    found: torch.Size = torch.broadcast_shapes(*shapes)
    return found


@functools.cache
def on_gpu(operation: str, key: str, device: int) -> tuple[Any, str]:
    """The module that computes `operation` on GPU `device`, and the contract's key that it takes."""
    contract, _, name = key.partition("@")
    reasons = []
    for backend in (name,) if name else AUTOMATIC:
        package = f"samebits.backends.{backend}"
        if importlib.util.find_spec(f"{package}.{operation}") is None:
            reasons.append(f"{backend}: it does not compute {operation} yet")
            continue
        try:
            importlib.import_module(f"{package}.runtime").require(device)
        except UnavailableError as error:
            reasons.append(f"{backend}: {error}")
        else:
            return importlib.import_module(f"{package}.{operation}"), contract
    raise UnavailableError("samebits: no backend for this GPU tensor. " + "; ".join(reasons))
