"""Replacements of convolutions, pools, and norms of channels, under ``samebits.batch_invariant``.

The functions follow the conventions of :mod:`samebits.mode.overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.mode.arguments import as_pytorch, takes, without_autocast
from samebits.ops import channels, pool
from samebits.ops.conv import conv

__all__ = [
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "batch_norm", "conv1d", "conv2d", "conv3d", "group_norm"),
    "instance_norm",
]


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


def _avg_pool(theirs: Callable[..., Tensor], dims: int) -> Callable[..., Any]:
    def avg_pool(
        input: Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if not takes(input):
            return NotImplemented
        more = () if dims == 1 else (divisor_override,)
        steps = kernel_size if stride is None or stride == [] else stride
        shape = as_pytorch(
            theirs, input, kernel_size, steps, padding, ceil_mode, count_include_pad, *more
        ).shape
        x = input if input.ndim == dims + 2 else input[None]
        taps, stride, padding = (_each(n, dims) for n in (kernel_size, steps, padding))
        with without_autocast(input.device):
            out = pool.avg_pool(x, taps, stride, padding, shape[-dims:], count_include_pad, divisor_override)
        return out.reshape(shape)

    return avg_pool


avg_pool1d = _avg_pool(torch.avg_pool1d, 1)
avg_pool2d = _avg_pool(torch._C._nn.avg_pool2d, 2)
avg_pool3d = _avg_pool(torch._C._nn.avg_pool3d, 3)


def _adaptive_avg_pool(theirs: Callable[..., Tensor], dims: int) -> Callable[..., Any]:
    def adaptive_avg_pool(input: Tensor, output_size: int | Sequence[int | None]) -> Any:
        if not takes(input):
            return NotImplemented
        given = [output_size] if isinstance(output_size, int) else [*output_size]
        given = given * dims if len(given) == 1 else given
        sizes = [n if m is None else m for n, m in zip(input.shape[-len(given) :], given, strict=True)]
        as_pytorch(theirs, input, sizes)
        return pool.adaptive_avg_pool(input, sizes)

    return adaptive_avg_pool


adaptive_avg_pool1d = _adaptive_avg_pool(torch.adaptive_avg_pool1d, 1)
adaptive_avg_pool2d = _adaptive_avg_pool(torch._C._nn.adaptive_avg_pool2d, 2)
adaptive_avg_pool3d = _adaptive_avg_pool(torch._C._nn.adaptive_avg_pool3d, 3)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if not takes(input, *(t for t in (weight, bias) if t is not None)):
        return NotImplemented
    as_pytorch(torch.group_norm, input, num_groups, weight, bias, eps)
    return channels.group_norm(input, num_groups, weight, bias, eps)


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not use_input_stats or running_mean is not None or input.ndim < 2:
        return NotImplemented
    return group_norm(input, input.shape[1], weight, bias, eps)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Without training. With it, a row's result is meant to depend on the batch."""
    if training or running_mean is None or running_var is None or input.ndim < 2:
        return NotImplemented
    as_pytorch(
        *(torch.batch_norm, input, weight, bias, running_mean, running_var),
        *(training, momentum, eps, cudnn_enabled),
    )
    if not takes(input, running_mean, running_var, *(t for t in (weight, bias) if t is not None)):
        return NotImplemented
    return channels.kept_norm(input, running_mean, running_var, weight, bias, eps)
