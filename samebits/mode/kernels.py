"""Kernels of PyTorch's dispatcher for the operators that have a rule, in both forms of the mode.

The context's are at a key that is included in its thread alone (:data:`samebits.backends.modes.CONTEXT`).
So what has no rule runs as ever, at no cost. Elementwise functions have a rule for CPU tensors alone: beside
a GPU, whose tensors must not pay for it, they are at the CPU's own keys, where the process's are too. Steps
of optimizers stay at the context's, which comes before what DTensor does.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from samebits.backends.modes import CONTEXT, NAMES, RECORDED, include, includes, untraced
from samebits.backends.replay import replayed
from samebits.mode.calls import OnUncovered, inexact, into_out, outermost, report, returned, watched
from samebits.mode.functions import HIGHER_ORDER
from samebits.mode.operators import OperatorRule, operator_rules, outs
from samebits.mode.patches import called_by_engine, install
from samebits.mode.recorded import was_recorded
from samebits.ops._autograd import thread

__all__ = ["register_context", "register_process"]

Kernel = Callable[..., Any]


class _Libraries:
    """A ``torch.library.Library`` for each namespace of the operators that get a kernel."""

    def __init__(self) -> None:
        self._of: dict[str, torch.library.Library] = {}

    def impl(self, op: OpOverload, kernel: Kernel, key: str, **options: Any) -> None:
        if op.namespace not in self._of:
            self._of[op.namespace] = torch.library.Library(op.namespace, "IMPL")
        self._of[op.namespace].impl(op, kernel, key, **options)

    def destroy(self) -> None:
        for library in self._of.values():
            library._destroy()


_lock = threading.Lock()
_libraries: dict[str, _Libraries] = {}  # they hold the registrations


def register_context() -> None:
    """Register the kernels of contexts, once."""
    if "context" not in _libraries:
        with _lock:
            if "context" not in _libraries:
                install()
                _libraries["context"] = _context_kernels()


def register_process() -> None:
    """Register the kernels of the process, once."""
    with _lock:
        if "process" not in _libraries:
            install()
            _on_cpus()
            found = {op: r for op, r in operator_rules().items() if not _of_cpus(r)}
            _libraries["process"] = _whole(lambda library: _at_backends(library, found))


def _on_cpus() -> None:
    if "cpu" not in _libraries:
        found = {op: r for op, r in operator_rules().items() if _of_cpus(r)}
        _libraries["cpu"] = _whole(lambda library: _at_backends(library, found))


def _whole(register: Callable[[_Libraries], None]) -> _Libraries:
    """Libraries with all that `register` registers, or an exception and none of it: it takes seconds."""
    libraries = _Libraries()
    try:
        register(libraries)
    except BaseException:
        libraries.destroy()
        raise
    return libraries


def _beside_a_gpu() -> bool:
    return torch.cuda.is_available()


def _of_cpus(rule: OperatorRule) -> bool:
    return "CPU" in rule.keys and "CUDA" not in rule.keys


def _takes_lists(op: OpOverload) -> bool:
    return any(str(a.type) == "List[Tensor]" for a in op._schema.arguments)


def _at_backends(library: _Libraries, found: dict[OpOverload, OperatorRule]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        # All at first: a kernel for a backend takes the place of what others compose for autograd.
        own = {(op, key): k for op, rule in found.items() for key in rule.keys if (k := _own(op, key))}
        for (op, key), kernel in own.items():
            rule = found[op]
            plain = rule.replacement is not None and rule.in_autograd is None and not _of_cpus(rule)
            at = _above_autograd if plain and key.startswith("Autograd") else _at_backend
            library.impl(op, at(op, rule, key, kernel), key, with_keyset=True)


def _context_kernels() -> _Libraries:
    if _beside_a_gpu():
        _on_cpus()
    library = _whole(_in_contexts)
    for higher in HIGHER_ORDER:
        higher.py_impl(CONTEXT)(_higher_order(higher))
    return library


def _in_contexts(library: _Libraries) -> None:
    for op, rule in operator_rules().items():
        if "cpu" not in _libraries or not _of_cpus(rule) or _takes_lists(op):
            library.impl(op, _in_context(op, rule), NAMES[CONTEXT])
        if rule.of_gradients:
            library.impl(op, _in_backward(op, rule), NAMES[RECORDED])


def _running(op: OpOverload, rule: OperatorRule) -> Kernel:
    """``run(replacement, args, kwargs)``, as a call of `op`."""
    has_out = bool(outs(op))

    def run(replacement: Kernel, args: Any, kwargs: dict[str, Any]) -> Any:
        if has_out:
            return into_out(op, replacement, args, kwargs, rule.sums)
        result = watched(op, replacement, args, kwargs)
        return result if result is NotImplemented else returned(result, args, kwargs)

    return run


def _covered(op: OpOverload, rule: OperatorRule) -> Kernel:
    """Its replacement."""
    run = _running(op, rule)

    def covered(*args: Any, **kwargs: Any) -> Any:
        return run(rule.replacement, args, kwargs)

    return covered


def _replayed(op: OpOverload, rule: OperatorRule, call: Kernel, *questions: Callable[[], Any]) -> Kernel:
    """`call`, whose calls on GPUs are replayed if the replacement returns a new tensor."""
    returns_new = rule.replacement is not None and not op._schema.is_mutable
    return replayed(call, *questions, public=True) if returns_new else call


def _answering(op: OpOverload, rule: OperatorRule, call: Kernel) -> Kernel:
    """This library's answer to a call of `op`. NotImplemented: PyTorch is to run it, and it was reported."""
    in_autograd, run = rule.in_autograd, _running(op, rule)

    def answer(args: Any, kwargs: dict[str, Any], on_uncovered: OnUncovered) -> Any:
        if rule.replacement is not None:
            if in_autograd is not None and called_by_engine(3):
                result = run(in_autograd, args, kwargs)
            else:
                result = call(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if inexact((*args, *kwargs.values())) and not called_by_engine(3):
            report(op, on_uncovered)
        return NotImplemented

    return answer


def _in_context(op: OpOverload, rule: OperatorRule) -> Kernel:
    """The kernel in contexts. What it calls is PyTorch's own. A replay of it runs no Python at all."""
    # Autograd may be who calls, in a backward:
    by_caller = () if rule.in_autograd is None else (torch._C._current_graph_task_id,)
    answer = _answering(op, rule, _covered(op, rule))

    @untraced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        before = thread.plain
        try:
            include(CONTEXT, False)
            thread.plain = True
            result = answer(args, kwargs, outermost.context)
            return op(*args, **kwargs) if result is NotImplemented else result
        finally:
            thread.plain = before
            include(CONTEXT, True)

    return _replayed(op, rule, kernel, *by_caller)


def _in_backward(op: OpOverload, rule: OperatorRule) -> Kernel:
    """The kernel in backwards outside of contexts."""
    answer = _answering(op, rule, _replayed(op, rule, _covered(op, rule)))

    @untraced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            include(RECORDED, False)
            result = NotImplemented
            if called_by_engine(2) and was_recorded():
                result = answer(args, kwargs, "ignore")
            return op(*args, **kwargs) if result is NotImplemented else result
        finally:
            include(RECORDED, True)

    return kernel


def _at_backend(op: OpOverload, rule: OperatorRule, key: str, own: Kernel) -> Kernel:
    """The kernel at a key that all threads have. It calls PyTorch's own where no mode is on."""
    below_autograd, of_cpus = not key.startswith("Autograd"), _of_cpus(rule)
    answer = _answering(op, rule, _replayed(op, rule, _covered(op, rule)))

    @untraced
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        included = _included() if of_cpus else None
        on_uncovered = outermost.process if included is None else outermost.context
        if on_uncovered is None or thread.plain:
            return own(keys, *args, **kwargs)
        try:
            thread.plain = True
            if included is not None:
                include(included, False)
            if below_autograd and torch.is_grad_enabled():
                with torch.no_grad():
                    result = answer(args, kwargs, on_uncovered)
            else:
                result = answer(args, kwargs, on_uncovered)
            return own(keys, *args, **kwargs) if result is NotImplemented else result
        finally:
            thread.plain = False
            if included is not None:
                include(included, True)

    return kernel


def _above_autograd(op: OpOverload, rule: OperatorRule, key: str, own: Kernel) -> Kernel:
    """As :func:`_at_backend`, where a call's arguments decide the result. A replay changes no modes."""
    call = _covered(op, rule)

    @untraced
    def plainly(*args: Any, **kwargs: Any) -> Any:
        try:
            thread.plain = True
            return call(*args, **kwargs)
        finally:
            thread.plain = False

    replay = _replayed(op, rule, plainly)

    @untraced
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on_uncovered = outermost.process
        if on_uncovered is None or thread.plain:
            return own(keys, *args, **kwargs)
        result = replay(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if inexact((*args, *kwargs.values())) and not called_by_engine(2):
            report(op, on_uncovered)
        thread.plain = True
        try:
            return own(keys, *args, **kwargs)
        finally:
            thread.plain = False

    return kernel


def _included() -> Any:
    """The key by which this thread is in a context, or in a backward of what a context recorded."""
    if includes(CONTEXT):
        return CONTEXT
    return RECORDED if includes(RECORDED) and was_recorded() else None


def _higher_order(op: Any) -> Kernel:
    """The kernel in contexts of an operator that takes functions: it is reported."""

    @untraced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            include(CONTEXT, False)
            report(op, outermost.context)
            return op(*args, **kwargs)
        finally:
            include(CONTEXT, True)

    return kernel


def _own(op: OpOverload, key: str) -> Kernel | None:
    """PyTorch's kernel of an operator at a dispatch key, if there is one."""
    try:
        own: Kernel = torch.library.get_kernel(op, key).call_boxed
    except RuntimeError:
        return None
    tensors = [i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor" and not a.is_out]
    return _taking_numbers(own, tensors, bool(outs(op))) if len(tensors) > 1 else own


_NUMBERS = {bool, int, float, complex}


def _taking_numbers(own: Kernel, places: list[int], into_out: bool) -> Kernel:
    """The kernel, with numbers for tensors at `places`.

    PyTorch passes a number for a tensor as a tensor that does not take part in the promotion of types, and
    hands that to kernels in Python as a number. Nor does a tensor of no dimensions, of the right type, beside
    one that has some.
    """

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [i for i in places if i < len(args) and type(args[i]) in _NUMBERS]
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
