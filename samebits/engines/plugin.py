"""A plug-in's switch: what turns its hooks on and off in a process of an engine or trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from samebits.engines.hooks import Hooks

__all__ = ["Plugin"]


class Plugin:
    """Hooks of one engine, in this process and by the environment in those that it starts.

    Args:
        name: of the plug-in, for errors.
        variable: of the environment, which turns it on. With ``_ANY_VERSION`` it allows untested versions.
            By default there is none, and the hooks are in this process alone.
    """

    def __init__(self, name: str, variable: str = "") -> None:
        self.name = name
        self.variable, self.any_version = variable, f"{variable}_ANY_VERSION"
        self.hooks: Hooks | None = None

    def wanted(self) -> bool:
        """Whether the environment turns it on."""
        return _is_set(self.variable)

    def allows_any_version(self) -> bool:
        return _is_set(self.any_version)

    def enable(
        self, install: Callable[[Hooks], None], engine: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Let `install` replace what it has to, or nothing if it fails.

        Args:
            engine: its name and version, for errors.
            environment: more variables that are set while the hooks are there.
        """
        hooks = Hooks(f"{self.name}: {engine}")
        try:
            install(hooks)
        except BaseException:
            hooks.undo()
            raise
        own = {self.variable: "1"} if self.variable else {}
        for name, value in {**own, **(environment or {})}.items():
            hooks.on_undo(partial(_restore, name, os.environ.get(name)))
            os.environ[name] = value
        self.hooks = hooks

    def disable(self) -> None:
        if self.hooks is not None:
            self.hooks.undo()
            self.hooks = None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
