"""Work in threads that end before a test goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """What each returns, all at once in threads of their own; an error of theirs is raised here."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:  # pytest's own among them
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(work))]
