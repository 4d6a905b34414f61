"""What is done with one call under the mode, in whichever form: run, written, reported."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samebits.mode.arguments import as_pytorch, takes, tensors_of, without_autocast
from samebits.mode.functions import NAMES
from samebits.mode.operators import name_of
from samebits.ops._operator import as_no_view
from samebits.remedies import see

__all__ = [
    "OnUncovered",
    "UncoveredError",
    "check_on_uncovered",
    "inexact",
    "into_out",
    "outermost",
    "report",
    "report_by_name",
    "returned",
    "state",
    "watched",
]

OnUncovered = Literal["warn", "error", "ignore"]


class UncoveredError(RuntimeError):
    """An operator was called whose rows may depend on the batch, under ``on_uncovered="error"``."""


class _State(threading.local):
    # Attributes of a thread-local object, because torch.compile reads and guards those.
    def __init__(self) -> None:
        self.on_uncovered: OnUncovered | None = None


state = _State()
"""``on_uncovered``: of the innermost context in this thread."""


class _Outermost:
    """What is done with calls that are not covered, in threads that have entered no context.

    Attributes:
        process: the switch of the process is on, and says this; None: it is off.
        context: of the context that was entered last. Autograd takes contexts to its threads.
    """

    process: OnUncovered | None = None
    context: OnUncovered = "warn"


outermost = _Outermost()
_warned: set[str] = set()


def check_on_uncovered(of: str, on_uncovered: OnUncovered) -> None:
    if on_uncovered not in ("warn", "error", "ignore"):
        raise ValueError(
            f'samebits.{of}: on_uncovered: expected "warn", "error" or "ignore", got {on_uncovered!r}'
        )


def watched(
    func: Callable[..., Any], replacement: Callable[..., Any], args: Any, named: dict[str, Any]
) -> Any:
    """Run `replacement`. A running audit sees it as one call of `func`."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "run_replacement"):
                return mode.run_replacement(func, replacement, args, named)
    return replacement(*args, **named)


def into_out(
    func: Callable[..., Any],
    replacement: Callable[..., Any],
    args: Any,
    named: dict[str, Any],
    sums: bool,
) -> Any:
    """Copy the result of the functional form into ``out``. PyTorch's checks and resizing of it apply.

    ``sums``: whether `func` computes in the dtype of ``out``.
    """
    out, rest = named["out"], {name: x for name, x in named.items() if name != "out"}
    if not takes(out):
        return NotImplemented
    if any(t.device != out.device for t in tensors_of((*args, *rest.values()))):
        return func(*args, **named)  # PyTorch raises its error
    shape = out.shape if torch.compiler.is_compiling() else _shape_of_out(func, args, named)
    if sums and rest.get("dtype") is None:
        rest["dtype"] = out.dtype
    with without_autocast(out.device):
        result = watched(func, replacement, args, rest)
    if result is NotImplemented:
        return result
    if out.shape != shape:
        out.resize_(shape)
    return out.copy_(result)


def _shape_of_out(func: Callable[..., Any], args: Any, named: dict[str, Any]) -> torch.Size:
    """The shape to which PyTorch resizes ``out``. It warns if ``out`` was not empty."""
    wanted: Tensor = as_pytorch(func, *args, **named)
    return wanted.shape


def returned(result: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """`result` as no view, like PyTorch's: a result made without gradients may be changed with some."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return result
    if isinstance(result, Tensor) and not result._is_view():
        return result
    return result if any(result is x for x in (*args, *named.values())) else as_no_view(result)


def report_by_name(what: str) -> None:
    """Report what is no operator, in this thread's mode."""
    report(what, outermost.process or outermost.context)


def report(func: Callable[..., Any] | str, outermost: OnUncovered) -> None:
    """Warn or raise, as the innermost context in this thread says, or else `outermost`."""
    what = state.on_uncovered or outermost
    if what == "ignore":
        return
    if isinstance(func, str):
        name = func
    elif isinstance(func, torch._ops.OpOverload):
        packet = func._schema.name.replace("::", ".")
        name = packet if name_of(func) == packet else f"{name_of(func)} ({packet})"
    else:
        name = NAMES.get(func) or str(func)
    message = (
        f"samebits.batch_invariant: {name} is not covered with these arguments: its results may depend on the"
        " batch" + see("uncovered-operators")
    )
    if what == "error":
        raise UncoveredError(message)
    if name not in _warned and not torch.compiler.is_compiling():
        _warned.add(name)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
            level, frame = level + 1, frame.f_back
        warnings.warn(message, RuntimeWarning, stacklevel=level)


_NOT_THE_CALLER = (str(Path(__file__).parent), torch._ops.__file__, torch.overrides.__file__)


def inexact(args: Sequence[Any]) -> bool:
    """Whether an argument is not an integer. Sums of integers have the same bits in any order."""
    return any(t.is_floating_point() or t.is_complex() or t.is_quantized for t in tensors_of(args))
