"""Modes of a thread: PyTorch's function modes, and this library's context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

__all__ = [
    "CONTEXT",
    "NAMES",
    "RECORDED",
    "TESTED",
    "dispatch_key",
    "include",
    "includes",
    "sees_calls",
    "untraced",
    "with_context",
]

TESTED = "2.11.0, 2.13.0 and 2.14.1"
"""Versions of PyTorch."""


def dispatch_key(name: str) -> Any:
    key = torch._C._parse_dispatch_key(name)
    if key is None:
        raise ImportError(
            f"samebits: PyTorch {torch.__version__} has no key {name} of the dispatcher, which those that"
            f" samebits was tested with have ({TESTED}). Use one of them, or another release of samebits"
        )
    return key


CONTEXT: Any = dispatch_key("TESTING_ONLY_GenericMode")
"""The key of PyTorch's dispatcher that is included in a thread in :func:`samebits.batch_invariant`.

PyTorch has it for modes and does not use it. Autograd takes it to its threads, as all keys.
"""
RECORDED: Any = dispatch_key("TESTING_ONLY_GenericWrapper")
"""The key that is included in a backward outside of contexts."""
NAMES = {CONTEXT: "TESTING_ONLY_GenericMode", RECORDED: "TESTING_ONLY_GenericWrapper"}

include = torch._C._dispatch_tls_set_dispatch_key_included
"""``include(key, on)``, in this thread."""
includes = torch._C._dispatch_tls_is_dispatch_key_included
sees_calls = torch._C._is_torch_function_mode_enabled
"""Whether a function mode is on, which is to see what an operator calls."""


_F = TypeVar("_F", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame


def untraced(function: _F) -> _F:
    """`function`, of which ``torch.compile`` makes no graph of its own, nor of what it calls.

    Where the compiler gives a function up, it compiles what this calls, one by one. What traces a caller of
    `function` still traces it.
    """
    skip = _frames._FrameAction.SKIP
    code = cast(FunctionType, function).__code__
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    return function


@contextmanager
def with_context(on: bool) -> Iterator[None]:
    """Within or without the context."""
    before = includes(CONTEXT)
    include(CONTEXT, on)
    try:
        yield
    finally:
        include(CONTEXT, before)
