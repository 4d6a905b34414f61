"""Modes of a thread: PyTorch's function modes, this library's context, and the capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["CONTEXT", "capturing", "include", "includes", "sees_calls", "with_context"]

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


def capturing(t: Tensor) -> bool:
    """Whether a CUDA graph captures the current stream of `t`'s device, which need not be current."""
    if not t.is_cuda:
        return False
    if torch._C._cuda_getDevice() == t.get_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(t.device):
        return torch.cuda.is_current_stream_capturing()
