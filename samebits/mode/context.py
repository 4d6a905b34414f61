"""The context ``samebits.batch_invariant``: within it, PyTorch's functions run this library's operators."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samebits.backends.modes import OwnMode
from samebits.backends.replay import replayed
from samebits.mode.arguments import as_pytorch, takes, tensors_of, without_autocast
from samebits.mode.fp8_layers import cover
from samebits.mode.indexing import picks
from samebits.mode.rules import (
    ALIASES,
    BODIES,
    ELEMENTWISE,
    HIGHER_ORDER,
    NAMES,
    POWERS,
    REPLACEMENTS,
    REPLAYED,
    SUMS,
    TAKE_OUT,
    UNCOVERED,
    VIEWS,
    is_direct,
)
from samebits.ops._operator import EXTRAORDINARY, as_no_view

__all__ = [
    "UncoveredError",
    "batch_invariant",
    "check_on_uncovered",
    "inexact",
    "into_out",
    "report",
    "returned",
    "watched",
]

OnUncovered = Literal["warn", "error", "ignore"]


class UncoveredError(RuntimeError):
    """An operator was called whose rows may depend on the batch, under ``on_uncovered="error"``."""


class _State(threading.local):
    # Attributes of a thread-local object, because torch.compile reads and guards those.
    def __init__(self) -> None:
        self.on_uncovered: OnUncovered | None = None
        self.outermost: OnUncovered = "warn"  # of the mode that sees a call, also in autograd's threads


_state = _State()
_warned: set[str] = set()
_untouched: set[Callable[..., Any]] = set()  # functions that were called and that the mode leaves alone
_MOST_UNTOUCHED = 4096  # more would be made as the program runs


def batch_invariant(on_uncovered: OnUncovered = "warn") -> AbstractContextManager[None]:
    """A context, or a decorator, under which PyTorch's own functions give the bits of this library's.

    It covers products (``mm``, ``bmm``, ``matmul``, ``@``, ``addmm``, ``baddbmm``, ``mv``, ``dot``,
    ``einsum``, ``F.linear``), ``softmax``, ``log_softmax``, ``F.cross_entropy``, ``F.layer_norm``,
    ``F.rms_norm``, ``sum``, ``mean``, ``F.embedding`` and ``F.scaled_dot_product_attention``. It also covers
    broadcasting in sums and products, because of its gradient. ``docs/mode.md`` has the whole list, and the
    arguments that are covered. A covered call also has this library's gradient, wherever the backward runs.

    The context acts on calls from Python in this thread, in functions and modules of any kind. Nothing
    changes for other threads, or afterwards. Contexts may be nested; the innermost ``on_uncovered`` counts.
    Do not ``await`` or ``yield`` inside, and do not decorate a function that does. Activation checkpointing
    runs the forward again in the backward, so enter the context around the backward too. Under
    ``torch.compile``, what is traced inside the context is covered. "Limits" in ``README.md`` says what may
    still change bits.

    Args:
        on_uncovered: what to do when an operator is called that is not covered, and whose rows are known to
            depend on the batch: ``"warn"`` once for each operator, ``"error"`` (an :class:`UncoveredError`),
            or ``"ignore"``.

    Raises:
        ValueError: ``on_uncovered`` is none of these.
    """
    check_on_uncovered("batch_invariant", on_uncovered)
    return _context(on_uncovered)


def check_on_uncovered(of: str, on_uncovered: OnUncovered) -> None:
    if on_uncovered not in ("warn", "error", "ignore"):
        raise ValueError(
            f'samebits.{of}: on_uncovered: expected "warn", "error" or "ignore", got {on_uncovered!r}'
        )


@contextmanager
def _context(on_uncovered: OnUncovered) -> Iterator[None]:
    if not torch.compiler.is_compiling():
        cover(_sees_calls)
    before = _state.on_uncovered
    _state.on_uncovered = on_uncovered
    try:
        # An outer context's mode does not see calls within an operator that it called.
        with nullcontext() if before is not None and _sees_calls() else _Mode(on_uncovered):
            yield
    finally:
        _state.on_uncovered = before


def _sees_calls() -> bool:
    """Whether the mode is on in this thread, which may be one of autograd's."""
    if torch.compiler.is_compiling():
        return _state.on_uncovered is not None
    return any(isinstance(mode, _Mode) for mode in _get_current_function_mode_stack())


