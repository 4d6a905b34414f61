"""Replacements of convolutions, pools, interpolation and norms of channels under the mode.

The functions follow the conventions of :mod:`samebits.mode.overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.mode.arguments import as_pytorch, takes, without_autocast
from samebits.ops import channels, pool, resize
from samebits.ops.conv import conv
from samebits.ops.layout import as_laid_out, memory_format


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
        like = as_pytorch(theirs, input, kernel_size, steps, padding, ceil_mode, count_include_pad, *more)
        x = input if input.ndim == dims + 2 else input[None]
        taps, stride, padding = (_each(n, dims) for n in (kernel_size, steps, padding))
        with without_autocast(input.device):
            outputs = like.shape[-dims:]
            out = pool.avg_pool(x, taps, stride, padding, outputs, count_include_pad, divisor_override)
        return as_laid_out(out.reshape(like.shape), like)

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
        like = as_pytorch(theirs, input, sizes)
        if sizes == [*input.shape[-len(sizes) :]]:
            return input.clone()
        return as_laid_out(pool.adaptive_avg_pool(input, sizes), like)

    return adaptive_avg_pool


adaptive_avg_pool1d = _adaptive_avg_pool(torch.adaptive_avg_pool1d, 1)
adaptive_avg_pool2d = _adaptive_avg_pool(torch._C._nn.adaptive_avg_pool2d, 2)
adaptive_avg_pool3d = _adaptive_avg_pool(torch._C._nn.adaptive_avg_pool3d, 3)


def _scales(given: Sequence[Any], dims: int) -> list[float | None]:
    """Of all dimensions, from a list for all of them, or one number for each, if they are known."""
    flat = given[0] if len(given) == 1 and not isinstance(given[0], float) else given
    return [None] * dims if not flat else [*flat]


def upsample(name: str, dims: int, kind: resize.Kind = "linear") -> Callable[..., Any]:
    """Of PyTorch's function with this name, which ``F.interpolate`` calls."""
    theirs = getattr(torch._C._nn, name)

    def interpolate(input: Tensor, output_size: Any, align_corners: bool, *scales: Any, **named: Any) -> Any:
        known = [*scales, *named.values()]
        if not takes(input):
            return NotImplemented
        like = as_pytorch(theirs, input, output_size, align_corners, *known)
        with without_autocast(input.device):
            return resize.resized(input, like.shape[2:], _scales(known, dims), kind, align_corners)

    return interpolate


def upsample_nearest(name: str, dims: int) -> Callable[..., Any]:
    theirs = getattr(torch._C._nn, name)
    kind: resize.Kind = "nearest-exact" if "exact" in name else "nearest"

    def interpolate(input: Tensor, output_size: Any, *scales: Any, **named: Any) -> Any:
        known = [*scales, *named.values()]
        if not takes(input):
            return NotImplemented
        like = as_pytorch(theirs, input, output_size, *known)
        return resize.resized(input, like.shape[2:], _scales(known, dims), kind)

    return interpolate


def fold(
    input: Tensor,
    output_size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    stride: int | Sequence[int] = 1,
) -> Any:
    """Where windows do not meet, nothing is summed."""
    size, taps, apart, around, steps = (
        _each(n, 2) for n in (output_size, kernel_size, dilation, padding, stride)
    )
    if not all(s >= d * (k - 1) + 1 for s, d, k in zip(steps, apart, taps, strict=True)):
        return NotImplemented
    return torch._C._nn.col2im(input, size, taps, apart, around, steps)


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
    out = channels.group_norm(input, num_groups, weight, bias, eps)
    # PyTorch's on a GPU is contiguous.
    return out.contiguous(memory_format=memory_format(input)) if input.is_cpu else out


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
    out = group_norm(input, input.shape[1], weight, bias, eps)
    return out if out is NotImplemented else out.contiguous()  # as PyTorch's


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
