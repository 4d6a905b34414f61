"""What the mode asks of the arguments of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samebits.ops._checks import SUPPORTED

__all__ = ["as_pytorch", "records", "takes", "tensors_of", "without_autocast"]


def tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from tensors_of(x)


def takes(*tensors: Any) -> bool:
    return all(
        isinstance(t, Tensor)
        and (type(t) in (Tensor, Parameter) or _keeps_operators(type(t)))
        and t.dtype in SUPPORTED
        and t.layout == torch.strided
        and t.device.type in ("cpu", "cuda", "meta")
        and not t.is_nested
        for t in tensors
    )


@functools.cache
def _keeps_operators(kind: type[Tensor]) -> bool:
    """Whether a subclass leaves functions and operators as they are, or is one of the compiler's."""

    def own(of: type[Tensor], name: str) -> Any:
        return getattr(getattr(of, name), "__func__", getattr(of, name))

    functions = own(Tensor, "__torch_function__"), torch._C._disabled_torch_function_impl
    dispatches = own(kind, "__torch_dispatch__") is not own(Tensor, "__torch_dispatch__")
    ours = not dispatches or kind.__module__.startswith("torch._subclasses.")
    return own(kind, "__torch_function__") in functions and ours


def records(x: Any) -> bool:
    """Whether a gradient of `x` is recorded that this library can compute."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad and takes(x)


def as_pytorch(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `func` of PyTorch makes of tensors without data like these: a result, or its own error.

    So PyTorch itself says which shapes, dtypes and options it refuses, and what shape and dtype a result has.
    """
    made: dict[int, Tensor] = {}

    def like(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(like(y) for y in x)
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            made[id(x)] = empty.requires_grad_(x.requires_grad)
        return made[id(x)]

    with torch._C.DisableTorchFunction():
        return func(*map(like, args), **{name: like(x) for name, x in kwargs.items()})


def without_autocast(device: torch.device) -> Any:
    """PyTorch's autocast leaves calls with ``out=`` and in place alone."""
    return torch.autocast(device.type, enabled=False)
