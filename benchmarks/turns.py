"""Processes that take turns on the same two CPUs: if these slow down, as shared ones do, all are slower."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection


@contextmanager
def processes(serve: Callable[..., None], forms: Iterable[str]) -> Iterator[dict[str, Connection]]:
    """``serve(form, connection)`` in a process for each form, and the other ends of their connections.

    A backward has a thread of its own, hence two CPUs. If a process dies, reading from it raises EOFError.
    """
    spawn = multiprocessing.get_context("spawn")
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[-2:])  # processes inherit it
    connections = {}
    try:
        for form in forms:
            connections[form], end = spawn.Pipe()
            spawn.Process(target=serve, args=(form, end), daemon=True).start()
            end.close()
        yield connections
    finally:
        os.sched_setaffinity(0, every)
