"""Activations alone: gelu, and what gradients of gated ones need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.ops._fused import backend, check_tensors
from samebits.ops._operator import Operator


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """:func:`torch.nn.functional.gelu`, with one set of bits on all devices.

    ``docs/contract.md``, "Fused layers", has the function. The gradient is PyTorch's, and so is what
    autograd differentiates again.

    Args:
        x: bfloat16, float16 or float32, any shape and strides.
        approximate: ``"none"`` or ``"tanh"``.

    Raises:
        TypeError: `x` is not dense or of another dtype.
        ValueError: `approximate` is neither.
    """
    bypass = check_tensors("gelu", x=x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"samebits.gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    out: Tensor = _operator(x, name, bypass=bypass)
    return out


def activation(x: Tensor, name: str) -> Tensor:
    """silu, gelu or gelu_tanh, as :func:`samebits.gated` computes it, rounded to the dtype of `x`."""
    out: Tensor = _operator(x, name)
    return out


def _run(x: Tensor, name: str) -> Tensor:
    found: Tensor = backend("gated", x).activation(x, name)
    return found


_operator = Operator(
    "activation(Tensor x, str name) -> Tensor", cpu=_run, fake=lambda x, *_: x.new_empty(x.shape)
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.name = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> tuple[Tensor, None]:
    (x,) = saved
    return gradient(grad, x, ctx.name), None


_operator.register_autograd(_backward, setup_context=_setup_context)

_WHOLE, _SHARE = 64, 1 << 14  # so many elements PyTorch's CPU loops compute alike, and do not divide
_ATEN = torch.ops.aten
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _ATEN.silu_backward,
    "gelu": partial(_ATEN.gelu_backward, approximate="none"),
    "gelu_tanh": partial(_ATEN.gelu_backward, approximate="tanh"),
}


def gradient(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """PyTorch's. On a CPU in whole vectors, so that bits do not depend on an element's place."""
    compute = _GRADIENTS[name]
    if not x.is_cpu:
        return compute(grad, x)
    count = -x.numel() % _WHOLE
    flat = [F.pad(t.reshape(-1), (0, count)) for t in (grad, x)]
    parts = zip(*(t.split(_SHARE) for t in flat), strict=True)
    return torch.cat([compute(g, t) for g, t in parts])[: x.numel()].view(x.shape)
