"""Operators in the ``torch.library`` namespace ``samebits``, with a fast path around PyTorch's dispatcher."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad, profiler

from samebits.backends import same_shape
from samebits.backends.modes import sees_calls
from samebits.backends.replay import here, replayed, traced, viewed
from samebits.ops._autograd import plainly, planned, recorded, without_modes
from samebits.remedies import see

library = torch.library.Library("samebits", "DEF")


class Operator:
    """An operator that is registered with PyTorch, and can be called without its dispatcher.

    Dispatch has as much CPU overhead as a small product. So a call goes straight to ``cpu`` or ``cuda``, and
    autograd records it if a gradient may be asked for. A call does so only where the dispatcher would do no
    more: with ordinary tensors, outside of ``torch.compile`` and of every mode, transform, trace and profile.

    Args:
        schema: name, arguments and results, as ``torch.library`` spells them.
        cpu, fake: implementations for the CPU, and for tensors without data.
        cuda: implementation for CUDA devices. None: `cpu` is for both.
        replays: whether calls are replayed. A replay does not check what is written in place, nor tell
            autograd: where the schema has such tensors, the caller must. None: where it has none.
    """

    __slots__ = ("_call", "_cpu", "_cuda", "_plan", "_quick", "_recorded", "_registered")

    def __init__(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        cuda: Callable[..., Any] | None = None,
        fake: Callable[..., Any],
        replays: bool | None = None,
    ) -> None:
        replays = "!" not in schema if replays is None else replays
        cpu, cuda = returning_no_views(cpu), returning_no_views(cuda or cpu)
        # All take any strides. Inductor else copies what it computes, once for each operator that takes it.
        layout = () if "!" in schema else (torch.Tag.flexible_layout,)
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *layout))
        name = schema.partition("(")[0]
        library.impl(name, cpu, "CPU")
        library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"samebits::{name}", fake, lib=library)
        self._registered = getattr(torch.ops.samebits, name).default
        self._cuda = replayed(cuda) if replays else cuda
        self._cpu, self._recorded = cpu, self._registered
        self._plan: Callable[..., Callable[..., Any]] | None = None
        self._call = replayed(self._dispatched, public=True) if replays else self._dispatched
        self._quick: torch.library.Library | None = None
        self._shorten_dispatch()

    def register_autograd(
        self, gradients: Callable[..., Any], *, setup_context: Callable[..., None], unless: str = ""
    ) -> None:
        """As :func:`torch.library.register_autograd`, with gradients as :func:`without_modes` takes them.

        ``unless``: an attribute that `setup_context` sets. Where it is true, gradients call functions of
        PyTorch's that compute, so that no backward can be replayed.
        """
        backward = without_modes(gradients)
        torch.library.register_autograd(self._registered, backward, setup_context=setup_context, lib=library)
        self._recorded = recorded(self._run, setup_context, backward)
        self._plan = planned(gradients, setup_context, plainly(self._run), unless)
        self._shorten_dispatch()

    def _shorten_dispatch(self) -> None:
        """Calls without gradients end at autograd's key, where nothing but the kernel would follow.

        Compiled code makes such calls. Its way through autograd would take longer than many kernels, and the
        kernel is not replayed behind it.
        """
        if self._registered._schema.is_mutable:  # autograd is told what changes
            return
        if self._quick is not None:
            self._quick._destroy()
        self._quick = torch.library.Library("samebits", "IMPL")
        for backend in (DispatchKey.CPU, DispatchKey.CUDA):
            autograd = f"Autograd{backend.name}"
            own = torch.library.get_kernel(self._registered, autograd).call_boxed
            kernel = functools.partial(self._shortened, own, backend)
            self._quick.impl(self._registered, kernel, autograd, with_keyset=True)

    def _shortened(
        self, own: Callable[..., Any], backend: DispatchKey, keys: DispatchKeySet, *args: Any
    ) -> Any:
        if (
            torch.is_grad_enabled()
            or (keys & _BELOW_AUTOGRAD).highestPriorityTypeId() != backend
            or forward_ad._current_level >= 0
            or here.trace is not None
        ):
            return own(keys, *args)
        return self._run(*args)

    def __call__(self, *args: Any, bypass: bool = False) -> Any:
        """Run on the schema's arguments. ``bypass``: :func:`bypasses_dispatcher` is known to hold."""
        if bypass and (self._plan is None or not torch.is_grad_enabled()):  # else there may be a plan
            return self._past_dispatcher(*args)
        if torch.compiler.is_compiling():
            if forward_ad._current_level >= 0:
                self._refuse_tangents()  # a graph has none
            return self._registered(*args)
        return self._call(*args) if here.trace is None else self._dispatched(*args)

    def _dispatched(self, *args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
            isinstance(t, Tensor) and t.is_floating_point() and has_tangent(t) for t in args
        ):
            self._refuse_tangents()  # PyTorch would run the operator, and give its result none
        if not bypasses_dispatcher([t for t in args if isinstance(t, Tensor)]):
            return self._registered(*args)
        return self._past_dispatcher(*args)

    def _refuse_tangents(self) -> NoReturn:
        name = self._registered.name().replace("::", ".")
        raise NotImplementedError(
            f"torch.ops.{name}: forward-mode derivatives are not implemented, backward ones are"
            + see("derivatives")
        )

    def _past_dispatcher(self, *args: Any) -> Any:
        run = self._run
        if torch.is_grad_enabled():
            for t in args:
                if isinstance(t, Tensor) and t.requires_grad:
                    run = self._recorded
                    break
        return run(*args) if here.trace is None else traced(run, args, functools.partial(self._planned, run))

    def _planned(
        self, run: Callable[..., Any], args: tuple[Any, ...], part: int | None
    ) -> Callable[..., Any]:
        """What plans call in place of `run`. See :func:`traced`."""
        find = getattr(self._cuda, "recipe", None)  # None: it is not replayed
        if self._plan is not None and run is self._recorded and find is not None and not part:
            recipe = find(*args)
            if recipe is not None:
                return self._plan(recipe, part)
        return plainly(run, part)

    def _run(self, *args: Any) -> Any:
        lead = args[0] if args[0] is not None else args[1]
        return (self._cuda if lead.is_cuda else self._cpu)(*args)


