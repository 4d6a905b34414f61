"""The mode for the whole process: PyTorch's dispatcher itself runs the replacements.

Kernels are registered for just the operators that have a rule (:mod:`samebits.mode.operators`), at the
autograd and the backend keys of CPU and CUDA: calls reach the latter under ``torch.inference_mode`` and from
within other operators. What has no rule runs as ever, at no cost. The kernels stay once they are registered,
since other threads may be running them; while the mode is off they call PyTorch's own.

Processes that are started later are in the mode, too. Those that are forked have all of this. Others read an
environment variable when they import samebits. What ``multiprocessing`` starts imports it for that: each
process takes the entries of its parent's ``_config`` along, and unpickles them before its function. They
count more than the variable: the processes of a fork server have the environment of the server's start.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from samebits.contexts import Context
from samebits.mode import fp8_layers, state_space_layers  # noqa: F401 - they register what is exchanged
from samebits.mode.calls import OnUncovered, check_on_uncovered, outermost
from samebits.mode.exchanged import cover
from samebits.mode.interfaces import cover_interfaces
from samebits.mode.kernels import register_process
from samebits.mode.patches import run_eagerly, stance, when_loaded
from samebits.mode.recurrent_layers import cover_recurrent

__all__ = [
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "inherit_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]


_VARIABLE = "SAMEBITS_BATCH_INVARIANT_MODE"
_COMPILER = "torch._dynamo"  # which takes long to load


class _Switch:
    """The state of the process.

    Attributes:
        stance: what ``torch.compile`` did before. None: it is not loaded, or ran all functions eagerly.
        before: what the blocks that are open have found.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stance: Any = None
        self.before: list[OnUncovered | None] = []

    def set(self, on_uncovered: OnUncovered | None) -> OnUncovered | None:
        """Turn the mode on or, with None, off. Returns what was before."""
        with self.lock:
            before = outermost.process
            if on_uncovered is not None and before is None:
                register_process()
                cover(is_batch_invariant_mode_enabled)
                cover_recurrent(is_batch_invariant_mode_enabled)
                cover_interfaces()
                when_loaded(_COMPILER, self.compile_nothing)
            elif on_uncovered is None and before is not None:
                if self.stance is not None and stance() == "force_eager":  # nobody has changed it since
                    self.stance.__exit__(None, None, None)
                self.stance = None
            outermost.process = on_uncovered
            if on_uncovered is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = on_uncovered
                multiprocessing.current_process()._config[_VARIABLE] = _Inherited()  # type: ignore[attr-defined]
                if _COMPILER in sys.modules:
                    self.compile_nothing()
            return before

    def compile_nothing(self) -> None:
        """Let compiled functions run eagerly. What was compiled, and what would be, has kernels of its own.

        Without the lock: the thread that loads the compiler calls it, while another may wait for that.
        """
        if outermost.process is not None and stance() != "force_eager":
            self.stance = run_eagerly()

    def enter(self, on_uncovered: OnUncovered | None) -> None:
        """Begin a block with this."""
        with self.lock:
            self.before.append(self.set(on_uncovered))

    def leave(self) -> None:
        """End a block."""
        with self.lock:
            self.set(self.before.pop())


_switch = _Switch()


class _Inherited:
    """Pickled, it is the mode as it is then. It stays when the mode ends: so processes learn that it has."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _inherit, (outermost.process,)


def _inherit(on_uncovered: OnUncovered | None) -> _Inherited:
    _switch.set(on_uncovered)
    return _Inherited()


def inherit_mode() -> None:
    """Enable the mode if the environment says so: that of a parent in the mode does."""
    on_uncovered: Any = os.environ.get(_VARIABLE)
    if on_uncovered and outermost.process is None:
        check_on_uncovered(f"enable_batch_invariant_mode, by {_VARIABLE}", on_uncovered)
        _switch.set(on_uncovered)


def enable_batch_invariant_mode(on_uncovered: OnUncovered = "warn") -> None:
    """Let PyTorch's own functions give the bits of this library's, in the whole process, until disabled.

    It covers what :func:`samebits.batch_invariant` covers, by the same rules, but in all threads: those of
    data-parallel workers, of autograd, and of ``generate_batch`` in ``transformers``. It also covers
    operators that are called from C++, and what activation checkpointing computes again. What is not
    covered costs nothing. While it is on, functions under ``torch.compile`` run eagerly
    (``torch.compiler.set_stance("force_eager")``), since compiled code has kernels of its own.

    Processes that are started meanwhile are in the mode: those of ``multiprocessing``, and so of
    ``torch.multiprocessing`` and data loaders, by any start method, and all others from their import of
    samebits on. For these ``SAMEBITS_BATCH_INVARIANT_MODE`` in the environment has ``on_uncovered``.

    Enable it before other threads run operators: the first time PyTorch's dispatcher is changed. To enable it
    again changes `on_uncovered` alone.

    Args:
        on_uncovered: as in :func:`samebits.batch_invariant`. The argument of a context counts in it.

    Raises:
        ValueError: ``on_uncovered`` is none of the values that it can have.
        RuntimeError: it is called in a function that ``torch.compile`` compiles.
    """
    check_on_uncovered("enable_batch_invariant_mode", on_uncovered)
    _switch.set(on_uncovered)


def disable_batch_invariant_mode() -> None:
    """Undo :func:`enable_batch_invariant_mode`, however often it was called.

    Calls that run go on as they began. The kernels stay registered and call PyTorch's own: "The whole
    process" in ``docs/mode.md`` says what that costs.
    """
    _switch.set(None)


def is_batch_invariant_mode_enabled() -> bool:
    """Whether the process is in the mode. Contexts of :func:`samebits.batch_invariant` do not count."""
    return outermost.process is not None


class set_batch_invariant_mode(Context[None]):  # noqa: N801
    """Enable the mode in the whole process, or disable it, and restore what was before at the end.

    It is a context, which can be kept and entered again, and a decorator. Threads share it: once all blocks
    have ended, in whatever order, the mode is what the first has found.

    Args:
        enabled: whether to enable it.
        on_uncovered: as in :func:`enable_batch_invariant_mode`.

    Raises:
        ValueError: as :func:`enable_batch_invariant_mode`.
        TypeError: it decorates what is no function, or one that yields or awaits.
    """

    def __init__(self, enabled: bool = True, on_uncovered: OnUncovered = "warn") -> None:
        check_on_uncovered("set_batch_invariant_mode", on_uncovered)
        self._wanted = on_uncovered if enabled else None

    def _open(self) -> set_batch_invariant_mode:
        return self

    def __enter__(self) -> None:
        _switch.enter(self._wanted)

    def __exit__(self, *_: object) -> None:
        _switch.leave()
