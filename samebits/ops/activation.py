"""Activations alone, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.ops._fused import backend, check_tensors
from samebits.ops._operator import Operator, refuse_third_derivatives
from samebits.ops._rows import rounded

Pointwise = Literal["silu", "gelu", "gelu_tanh", "sigmoid", "relu", "relu2"]
"""Activations that :func:`activation` and :func:`samebits.gated` have: functions of one value."""
POINTWISE: tuple[Pointwise, ...] = get_args(Pointwise)


def activation(x: Tensor, name: str) -> Tensor:
    """An elementwise function with one set of bits on all devices: ``docs/contract.md``, "Fused layers".

    Its gradient is computed from `x`. What autograd differentiates again is PyTorch's.

    Args:
        x: bfloat16, float16 or float32, any shape and strides.
        name: one of `POINTWISE`, or ``"softplus"``.

    Returns:
        The values, rounded to the dtype of `x`, contiguous.

    Raises:
        TypeError: `x` is not dense or of another dtype.
    """
    bypass = check_tensors(name, x=x)
    out: Tensor = _operator(x, name, bypass=bypass)
    return out


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """:func:`torch.nn.functional.gelu`, as an :func:`activation`.

    Raises:
        ValueError: `approximate` is neither ``"none"`` nor ``"tanh"``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"samebits.gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    return activation(x, "gelu" if approximate == "none" else "gelu_tanh")


def gradient_of(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """That of `x`, given that of its :func:`activation`."""
    found: Tensor = _gradient(grad, x, name)
    return found


def _run(x: Tensor, name: str) -> Tensor:
    found: Tensor = backend("gated", x).activation(x, name)
    return found


_operator = Operator(
    "activation(Tensor x, str name) -> Tensor", cpu=_run, fake=lambda x, *_: x.new_empty(x.shape)
)


def _run_backward(grad: Tensor, x: Tensor, name: str) -> Tensor:
    if name == "softplus":
        return rounded(grad * _run(x, "sigmoid"), x.dtype)
    found: Tensor = backend("gated", x).activation_backward(grad, x, name)
    return found


_gradient = Operator(
    "activation_backward(Tensor grad, Tensor x, str name) -> Tensor",
    cpu=_run_backward,
    fake=lambda _, x, *__: x.new_empty(x.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.name = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> tuple[Tensor, None]:
    (x,) = saved
    return _gradient(grad, x, ctx.name), None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _keep_gradient(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    grad, x, ctx.name = inputs
    ctx.save_for_backward(grad, x)


def _second(ctx: Any, saved: tuple[Tensor, Tensor], v: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    refuse_third_derivatives(ctx.name)
    grad, x = saved
    needed = ctx.needs_input_grad
    return (
        _gradient(v, x, ctx.name) if needed[0] else None,
        _curved(grad, x, v, ctx.name) if needed[1] else None,
        None,
    )


_gradient.register_autograd(_second, setup_context=_keep_gradient)

_WHOLE, _SHARE = 64, 1 << 14  # so many elements PyTorch's CPU loops compute alike, and do not divide
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "softplus": F.softplus,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def _curved(grad: Tensor, x: Tensor, v: Tensor, name: str) -> Tensor:
    """The gradient of x of the gradient, by PyTorch. On a CPU in whole vectors: bits know no places."""
    count = -x.numel() % _WHOLE if x.is_cpu else 0
    flat = [F.pad(t.reshape(-1), (0, count)) for t in (grad, x, v)]
    share = _SHARE if x.is_cpu else max(1, flat[0].numel())
    return torch.cat(
        [_curve(_FUNCTIONS[name], *parts) for parts in zip(*(t.split(share) for t in flat), strict=True)]
    )[: x.numel()].view(x.shape)


def _curve(function: Callable[[Tensor], Tensor], grad: Tensor, x: Tensor, v: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf), leaf, grad, create_graph=True)
    if not slope.requires_grad:  # it is piecewise linear
        return torch.zeros_like(x)
    found = torch.autograd.grad(slope, leaf, v, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found
