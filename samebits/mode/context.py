"""The context ``samebits.batch_invariant``: within it, PyTorch's functions run this library's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from samebits.backends.modes import CONTEXT, include, includes, untraced, with_context
from samebits.contexts import Context
from samebits.mode import fp8_layers, state_space_layers  # noqa: F401 - they register what is exchanged
from samebits.mode.calls import OnUncovered, check_on_uncovered, outermost, state
from samebits.mode.exchanged import cover
from samebits.mode.inductor import compile_exactly, cover_inductor
from samebits.mode.interfaces import cover_interfaces
from samebits.mode.kernels import register_context
from samebits.mode.patches import AUTOGRAD_CACHE, asks
from samebits.mode.recorded import keep
from samebits.mode.recurrent_layers import cover_recurrent
from samebits.mode.traced import Traced, show_all_functions

__all__ = ["batch_invariant"]


class batch_invariant(Context[None]):  # noqa: N801
    """A context, or a decorator, under which PyTorch's own functions give the bits of this library's.

    It covers products (``mm``, ``bmm``, ``matmul``, ``@``, ``addmm``, ``baddbmm``, ``mv``, ``dot``,
    ``einsum``, ``F.linear``), ``softmax``, ``log_softmax``, ``F.cross_entropy``, ``F.layer_norm``,
    ``F.rms_norm``, ``sum``, ``mean``, ``F.embedding`` and ``F.scaled_dot_product_attention``. It also covers
    the gradients of what is broadcast. ``docs/mode.md`` has the whole list, and the arguments that are
    covered. A covered call also has this library's gradient, wherever the backward runs.

    The context acts on operators that this thread calls, from Python or from C++. What is not covered costs
    nothing. No bits change for other threads, or afterwards. Contexts may be nested; the innermost
    ``on_uncovered`` counts. One can be kept and entered again, also within itself and by several threads. Do
    not ``await`` or ``yield`` inside.

    What ``torch.utils.checkpoint`` runs again in a backward, it runs in the context of its forward. Under
    ``torch.compile``, what is traced inside the context is covered. "Limits" in ``README.md`` says what may
    still change bits.

    Args:
        on_uncovered: what to do when an operator is called that is not covered, and whose rows are known to
            depend on the batch: ``"warn"`` once for each operator, ``"error"`` (an :class:`UncoveredError`),
            or ``"ignore"``.

    Raises:
        ValueError: ``on_uncovered`` is none of these.
        TypeError: it decorates what is no function, or one that yields or awaits.
    """

    def __init__(self, on_uncovered: OnUncovered = "warn") -> None:
        check_on_uncovered("batch_invariant", on_uncovered)
        self._on_uncovered = on_uncovered

    def _open(self) -> AbstractContextManager[None]:
        return _context(self._on_uncovered)


@contextmanager
def _context(on_uncovered: OnUncovered) -> Iterator[None]:
    before = state.on_uncovered
    state.on_uncovered = on_uncovered
    try:
        with _within(on_uncovered, before):
            yield
    finally:
        state.on_uncovered = before
        if before is not None:
            outermost.context = before


@untraced
def _within(on_uncovered: OnUncovered, before: OnUncovered | None) -> AbstractContextManager[None]:
    # Not is_exporting(): the compiler of PyTorch 2.11 takes it to be true, whatever it compiles for.
    if torch.compiler.is_dynamo_compiling() and torch.compiler._is_exporting_flag:
        raise RuntimeError(
            "samebits.batch_invariant: torch.export: expected strict=False, got strict=True, which does not"
            " show operators such as @ to the context"
        )
    if torch.compiler.is_compiling():  # the key is included already, or the mode is on
        show_all_functions()
        compile_exactly()
        return nullcontext() if before is not None else Traced(on_uncovered)
    return _included(on_uncovered)


@contextmanager
@untraced
def _included(on_uncovered: OnUncovered) -> Iterator[None]:
    """Include the key in this thread."""
    register_context()
    cover(_is_on)
    cover_inductor()
    cover_recurrent(_is_on)
    cover_interfaces()
    outermost.context = on_uncovered
    before, first = includes(CONTEXT), torch._C._autograd._get_sequence_nr()
    AUTOGRAD_CACHE.hold()
    try:
        include(CONTEXT, True)
        yield
    finally:
        include(CONTEXT, before)
        AUTOGRAD_CACHE.release()
        keep(first, torch._C._autograd._get_sequence_nr())


def _again(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, in the context that this thread is in, or in none."""
    if outermost.process is not None:  # which covers all threads
        return run
    on_uncovered = (state.on_uncovered or outermost.context) if _is_on() else None

    def inside(*args: Any) -> Any:
        last = outermost.context
        try:
            with _without() if on_uncovered is None else _context(on_uncovered):
                return run(*args)
        finally:
            outermost.context = last  # a thread of autograd's has no context to return to

    return inside


@contextmanager
def _without() -> Iterator[None]:
    """In no context."""
    before, state.on_uncovered = state.on_uncovered, None
    try:
        with with_context(False):
            yield
    finally:
        state.on_uncovered = before


def _is_on() -> bool:
    """Whether this thread, which may be one of autograd's, is in a context."""
    if torch.compiler.is_compiling():  # which reads no keys
        return state.on_uncovered is not None
    return includes(CONTEXT)


def _in_mode() -> bool:
    return outermost.process is not None or _is_on()


asks.again, asks.in_mode = _again, _in_mode
