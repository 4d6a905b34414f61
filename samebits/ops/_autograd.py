"""How autograd records an operator, and what surrounds that: the thread's modes, and plans."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from samebits.backends.modes import CONTEXT, include, includes
from samebits.backends.replay import replayed
from samebits.backends.trace import picking


class _Thread(threading.local):
    plain = False


thread = _Thread()
"""``plain``: whether PyTorch's operators are its own in this thread, whatever the process has switched on."""


def plainly(run: Callable[..., Any], part: int | None = None) -> Callable[..., Any]:
    """`run`, or one part of what it returns, with the mode off in either form."""

    def call(*args: Any) -> Any:
        before, inside = thread.plain, includes(CONTEXT)
        try:
            thread.plain = True
            include(CONTEXT, False)
            result = run(*args)
        finally:
            thread.plain = before
            include(CONTEXT, inside)
        return result if part is None else result[part]

    return call


def without_modes(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that calls ``gradients(ctx, saved, *grads)`` with function modes and the mode off.

    They cost microseconds in each call of PyTorch's functions. The saved tensors `saved` are read before
    they are off: activation checkpointing then runs the forward again, which must see them.
    """
    run = alone(gradients)

    @functools.wraps(gradients)
    def backward(ctx: Any, *grads: Any) -> Any:
        return run(ctx, ctx.saved_tensors, *grads)

    return backward


def alone(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """`gradients`, with function modes and the mode off."""

    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # which can read no keys, and takes the modes along
            return gradients(*args)
        before, inside = thread.plain, includes(CONTEXT)
        try:
            thread.plain = True
            include(CONTEXT, False)
            with torch._C.DisableTorchFunction():
                return gradients(*args)
        finally:
            thread.plain = before
            include(CONTEXT, inside)

    return run


def recorded(
    run: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`run`, recorded by autograd."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            setup_context(ctx, args, output)
            return output

    Recorded.backward = staticmethod(backward)  # type: ignore[method-assign]
    return _apply(Recorded)


def _apply(function: Any) -> Callable[..., Any]:
    """Its ``apply``, which would check for transforms once more."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return found


class _Noted(SimpleNamespace):
    """In place of a context, notes what ``setup_context`` does. Its public attributes are what that sets."""

    _saved: tuple[Tensor | None, ...] = ()
    _fills = True  # missing gradients with zeros

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._saved = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._fills = value

    def mark_non_differentiable(self, *_: Tensor) -> None:
        """Plans do not return such results."""

    def constants(self) -> dict[str, Any] | None:
        """The attributes, if a replay's key can have them."""
        found = {name: x for name, x in vars(self).items() if not name.startswith("_")}
        return found if all(map(_is_constant, found.values())) else None

    def picks(self, tensors: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
        """Of such `tensors`, those to save. None: it saves others."""
        places = [next((i for i, t in enumerate(tensors) if t is x), -1) for x in self._saved]
        return None if -1 in places else picking(places)


def _is_constant(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_constant, x))
    return x is None or isinstance(x, (bool, int, float, str, torch.dtype))


def planned(
    gradients: Callable[..., Any],
    setup_context: Callable[..., None],
    otherwise: Callable[..., Any],
    unless: str = "",
) -> Callable[..., Callable[..., Any]]:
    """``plan(recipe, part)``: a function that replays `recipe`, recorded by autograd.

    With `part`, which is 0, it returns the first of the results alone. Autograd wraps each result, and fills
    a backward's missing gradients with zeros, which are launches. The gradients are a function of the first
    one then. What else they need is saved, as ever.

    All calls of a plan are of one kind. So the first shows which tensors `setup_context` saves, and what else
    it notes. The backward is then a function of tensors and constants, and is replayed, too.

    Args:
        gradients, setup_context: of the operator.
        otherwise: runs instead, where a recipe returns NotImplemented.
        unless: an attribute that `setup_context` sets. Where it is true, backwards are not replayed.
    """

    @alone
    def run(names: str, *given: Any) -> Any:
        count = len(attributes := names.split())
        constants = SimpleNamespace(**dict(zip(attributes, given[:count], strict=True)))
        return gradients(constants, given[count + 1 :], given[count])

    # Not second derivatives. Gradients may be views: autograd has nothing to know of them.
    replay = replayed(run, torch.is_grad_enabled, public=True, views=True)
    ordinary = without_modes(gradients)

    def plan(recipe: Callable[..., Any], part: int | None) -> Callable[..., Any]:
        def first(ctx: Any, *args: Any) -> Any:
            output = recipe(*args)
            if output is NotImplemented:
                output = otherwise(*args)
            setup_context(ctx, args, output)
            if part is not None or not isinstance(output, tuple):  # of one gradient
                noted = _Noted(needs_input_grad=ctx.needs_input_grad)
                setup_context(noted, args, output)
                results = (output,) if part is None else output
                constants, saved = noted.constants(), noted.picks((*args, *results, None))
                if constants is not None and saved is not None and not constants.get(unless):
                    Recorded.backward = staticmethod(backward(" ".join(constants), *constants.values()))
                    # The engine calls this. PyTorch's looks for the backward in each call.
                    Recorded._backward_cls.apply = Recorded.backward  # type: ignore[attr-defined]
                    # Last: another thread may be between a forward and its backward. Both save the same.
                    Recorded.forward = staticmethod(further(saved, noted._fills))
            return output if part is None else output[part]

        def further(saved: Callable[..., Any], fills: bool) -> Callable[..., Any]:
            def forward(ctx: Any, *args: Any) -> Any:
                output = recipe(*args)
                if output is NotImplemented:
                    output = otherwise(*args)
                results = (output,) if part is None else output
                ctx.save_for_backward(*saved((*args, *results, None)))
                if not fills:
                    ctx.set_materialize_grads(False)
                return results[0]

            return forward

        def backward(*constants: Any) -> Callable[..., Any]:
            def run_backward(ctx: Any, grad: Any) -> Any:
                call = run if torch.compiler.is_compiling() else replay
                return call(*constants, grad, *ctx.saved_tensors)

            return run_backward

        class Recorded(torch.autograd.Function):
            forward: Any = staticmethod(first)
            backward: Any = staticmethod(ordinary)

        return _apply(Recorded)

    return plan
