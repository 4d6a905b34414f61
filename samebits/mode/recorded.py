"""Gradients of what a context recorded, where the backward runs outside of it.

Autograd itself sums the gradients of what was broadcast, and adds up those of what was picked. Its engine
calls PyTorch's operators for that, whose rules must hold then too. No node of autograd's graph knows of a
context. But nodes are numbered as they are recorded. So the numbers of each context are kept, and while a
backward runs outside, a key of its own is included, at which just these operators have a kernel.

Every thread counts anew, and all contexts' numbers are kept in one place: a graph of one thread may be
summed in another. So a graph that another thread recorded under the same numbers, without a context, gets
this library's sums as well, if it runs its backward outside.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any

import torch
from torch.autograd import Variable

from samebits.backends.modes import CONTEXT, include, includes
from samebits.mode.calls import outermost

__all__ = ["RECORDED", "RUN_BACKWARD", "keep", "was_recorded", "watch_backwards"]

RECORDED: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericWrapper")
"""The key of PyTorch's dispatcher that is included in a backward outside of contexts."""

_MOST = 1024  # contexts that are told apart
_lock = threading.Lock()
_firsts: tuple[int, ...] = ()
_ends: tuple[int, ...] = ()  # of the ranges that begin there; ascending, and apart


def keep(first: int, end: int) -> None:
    """Nodes `first` to `end` - 1 of this thread were recorded in a context."""
    global _firsts, _ends
    if first == end:
        return
    with _lock:
        found: list[tuple[int, int]] = []
        for a, b in sorted((*zip(_firsts, _ends, strict=True), (first, end))):
            if found and a <= found[-1][1]:
                found[-1] = found[-1][0], max(b, found[-1][1])
            else:
                found.append((a, b))
        if len(found) > _MOST:  # between the oldest ones all counts as recorded
            found[:2] = [(found[0][0], found[1][1])]
        _firsts, _ends = (tuple(x) for x in zip(*found, strict=True))


def was_recorded() -> bool:
    """Whether the node that autograd's engine runs in this thread was recorded in a context."""
    node = torch._C._current_autograd_node()
    if node is None:
        return False
    number, firsts, ends = node._sequence_nr(), _firsts, _ends
    at = bisect_right(firsts, number) - 1
    return at >= 0 and at < len(ends) and number < ends[at]


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, which includes the key in backwards outside of contexts."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        of_mode = includes(CONTEXT) or outermost.process is not None  # its own kernels sum all gradients
        if of_mode or includes(RECORDED) or not _firsts:
            return super().run_backward(*args, **kwargs)
        include(RECORDED, True)
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            include(RECORDED, False)


RUN_BACKWARD = _Engine.run_backward.__code__


def watch_backwards() -> None:
    """Let backwards outside of contexts sum what contexts recorded."""
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()