class _Mode(OwnMode):
    def __init__(self, on_uncovered: OnUncovered) -> None:
        super().__init__()
        self.on_uncovered = on_uncovered  # for autograd's threads, which get this mode but not `_state`

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return self._overridden(func, args, kwargs)
        if func in _untouched or (func in _ELEMENTWISE and _as_ever(args, kwargs)):
            return func(*args, **kwargs)
        if func is _GETITEM and not picks(*args):
            return func(*args)
        if func in REPLAYED:
            _state.outermost = self.on_uncovered
            return _replayed(func)(*args, **kwargs)
        return self._overridden(func, args, kwargs)

    def _overridden(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.compile cannot look these up
            for operator in HIGHER_ORDER:
                if func is operator:
                    report(func, self.on_uncovered)
            return func(*args, **kwargs)
        replacement = REPLACEMENTS.get(func)
        for operator, power in POWERS:
            replacement = power if func is operator else replacement
        if replacement is not None:
            return _replaced(func, replacement, args, kwargs, self.on_uncovered)
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        if func in UNCOVERED or is_direct(func):
            if inexact((*args, *kwargs.values())):
                report(func, self.on_uncovered)
        elif not torch.compiler.is_compiling() and len(_untouched) < _MOST_UNTOUCHED:
            _untouched.add(func)
        return func(*args, **kwargs)


def _replaced(
    func: Callable[..., Any],
    replacement: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    on_uncovered: OnUncovered,
) -> Any:
    named = {ALIASES.get(k, k): x for k, x in kwargs.items() if k != "out" or x is not None}
    if "out" in named and func in TAKE_OUT:
        result = into_out(func, replacement, args, named, func in SUMS)
    else:
        result = watched(func, replacement, args, named)
    if result is not NotImplemented:
        return result if func in VIEWS else returned(result, args, named)
    if inexact((*args, *kwargs.values())):
        report(func, on_uncovered)
    return func(*args, **kwargs)


_GETITEM = Tensor.__getitem__
_ELEMENTWISE = frozenset((*ELEMENTWISE, *(func for func, _ in POWERS)))


def _as_ever(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an elementwise function of PyTorch's has the bits, and the gradients, of its replacement."""
    if kwargs and any(isinstance(x, Tensor) for x in kwargs.values()):
        return False
    lead = args[0] if args else None
    if not isinstance(lead, Tensor) or not lead.is_cuda:
        return False
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return True
    return args[1].is_cuda and (not torch.is_grad_enabled() or args[1].shape == lead.shape)


@functools.cache
def _replayed(func: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `func`, whose calls without gradients are replayed on GPUs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return _replaced(func, REPLACEMENTS[func], args, kwargs, _state.outermost)

    return replayed(run, *EXTRAORDINARY)


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
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return result
    if isinstance(result, Tensor) and not result._is_view():
        return result
    return result if any(result is x for x in (*args, *named.values())) else as_no_view(result)


def report(func: Callable[..., Any], outermost: OnUncovered) -> None:
    """Warn or raise, as the innermost context in this thread says, or else `outermost`."""
    what = _state.on_uncovered or outermost
    if what == "ignore":
        return
    name = NAMES.get(func) or str(func)
    message = (
        f"samebits.batch_invariant: {name} is not covered with these arguments: its results may depend on the"
        " batch (docs/mode.md lists what is covered)"
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
    return any(t.is_floating_point() or t.is_complex() for t in tensors_of(args))
