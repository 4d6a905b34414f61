"""Checks and conversions of a call's arguments under ``samebits.batch_invariant``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from samebits.ops._checks import SUPPORTED

__all__ = ["as_pytorch", "keeps_operators", "records", "takes", "tensors_of", "without_autocast"]


def tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also those within tuples and lists."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from tensors_of(x)


def takes(*tensors: Any) -> bool:
    """Whether this library's operators take all of these: dense tensors of a supported dtype and device."""
    for t in tensors:  # a generator would take longer than the checks
        if type(t) not in _PLAIN and not (isinstance(t, Tensor) and keeps_operators(type(t))):
            return False
        if t.dtype not in SUPPORTED or t.layout is not torch.strided or t.is_nested:
            return False
        if not (t.is_cuda or t.is_cpu or t.is_meta):
            return False
    return True


_PLAIN = (Tensor, Parameter)


@functools.cache
def keeps_operators(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor changes neither functions nor operators, or belongs to the compiler."""

    def unbound(of: type[Tensor], name: str) -> Any:
        return getattr(getattr(of, name), "__func__", getattr(of, name))

    unchanged = unbound(Tensor, "__torch_function__"), torch._C._disabled_torch_function_impl
    dispatches = unbound(kind, "__torch_dispatch__") is not unbound(Tensor, "__torch_dispatch__")
    of_compiler = kind.__module__.startswith("torch._subclasses.")
    return unbound(kind, "__torch_function__") in unchanged and (not dispatches or of_compiler)


def records(x: Any) -> bool:
    """Whether autograd records a gradient of `x`, and this library can compute it."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad and takes(x)


def _on_meta(x: Any, made: dict[int, Tensor] | None, with_gradients: bool) -> Any:
    """`x` with meta tensors for its tensors: one for each, by its identity in `made` if that is given."""
    if isinstance(x, (tuple, list)):
        return type(x)(_on_meta(y, made, with_gradients) for y in x)
    if not isinstance(x, Tensor):
        return x
    if made is not None and id(x) in made:
        return made[id(x)]
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if with_gradients and x.requires_grad:
        found.requires_grad_()  # transforms forbid it, for False too
    if made is not None:
        made[id(x)] = found
    return found


def as_pytorch(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call PyTorch's `func` on meta tensors like these arguments. It returns a meta result, or raises.

    So PyTorch itself decides which shapes, dtypes and options it refuses, and which shape and dtype the
    result has.
    """
    # PyTorch refuses `out=` with gradients. Nothing else is saved, which activation checkpoints would count.
    made: dict[int, Tensor] | None = None if torch.compiler.is_compiling() else {}  # it knows no identities
    meta = functools.partial(_on_meta, made=made, with_gradients="out" in kwargs)
    tracing = torch.compiler.is_compiling()
    unseen = nullcontext() if tracing or not _len_torch_dispatch_stack() else _disable_current_modes()
    with torch._C.DisableTorchFunction(), unseen:  # no mode is to count the question as a call
        return func(*map(meta, args), **{name: meta(x) for name, x in kwargs.items()})


def without_autocast(device: torch.device) -> Any:
    """Autocast off: PyTorch does not apply it to calls with ``out=`` or in place."""
    if device.type == "meta":  # it has none
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
