"""Gradients of what a context recorded, where the backward runs outside of it.

Autograd itself sums the gradients of what was broadcast, and adds up those of what was picked. Its engine
calls PyTorch's operators for that. Their rules must hold there, too. No node of autograd's graph knows of a
context. But it knows the thread that recorded it, and its number among the nodes of that thread. So for each
thread, the numbers that contexts recorded are kept. While a backward runs outside, the thread includes a key
of its own, at which just these operators have a kernel.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right

import torch

from samebits.backends.modes import CONTEXT, RECORDED, includes
from samebits.mode.calls import outermost
from samebits.mode.patches import asks, place

__all__ = ["keep", "was_recorded"]


class _Ranges:
    """Ranges of a thread's nodes, ascending and apart."""

    def __init__(self) -> None:
        self._firsts, self._ends = array("Q"), array("Q")

    def add(self, first: int, end: int) -> None:
        """Of those before, it may hold some, or begin where the last one ends."""
        while self._firsts and self._ends[-1] >= first:
            first = min(first, self._firsts.pop())
            self._ends.pop()
        self._firsts.append(first)
        self._ends.append(end)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number < self._ends[at]


_lock = threading.Lock()
_recorded: dict[int, _Ranges] = {}  # by thread


class _Here(threading.local):
    def __init__(self) -> None:
        self.thread, _ = place(torch._C._functions.UndefinedGrad())


_here = _Here()


def keep(first: int, end: int) -> None:
    """Nodes `first` to `end` - 1 of this thread were recorded in a context."""
    if first < end:
        thread = _here.thread
        with _lock:
            _recorded.setdefault(thread, _Ranges()).add(first, end)


def was_recorded() -> bool:
    """Whether the node that autograd's engine runs in this thread was recorded in a context."""
    node = torch._C._current_autograd_node()
    if node is None:
        return False
    thread, number = place(node)
    with _lock:
        return thread in _recorded and number in _recorded[thread]


def _sums_outside() -> bool:
    """Whether a backward that begins is in no mode, whose own kernels sum all gradients, after a context."""
    of_mode = includes(CONTEXT) or outermost.process is not None
    return not of_mode and not includes(RECORDED) and bool(_recorded)


asks.sums_outside = _sums_outside