_BELOW_AUTOGRAD: DispatchKeySet = torch._C._after_autograd_keyset
_AUTOGRAD = DispatchKey.__members__["AutogradFunctionality"]


def has_tangent(t: Tensor) -> bool:
    """Whether the tensor carries a forward-mode derivative."""
    if forward_ad._current_level < 0 or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False  # the latter within an operator of PyTorch's, which has computed it
    try:
        return forward_ad.unpack_dual(t).tangent is not None
    except RuntimeError:  # vmap cannot tell
        return True


def as_no_view(result: Any) -> Any:
    """`result`, or for a view a new tensor on the same memory, which autograd lets be changed in place."""
    return result.detach() if isinstance(result, Tensor) and result._is_view() else result


def returning_no_views(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with results that are no views. Autograd does not allow changes of such views in place."""

    @functools.wraps(run)
    def without_views(*args: Any) -> Any:
        results = run(*args)
        return tuple(map(as_no_view, results)) if isinstance(results, tuple) else as_no_view(results)

    return without_views


def reshaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A fresh result in another shape. It is no view where gradients are off (see :func:`as_no_view`)."""
    if same_shape(result.shape, shape):
        return result
    found = viewed(result, Tensor.reshape, tuple(shape))
    return found if torch.is_grad_enabled() else as_no_view(found)


def refuse_second_derivatives(op: str) -> None:
    """Raise in a backward under ``create_graph``: only then are gradients enabled there."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"samebits.{op}: second derivatives (create_graph) are not implemented" + see("derivatives")
        )


def refuse_third_derivatives(op: str) -> None:
    """As :func:`refuse_second_derivatives`, in the backward of a gradient."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"samebits.{op}: third derivatives (create_graph in a second backward) are not implemented"
        )


_DENSE_TYPES = (Tensor, torch.nn.Parameter)


def _dispatch_keys(*names: str) -> int:
    keys = (DispatchKeySet(DispatchKey.__members__[name]) for name in names)
    return functools.reduce(operator.or_, keys).raw_repr()


# The keys of dense tensors with data that are not wrapped, conjugated or negated. In inference mode tensors
# have fewer keys.
_DENSE_KEYS = frozenset(
    _dispatch_keys(device, f"Autocast{device}", *more)
    for device in ("CPU", "CUDA")
    for more in ((), (f"Autograd{device}", "ADInplaceOrView"))
)


def bypasses_dispatcher(tensors: Sequence[Tensor]) -> bool:
    """Whether the dispatcher would only record autograd's graph for these tensors and call a kernel."""
    if torch.compiler.is_compiling() or (
        torch._C._len_torch_dispatch_stack() > (here.recording is not None)  # its own mode only watches
        or sees_calls()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    ):
        return False
    for t in tensors:
        if type(t) not in _DENSE_TYPES or torch._C._dispatch_keys(t).raw_repr() not in _DENSE_KEYS:
            return False
    return True


def transform() -> Any:
    """The kind of the innermost active ``torch.func`` transform, if any."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key()
