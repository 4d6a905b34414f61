"""Activation checkpointing: what runs again in a backward runs in the forward's context, or in none.

PyTorch does so with the forward's autocast. This holds from the program's first context on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame  # the latter of the other form

__all__ = ["keep_contexts"]

Run = Callable[..., Any]
_lock = threading.Lock()
_done = False


def keep_contexts(within: Callable[[Run], Run]) -> None:
    """Let checkpoints run ``within(f)`` again in place of `f`. Asked while the forward runs."""
    global _done
    with _lock:
        if _done:
            return
        forward: Run = CheckpointFunction.forward
        init: Run = _CheckpointFrame.__init__

        @functools.wraps(forward)
        def reentrant(ctx: Any, run_function: Run, *args: Any) -> Any:
            results = forward(ctx, run_function, *args)
            ctx.run_function = within(run_function)
            return results

        @functools.wraps(init)
        def frame(self: Any, recompute_fn: Run, *args: Any, **kwargs: Any) -> None:
            init(self, within(recompute_fn), *args, **kwargs)

        CheckpointFunction.forward = staticmethod(reentrant)  # type: ignore[method-assign]
        _CheckpointFrame.__init__ = frame  # type: ignore[method-assign]
        _done = True
