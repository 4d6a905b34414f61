"""gelu: ``torch.nn.functional.gelu``."""

from __future__ import annotations

from typing import Any

import torch
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
    out: Tensor = _operator(x, approximate, bypass=bypass)
    return out


def _run(x: Tensor, approximate: str) -> Tensor:
    found: Tensor = backend("gated", x).gelu(x, approximate)
    return found


_operator = Operator(
    "gelu(Tensor x, str approximate) -> Tensor", cpu=_run, fake=lambda x, *_: x.new_empty(x.shape)
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


_PADDED = 64  # so many elements PyTorch's CPU loops compute alike, wherever they stand


def _backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> tuple[Tensor, None]:
    (x,) = saved
    return gradient(grad, x, ctx.approximate), None


def gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """PyTorch's. On a CPU in whole vectors, whose bits do not depend on an element's place."""
    found: Tensor
    if not x.is_cpu:
        found = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
        return found
    count = -x.numel() % _PADDED
    flat = [torch.nn.functional.pad(t.reshape(-1), (0, count)) for t in (grad, x)]
    parts = zip(*(t.split(1 << 14) for t in flat), strict=True)  # which are not divided among threads
    found = torch.cat([torch.ops.aten.gelu_backward(g, t, approximate=approximate) for g, t in parts])
    return found[: x.numel()].view(x.shape)


_operator.register_autograd(_backward, setup_context=_setup_context)
