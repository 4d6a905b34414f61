"""Replacements of PyTorch's convolutions under ``samebits.batch_invariant``.

The functions follow the conventions of :mod:`samebits.mode.overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.mode.arguments import as_pytorch, takes
from samebits.ops.conv import conv

__all__ = ["conv1d", "conv2d", "conv3d"]


def _each(n: int | Sequence[int], dims: int) -> list[int]:
    """A number for each dimension."""
    given = [n] if isinstance(n, int) else [*n]
    return given * dims if len(given) == 1 else given


def _in_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device)
    return [None if t is None else t.to(dtype) for t in tensors]


def _convolution(theirs: Callable[..., Tensor], dims: int) -> Callable[..., Any]:
    def convolution(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Any:
        if not takes(input, weight, *(() if bias is None else (bias,))):
            return NotImplemented
        x, w, b = _in_autocast(input, weight, bias)
        assert x is not None
        assert w is not None
        as_pytorch(theirs, x, w, b, stride, padding, dilation, groups)
        steps, apart = _each(stride, dims), _each(dilation, dims)
        if padding == "valid":
            around = [0] * (2 * dims)
        elif padding == "same":
            reach = [d * (k - 1) for d, k in zip(apart, w.shape[2:], strict=True)]
            around = [n for r in reach for n in (r // 2, r - r // 2)]
        else:
            assert not isinstance(padding, str)
            around = [n for n in _each(padding, dims) for _ in range(2)]
        batch = x if x.ndim == dims + 2 else x[None]
        out = conv(batch, w, b, steps, around, apart, groups)
        return out if x.ndim == dims + 2 else out[0]

    return convolution


conv1d = _convolution(torch.conv1d, 1)
conv2d = _convolution(torch.conv2d, 2)
conv3d = _convolution(torch.conv3d, 3)
