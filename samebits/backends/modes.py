"""Modes of a thread: PyTorch's function modes, and this library's context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["CONTEXT", "include", "includes", "sees_calls", "with_context"]

CONTEXT: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
"""The key of PyTorch's dispatcher that is included in a thread in :func:`samebits.batch_invariant`.

PyTorch has it for modes and does not use it. Autograd takes it to its threads, as all keys.
"""

include = torch._C._dispatch_tls_set_dispatch_key_included
"""``include(key, on)``, in this thread."""
includes = torch._C._dispatch_tls_is_dispatch_key_included
sees_calls = torch._C._is_torch_function_mode_enabled
"""Whether a function mode is on, which is to see what an operator calls."""


@contextmanager
def with_context(on: bool) -> Iterator[None]:
    """Within or without the context."""
    before = includes(CONTEXT)
    include(CONTEXT, on)
    try:
        yield
    finally:
        include(CONTEXT, before)
