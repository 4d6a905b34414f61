"""Replacements of an engine's attributes: each checks what it replaces, and all can be undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Hooks", "MovedError"]


class MovedError(RuntimeError):
    """An engine's internals are not what a hook expects."""


class Hooks:
    """Replaced attributes of modules and classes.

    Args:
        engine: its name and version, for errors.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._undo: list[Callable[[], None]] = []

    def expect(self, owner: Any, name: str, *parameters: str) -> None:
        """Check that ``owner.name`` exists, and that its signature begins with these parameters.

        Raises:
            MovedError: it does not.
        """
        place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        if not hasattr(owner, name):
            raise MovedError(f"{self.engine}: {place}.{name}: expected to exist, and it does not")
        if parameters:
            found = tuple(inspect.signature(getattr(owner, name)).parameters)
            if found[: len(parameters)] != parameters:
                raise MovedError(
                    f"{self.engine}: {place}.{name}: expected a function of ({', '.join(parameters)}, ...),"
                    f" got one of ({', '.join(found)})"
                )

    def replace(self, owner: Any, name: str, new: Any, *parameters: str) -> None:
        """Set ``owner.name``, which :meth:`expect` checks, to `new`.

        Args:
            owner: a module or a class. It may have inherited the attribute.
        """
        self.expect(owner, name, *parameters)
        inherited, before = name not in vars(owner), vars(owner).get(name)
        setattr(owner, name, new)
        self._undo.append(
            partial(delattr, owner, name) if inherited else partial(setattr, owner, name, before)
        )

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the replacements are undone."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()
