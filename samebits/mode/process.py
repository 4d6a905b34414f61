"""The mode for the whole process: PyTorch's dispatcher itself runs the replacements.

Kernels are registered for just the operators that have a rule (:mod:`samebits.mode.operators`), at the
autograd and the backend keys of CPU and CUDA: calls reach the latter under ``torch.inference_mode`` and from
within other operators. What has no rule runs as ever, at no cost. The kernels stay once they are registered,
since other threads may be running them; while the mode is off they call PyTorch's own.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import graph

from samebits.backends.replay import replayed
from samebits.mode.context import (
    OnUncovered,
    check_on_uncovered,
    inexact,
    into_out,
    report,
    returned,
    watched,
)
from samebits.mode.fp8_layers import cover
from samebits.mode.operators import Rule, operator_rules, outs
from samebits.ops._operator import EXTRAORDINARY, thread

__all__ = [
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]


class _Switch:
    """The state of the process.

    Attributes:
        on_uncovered: what is done with calls that are not covered; None: the mode is off.
        library: holds the registrations, if there are any.
        stance: what ``torch.compile`` did before.
        fast_path: whether transformer layers took their own before.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.on_uncovered: OnUncovered | None = None
        self.library: torch.library.Library | None = None
        self.stance: Any = None
        self.fast_path = True

    def set(self, on_uncovered: OnUncovered | None) -> OnUncovered | None:
        """Turn the mode on or, with None, off. Returns what was before."""
        with self.lock:
            before = self.on_uncovered
            if on_uncovered is not None and before is None:
                self.library = self.library or _registered()
                cover(is_batch_invariant_mode_enabled)
                # What has been compiled, and would be, has other kernels.
                self.stance = torch.compiler.set_stance("force_eager")
                # Transformer layers have kernels of their own, too.
                self.fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            elif on_uncovered is None and before is not None:
                if torch._dynamo.eval_frame._stance.stance == "force_eager":  # nobody has changed it since
                    self.stance.__exit__(None, None, None)
                torch.backends.mha.set_fastpath_enabled(self.fast_path)
            self.on_uncovered = on_uncovered
            return before


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
    return _switch.on_uncovered is not None


@contextmanager
def set_batch_invariant_mode(enabled: bool = True, on_uncovered: OnUncovered = "warn") -> Iterator[None]:
    """Enable the mode in the whole process, or disable it, and restore what was before at the end.

    Threads share it: contexts that overlap in several threads end with what the last to leave has found.

    Args:
        enabled: whether to enable it.
        on_uncovered: as in :func:`enable_batch_invariant_mode`.

    Raises:
        ValueError: as :func:`enable_batch_invariant_mode`.
    """
    check_on_uncovered("set_batch_invariant_mode", on_uncovered)
    before = _switch.set(on_uncovered if enabled else None)
    try:
        yield
    finally:
        _switch.set(before)


def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for op, rule in operator_rules().items():
            # All at first: a kernel for a backend takes the place of what others compose for autograd.
            own = {key: found for key in rule.keys if (found := _own(op, key))}
            for key in own:
                library.impl(op, _kernel(op, rule, key, own[key]), key, with_keyset=True)
    return library


_RUN_BACKWARD = graph._engine_run_backward.__code__


def _called_by_autograd() -> bool:
    """Whether autograd's engine has called the kernel that asks, and not Python code in a backward.

    The engine works below the call that started it, or in a thread of its own, without Python's frames.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    try:
        return sys._getframe(2).f_code is _RUN_BACKWARD
    except ValueError:
        return True


Kernel = Callable[..., Any]


def _own(op: OpOverload, key: str) -> Kernel | None:
    """PyTorch's kernel of an operator at a dispatch key, if there is one."""
    try:
        own: Kernel = torch.library.get_kernel(op, key).call_boxed
    except RuntimeError:
        return None
    tensors = [i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor" and not a.is_out]
    return _taking_numbers(own, tensors, bool(outs(op))) if len(tensors) > 1 else own


def _taking_numbers(own: Kernel, places: list[int], into_out: bool) -> Kernel:
    """The kernel, with numbers for tensors at `places`.

    PyTorch passes a number for a tensor as a tensor that does not take part in the promotion of types, and
    hands that to kernels in Python as a number. Nor does a tensor of no dimensions, of the right type, beside
    one that has some.
    """

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [i for i in places if i < len(args) and isinstance(args[i], (bool, int, float, complex))]
        if not numbers:
            return own(keys, *args, **kwargs)
        lead = next((args[i] for i in places if isinstance(args[i], Tensor)), None)
        if lead is None:
            return own(keys, *(torch.tensor(x) if i in numbers else x for i, x in enumerate(args)), **kwargs)
        alone = lead.ndim == 0 and not into_out
        wide = [x.view(1) if x is lead and alone else x for x in args]
        for i in numbers:
            kind = (
                torch.result_type(lead, args[i])
                if lead.ndim == 0 and into_out
                else _dtype_beside(lead, args[i])
            )
            wide[i] = torch.tensor(args[i], dtype=kind, device=lead.device)
        result = own(keys, *wide, **kwargs)
        return result.view(()) if alone else result

    return call


def _dtype_beside(lead: Tensor, number: complex) -> torch.dtype:
    """The dtype of a tensor that holds the number, and promotes `lead` as the number does."""
    if isinstance(number, (bool, int)):
        return torch.bool if isinstance(number, bool) else torch.int64
    exact = torch.float64 if isinstance(number, float) else torch.complex128
    same_kind = lead.is_complex() or (lead.is_floating_point() and exact == torch.float64)
    return exact if same_kind else torch.result_type(lead, number)


def _kernel(op: OpOverload, rule: Rule, key: str, own: Kernel) -> Kernel:
    """The kernel of an operator at a dispatch key. Its own cost is part of every covered call's."""
    below_autograd, has_out = not key.startswith("Autograd"), bool(outs(op))
    in_autograd = rule.in_autograd

    def run(replacement: Kernel, args: Any, kwargs: dict[str, Any]) -> Any:
        if has_out:
            return into_out(op, replacement, args, kwargs, rule.sums)
        result = watched(op, replacement, args, kwargs)
        return result if result is NotImplemented else returned(result, args, kwargs)

    def covered(*args: Any, **kwargs: Any) -> Any:
        return run(rule.replacement, args, kwargs)  # type: ignore[arg-type]

    returns_new = rule.replacement is not None and not op._schema.is_mutable
    call = replayed(covered, *EXTRAORDINARY) if returns_new else covered

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on_uncovered = _switch.on_uncovered
        if on_uncovered is None or thread.plain:
            return own(keys, *args, **kwargs)
        of_gradients = in_autograd is not None and _called_by_autograd()
        thread.plain = True
        try:
            if rule.replacement is not None:
                if of_gradients and in_autograd is not None:
                    result = run(in_autograd, args, kwargs)
                elif below_autograd and torch.is_grad_enabled():
                    with torch.no_grad():
                        result = call(*args, **kwargs)
                else:
                    result = call(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            if inexact((*args, *kwargs.values())) and not _called_by_autograd():
                report(op, on_uncovered)
            return own(keys, *args, **kwargs)
        finally:
            thread.plain = False

    return kernel
