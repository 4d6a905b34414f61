"""Norms whose weights belong to channels: ``F.group_norm``, and ``F.batch_norm`` with kept statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.expand import expand
from samebits.ops.norm import layer_norm

__all__ = ["group_norm", "kept_norm"]


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As :func:`torch.nn.functional.group_norm`, of ``x[batch, channels, *sizes]``.

    A group of channels of a row of the batch is normalised in float32 as a row of
    :func:`~samebits.ops.norm.layer_norm`. Products with weights, and sums with biases, are rounded to float32
    each, and the result once to the dtype of ``x``.
    """
    if x.numel() == 0:
        return torch.group_norm(x, groups, weight, bias, eps)
    wide = x.to(torch.float32)
    rows = wide.reshape(x.shape[0] * groups, x.shape[1] // groups * x[0, 0].numel())
    return _scaled(layer_norm(rows, rows.shape[1:], eps=eps).reshape(x.shape), weight, bias, x.dtype)


def kept_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``(x - mean) * (weight / sqrt(var + eps)) + bias`` of ``x[batch, channels, *sizes]``.

    As :func:`torch.nn.functional.batch_norm` without training. Every operation is rounded to float32; the
    result once to the dtype of ``x``.
    """
    mean, var = mean.detach(), var.detach()
    # The square root of float64 rounds to that of float32, which PyTorch's on a CPU is not always.
    root = (var.to(torch.float32) + eps).to(torch.float64).sqrt().to(torch.float32)
    scale = root.reciprocal() if weight is None else weight.to(torch.float32) / root
    return _scaled(x.to(torch.float32) - _along(mean, x), scale, bias, x.dtype)


def _scaled(y: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        y = y * _along(scale, y)
    if bias is not None:
        y = y + _along(bias, y)
    return y.to(dtype)


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """A vector over channels, as large as `x`. Its gradient is a sum over rows and positions, in order."""
    return expand(vector.to(torch.float32).reshape(-1, *[1] * (x.ndim - 2)), x.shape)
