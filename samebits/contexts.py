"""What the contexts of the public API have in common with PyTorch's own, ``torch.no_grad`` and autocast.

One object can be kept and entered again, also within itself and by several threads at once. As a decorator it
enters itself in each call, and refuses functions whose bodies run after the call has returned.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["Context", "check_function"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class _Here(threading.local):
    # A thread-local object, not a ContextVar, because torch.compile traces it.
    def __init__(self) -> None:
        self.entered: list[AbstractContextManager[Any]] = []


_here = _Here()


class Context(Generic[_T]):
    """A context of a thread, and a decorator."""

    def _open(self) -> AbstractContextManager[_T]:
        """What one block enters and leaves: a new one, or this where :meth:`__enter__` needs none."""
        raise NotImplementedError

    def __enter__(self) -> _T:
        opened = self._open()
        result = opened.__enter__()
        _here.entered.append(opened)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        check_function(type(self).__name__, function)

        @functools.wraps(function)
        def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._open():  # not self: torch.compile enters none that it has not seen being made
                return function(*args, **kwargs)

        return within


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a generator": inspect.isgeneratorfunction,
    "a coroutine": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


def check_function(context: str, function: Any) -> None:
    """Refuse to decorate what is no function, or one that only makes what runs later.

    Raises:
        TypeError: `function` is a class, cannot be called, or is a generator or a coroutine.
    """
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else type(function).__name__
        raise TypeError(f"samebits.{context}: expected a function, got {kind}")
    plain = function
    while isinstance(plain, (functools.partial, staticmethod)):
        plain = plain.func if isinstance(plain, functools.partial) else plain.__func__
    runs = plain if inspect.isroutine(plain) else type(plain).__call__
    for kind, is_kind in _KINDS.items():
        if is_kind(runs):
            name = getattr(plain, "__qualname__", type(plain).__qualname__)
            raise TypeError(
                f"samebits.{context}: expected a function that neither yields nor awaits, got {name}, {kind},"
                " whose body runs after the call has returned. Enter the context in it, around what does not"
                " yield or await"
            )
