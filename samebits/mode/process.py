"""The mode for the whole process: PyTorch's dispatcher itself runs the replacements.

Kernels are registered for just the operators that have a rule (:mod:`samebits.mode.operators`), at the
autograd and the backend keys of CPU and CUDA: calls reach the latter under ``torch.inference_mode`` and from
within other operators. What has no rule runs as ever, at no cost. The kernels stay once they are registered,
since other threads may be running them; while the mode is off they call PyTorch's own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from samebits.contexts import Context
from samebits.mode.calls import OnUncovered, check_on_uncovered, outermost
from samebits.mode.fp8_layers import cover
from samebits.mode.held import FAST_PATH
from samebits.mode.kernels import register_process

__all__ = [
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]


class _Switch:
    """The state of the process.

    Attributes:
        stance: what ``torch.compile`` did before.
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
                # What has been compiled, and would be, has other kernels.
                self.stance = torch.compiler.set_stance("force_eager")
                FAST_PATH.hold()
            elif on_uncovered is None and before is not None:
                if torch._dynamo.eval_frame._stance.stance == "force_eager":  # nobody has changed it since
                    self.stance.__exit__(None, None, None)
                FAST_PATH.release()
            outermost.process = on_uncovered
            return before

    def enter(self, on_uncovered: OnUncovered | None) -> None:
        """Begin a block with this."""
        with self.lock:
            self.before.append(self.set(on_uncovered))

    def leave(self) -> None:
        """End a block."""
        with self.lock:
            self.set(self.before.pop())


_switch = _Switch()


def enable_batch_invariant_mode(on_uncovered: OnUncovered = "warn") -> None:
    """Let PyTorch's own functions give the bits of this library's, in the whole process, until disabled.

    It covers what :func:`samebits.batch_invariant` covers, by the same rules, but in all threads: those of
    data-parallel workers, of autograd, and of ``generate_batch`` in ``transformers``. It also covers
    operators that are called from C++, and what activation checkpointing computes again. What is not
    covered costs nothing. While it is on, functions under ``torch.compile`` run eagerly
    (``torch.compiler.set_stance("force_eager")``), since compiled code has kernels of its own.

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
