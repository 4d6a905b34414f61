"""The context ``samebits.batch_invariant``: within it, PyTorch's functions run this library's operators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.backends import mha

from samebits.backends.modes import CONTEXT, include, includes
from samebits.mode.calls import OnUncovered, check_on_uncovered, outermost, state
from samebits.mode.fp8_layers import cover
from samebits.mode.kernels import register_context
from samebits.mode.recorded import keep
from samebits.mode.traced import Traced

__all__ = ["batch_invariant"]


def batch_invariant(on_uncovered: OnUncovered = "warn") -> AbstractContextManager[None]:
    """A context, or a decorator, under which PyTorch's own functions give the bits of this library's.

    It covers products (``mm``, ``bmm``, ``matmul``, ``@``, ``addmm``, ``baddbmm``, ``mv``, ``dot``,
    ``einsum``, ``F.linear``), ``softmax``, ``log_softmax``, ``F.cross_entropy``, ``F.layer_norm``,
    ``F.rms_norm``, ``sum``, ``mean``, ``F.embedding`` and ``F.scaled_dot_product_attention``. It also covers
    the gradients of what is broadcast. ``docs/mode.md`` has the whole list, and the arguments that are
    covered. A covered call also has this library's gradient, wherever the backward runs.

    The context acts on operators that this thread calls, from Python or from C++. What is not covered costs
    nothing. No bits change for other threads, or afterwards. Contexts may be nested; the innermost
    ``on_uncovered`` counts. Do not ``await`` or ``yield`` inside, and do not decorate a function that does.
    Activation checkpointing runs the forward again in the backward, so enter the context around the backward
    too. Under ``torch.compile``, what is traced inside the context is covered. "Limits" in ``README.md`` says
    what may still change bits.

    Args:
        on_uncovered: what to do when an operator is called that is not covered, and whose rows are known to
            depend on the batch: ``"warn"`` once for each operator, ``"error"`` (an :class:`UncoveredError`),
            or ``"ignore"``.

    Raises:
        ValueError: ``on_uncovered`` is none of these.
    """
    check_on_uncovered("batch_invariant", on_uncovered)
    return _context(on_uncovered)


@contextmanager
def _context(on_uncovered: OnUncovered) -> Iterator[None]:
    before = state.on_uncovered
    state.on_uncovered = on_uncovered
    try:
        with _within(on_uncovered, before):
            yield
    finally:
        state.on_uncovered = before


def _within(on_uncovered: OnUncovered, before: OnUncovered | None) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling():  # the key is included already, or the mode is on
        return nullcontext() if before is not None else Traced(on_uncovered)
    return _included(on_uncovered)


@contextmanager
def _included(on_uncovered: OnUncovered) -> Iterator[None]:
    """Include the key in this thread."""
    register_context()
    cover(_is_on)
    outermost.context = on_uncovered
    before, first = includes(CONTEXT), torch._C._autograd._get_sequence_nr()
    _meanwhile.enter()
    include(CONTEXT, True)
    try:
        yield
    finally:
        include(CONTEXT, before)
        _meanwhile.leave()
        keep(first, torch._C._autograd._get_sequence_nr())


def _is_on() -> bool:
    """Whether this thread, which may be one of autograd's, is in a context."""
    if torch.compiler.is_compiling():  # which reads no keys
        return state.on_uncovered is not None
    return includes(CONTEXT)


class _Meanwhile:
    """What the process does not do while a thread is in a context.

    * ``torch.compile`` keeps no graphs on the disk: it knows them by the functions that the program calls,
      which are the same outside.
    * Transformer layers of PyTorch do not take their own path.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._before = True, True

    def enter(self) -> None:
        from torch._functorch import config  # not with `import torch`

        with self._lock:
            if not self._contexts:
                self._before = config.enable_autograd_cache, mha.get_fastpath_enabled()
                config.enable_autograd_cache = False
                mha.set_fastpath_enabled(False)
            self._contexts += 1

    def leave(self) -> None:
        from torch._functorch import config

        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                config.enable_autograd_cache = self._before[0]
                mha.set_fastpath_enabled(self._before[1])


_meanwhile = _Meanwhile()
