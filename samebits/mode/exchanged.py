"""What is exchanged in modules of ``transformers``, and runs under the mode alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from samebits.mode.patches import when_loaded

__all__ = ["cover", "in_module", "under_the_mode"]

_asked: list[Callable[[], bool]] = []
_changes: dict[str, list[Callable[[], None]]] = {}


def in_module(name: str, change: Callable[[], None]) -> None:
    """Let `change` run once, when the mode is first on and the module of this name is loaded."""
    _changes.setdefault(name, []).append(change)


def cover(is_on: Callable[[], bool]) -> None:
    """Let what :func:`under_the_mode` has exchanged run while `is_on` says so: now, or when it is loaded."""
    if is_on in _asked:
        return
    if not _asked:
        for name, changes in _changes.items():
            for change in [*changes]:
                if name in sys.modules:
                    change()
                    changes.remove(change)
                else:
                    when_loaded(name, change)
    _asked.append(is_on)


def under_the_mode(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` while the mode is on, unless it returns NotImplemented; else `own`."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        for is_on in _asked:
            if is_on():
                result = ours(*args, **kwargs)
                return own(*args, **kwargs) if result is NotImplemented else result
        return own(*args, **kwargs)

    return call
