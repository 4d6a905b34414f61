"""What the mode changes in Python's and PyTorch's internals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["when_loaded"]


class _WhenLoaded(MetaPathFinder):
    """Finds modules as others do, and calls functions as soon as they are loaded.

    Attributes:
        calls: the functions, by the names of modules.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[], object]]] = {}
        self._asked: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.calls or name in self._asked:
            return None
        self._asked.add(name)  # the other finders
        try:
            spec = find_spec(name)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                for call in self.calls[name]:
                    call()

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_finder = _WhenLoaded()


def when_loaded(name: str, call: Callable[[], object]) -> None:
    """Call a function once a module is loaded, however often this is asked for. Not now, if it is."""
    calls = _finder.calls.setdefault(name, [])
    if call not in calls:
        calls.append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
