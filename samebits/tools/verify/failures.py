"""Kernels that raise an error or do not end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class KernelError(Exception):
    """A kernel raised an error."""


class HangError(KernelError):
    """A kernel did not end."""


def finish(doing: str, seconds: float = 60.0) -> None:
    """Wait for the current stream, at most `seconds`."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > deadline:
            raise HangError(f"{doing}: did not end within {seconds:.0f} s")
        time.sleep(0)


@contextmanager
def running(what: str) -> Iterator[None]:
    """Raise errors of this block as a KernelError that names `what`."""
    try:
        yield
    except KernelError:
        raise
    except Exception as error:  # the report names any error
        raise KernelError(f"{what}: {type(error).__name__}: {error}") from error
