"""The context where ``torch.compile`` traces it: a function mode, which the compiler knows.

It cannot trace a change of dispatch keys. It traces this mode's code, for each function that the program
calls; so what it compiles has this library's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from samebits.mode.calls import OnUncovered, inexact, into_out, report, returned, watched
from samebits.mode.functions import (
    ALIASES,
    BODIES,
    POWERS,
    REPLACEMENTS,
    SUMS,
    TAKE_OUT,
    UNCOVERED,
    UNTRACED,
    VIEWS,
    is_direct,
)
from samebits.mode.patches import ask_about

__all__ = ["Traced"]


def show_all_functions() -> None:
    """Let the compiler ask modes about all functions with rules. It asks about documented ones by itself.

    From then on it asks all modes of the process, a user's too, as PyTorch does where nothing is compiled.
    """
    ask_about(f for f in (*REPLACEMENTS, *UNCOVERED) if isinstance(f, BuiltinFunctionType))


show_all_functions._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it runs while it is traced


class Traced(TorchFunctionMode):
    def __init__(self, on_uncovered: OnUncovered) -> None:
        super().__init__()
        self.on_uncovered = on_uncovered

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.compile cannot look these up
            for operator in UNTRACED:
                if func is operator:
                    report(func, self.on_uncovered)
            return func(*args, **kwargs)
        replacement = REPLACEMENTS.get(func)
        for operator, power in POWERS:
            replacement = power if func is operator else replacement
        if replacement is not None:
            return self._replaced(func, replacement, args, kwargs)
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        if (func in UNCOVERED or is_direct(func)) and inexact((*args, *kwargs.values())):
            report(func, self.on_uncovered)
        return func(*args, **kwargs)

    def _replaced(
        self, func: Callable[..., Any], replacement: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        named = {ALIASES.get(k, k): x for k, x in kwargs.items() if k != "out" or x is not None}
        if "out" in named and func in TAKE_OUT:
            result = into_out(func, replacement, args, named, func in SUMS)
        else:
            result = watched(func, replacement, args, named)
        if result is not NotImplemented:
            return result if func in VIEWS else returned(result, args, named)
        if inexact((*args, *kwargs.values())):
            report(func, self.on_uncovered)
        return func(*args, **kwargs)
