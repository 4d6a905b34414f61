"""Convolutions, as products of what a window sees, or tap by tap where every channel is by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product as all_of
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import Key
from samebits.ops._checks import check_operands, shape
from samebits.ops._operator import Operator
from samebits.ops._products import addbmm, product
from samebits.ops._rows import backend, rounded
from samebits.ops.expand import expand
from samebits.ops.layout import memory_format

__all__ = ["conv"]


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """A convolution over one or more dimensions, as :func:`torch.nn.functional.conv1d` and its like.

    Args:
        x: ``[batch, channels, *sizes]``; bfloat16, float16 or float32.
        weight: ``[outputs, channels / groups, *taps]``; same dtype and device.
        bias: ``[outputs]``; same dtype and device.
        stride, dilation: one number for each of the sizes.
        padding: zeros before and after each of the sizes, two numbers for each.
        groups: into which channels and outputs are divided.

    ``docs/contract.md``, "Convolutions", has the order of every sum. No result depends on the other rows of
    the batch, and no gradient of weights on how positions with gradients of zero follow in a row.
    Gradients consist of convolutions and gradients of such, so those of any order are implemented.

    Raises:
        TypeError: a tensor is not dense bfloat16, float16 or float32, or dtypes differ.
        ValueError: shapes or devices do not match.
    """
    operands = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    (x, weight, *biases), key, _ = check_operands("conv", None, operands)
    bias = biases[0] if biases else None
    dims = weight.ndim - 2
    if dims < 1 or x.ndim != weight.ndim:
        raise ValueError(
            "samebits.conv: x, weight: expected [batch, channels, *sizes] and [outputs, channels, *taps], got"
            f" {shape(x)} and {shape(weight)}"
        )
    if groups < 1 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"samebits.conv: groups: expected channels and outputs in {groups} equal parts, got"
            f" {shape(x)} and {shape(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"samebits.conv: bias: expected {shape(weight[:, 0])[:1]}, got {shape(bias)}")
    if not len(stride) == len(dilation) == dims == len(padding) / 2:
        raise ValueError(f"samebits.conv: stride, padding, dilation: expected {dims}, {2 * dims} and {dims}")
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise ValueError("samebits.conv: stride, padding, dilation: expected positive numbers")
    if min(_sizes(x.shape, weight.shape, stride, padding, dilation)) < 1:
        raise ValueError(
            f"samebits.conv: weight: expected no more taps than padded sizes, got {shape(x)} and"
            f" {shape(weight)}"
        )
    out: Tensor = _operator(x, weight, bias, [*stride], [*padding], [*dilation], groups, key)
    return out


def _sizes(
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """How many windows there are."""
    wide = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(x[2:])]
    given = zip(wide, weight[2:], stride, dilation, strict=True)
    return [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in given]


def _padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Zeros around, or for negative numbers less than there was."""
    pairs = [padding[i : i + 2] for i in range(0, len(padding), 2)]
    flat = [n for pair in reversed(pairs) for n in pair]
    return F.pad(x, flat) if any(flat) else x


def _windows(
    x: Tensor, sizes: Sequence[int], taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What windows see of the padded `x`: a view ``[batch, channels, *sizes, *taps]``."""
    own = x.stride()
    steps = [s * n for s, n in zip(own[2:], stride, strict=True)]
    steps += [s * n for s, n in zip(own[2:], dilation, strict=True)]
    return x.as_strided((*x.shape[:2], *sizes, *taps), (*own[:2], *steps))


def _columns(windows: Tensor, groups: int, dims: int) -> Tensor:
    """Windows as ``[batch, groups, positions, channels * taps]``."""
    batch, channels = windows.shape[:2]
    apart: Tensor = windows.unflatten(1, (groups, channels // groups))
    order = [0, 1, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
    positions, taps = (math.prod(windows.shape[2 + i * dims : 2 + (i + 1) * dims]) for i in (0, 1))
    return apart.permute(order).reshape(batch, groups, positions, channels // groups * taps)


def _by_groups(grad: Tensor, groups: int) -> Tensor:
    """``[batch, groups, outputs, positions]``."""
    batch, outputs = grad.shape[:2]
    return grad.reshape(batch, groups, outputs // groups, math.prod(grad.shape[2:]))


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[0] == groups and weight.shape[1] == 1


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return _convolved(x, weight, bias, *options).contiguous(memory_format=memory_format(x, weight))


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    key: Key,
) -> Tensor:
    """In any memory format."""
    sizes = _sizes(x.shape, weight.shape, stride, padding, dilation)
    windows = _windows(_padded(x, padding), sizes, weight.shape[2:], stride, dilation)
    if _is_depthwise(weight, groups):
        return _by_taps(windows, weight, bias, len(sizes))
    outputs, dims = weight.shape[0], len(sizes)
    columns = _columns(windows, groups, dims)
    rows = weight.reshape(groups, outputs // groups, columns.shape[3]).mT
    if groups == 1:
        out = product(columns[:, 0], rows[0], bias, x.dtype, key)
        return out.mT.unflatten(2, sizes)  # type: ignore[no-any-return]
    wide = x.dtype if bias is None else torch.float32
    found: Tensor = product(columns, rows, None, wide, key).mT.reshape(len(x), outputs, *sizes)
    return found if bias is None else rounded(found + _along(bias, dims), x.dtype)


def _along(bias: Tensor, dims: int) -> Tensor:
    return bias.to(torch.float32).reshape(-1, *[1] * dims)


def _at(x: Tensor, where: Sequence[Any]) -> Tensor:
    """``x[..., *where]``."""
    index: Any = (..., *where)
    return x[index]


def _taps(weight: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Taps in row-major order: where they are, and their weights ``[channels, 1, …]`` in float32."""
    dims = weight.ndim - 2
    for at in all_of(*map(range, weight.shape[2:])):
        yield at, _at(weight[:, 0], at).to(torch.float32).reshape(-1, *[1] * dims)


def _by_taps(windows: Tensor, weight: Tensor, bias: Tensor | None, dims: int) -> Tensor:
    """Every channel by itself: products are rounded to float32, and added in the order of the taps."""
    total = torch.zeros(windows.shape[: 2 + dims], dtype=torch.float32, device=windows.device)
    for at, w in _taps(weight):
        total += _at(windows, at) * w
    return rounded(total if bias is None else total + _along(bias, dims), windows.dtype)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    sizes = _sizes(x.shape, weight.shape, *options[:3])
    out = x.new_empty((x.shape[0], weight.shape[0], *sizes))
    return out.contiguous(memory_format=memory_format(x, weight))


_operator = Operator(
    "conv(Tensor x, Tensor weight, Tensor? bias, int[] stride, SymInt[] padding, int[] dilation, int groups,"
    " str contract) -> Tensor",
    cpu=_forward,
    fake=_fake,
)


def _grad_x(grad: Tensor, weight: Tensor, *given: Any) -> Tensor:
    return _grad_x_in_any_format(grad, weight, *given).contiguous(memory_format=memory_format(grad, weight))


def _grad_x_in_any_format(
    grad: Tensor,
    weight: Tensor,
    sizes: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    key: Key,
) -> Tensor:
    """The gradient of ``x[batch, channels, *sizes]``."""
    dims, taps = len(sizes), weight.shape[2:]
    inputs = weight.shape[1] * groups
    outer = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(sizes)]
    alone = all(s >= d * (k - 1) + 1 for s, d, k in zip(stride, dilation, taps, strict=True))
    if _is_depthwise(weight, groups) or alone:
        kind = grad.dtype if alone else torch.float32
        total = torch.zeros((len(grad), inputs, *outer), dtype=kind, device=grad.device)
        places = _windows(total, grad.shape[2:], taps, stride, dilation)
        if _is_depthwise(weight, groups):
            for at, w in _taps(weight):
                here = _at(places, at)
                here.copy_(here + grad * w)
        else:  # windows that do not meet
            rows = _by_groups(grad, groups).mT
            flat = weight.reshape(groups, weight.shape[0] // groups, -1)
            seen = product(rows, flat, None, grad.dtype, key)
            seen = seen.reshape(len(grad), groups, *grad.shape[2:], inputs // groups, *taps)
            order = [0, 1, 2 + dims, *range(2, 2 + dims), *range(3 + dims, 3 + 2 * dims)]
            places.copy_(seen.permute(order).reshape(places.shape))
        cut = [slice(padding[2 * i], padding[2 * i] + n) for i, n in enumerate(sizes)]
        return rounded(_at(total, cut), grad.dtype)
    between = [(n - 1) * s + 1 for n, s in zip(grad.shape[2:], stride, strict=True)]
    apart = grad.new_zeros((*grad.shape[:2], *between))
    _at(apart, [slice(None, None, s) for s in stride]).copy_(grad)
    around = []
    for i, n in enumerate(sizes):
        reach = dilation[i] * (taps[i] - 1)
        before = reach - padding[2 * i]
        around += [before, n + reach - apart.shape[2 + i] - before]
    turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    turned = turned.flip([*range(2, 2 + dims)])
    once, none = [1] * dims, [0] * (2 * dims)
    return _convolved(_padded(apart, around), turned, None, once, none, dilation, groups, key)


def _grad_weight(grad: Tensor, x: Tensor, *given: Any) -> Tensor:
    return _grad_weight_in_any_format(grad, x, *given).contiguous(memory_format=memory_format(grad, x))


def _grad_weight_in_any_format(
    grad: Tensor,
    x: Tensor,
    weight: Sequence[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    key: Key,
) -> Tensor:
    dims = len(stride)
    windows = _windows(_padded(x, padding), grad.shape[2:], weight[2:], stride, dilation)
    if groups > 1 and weight[0] == groups and weight[1] == 1:
        wide = grad.to(torch.float32)
        taps = [
            _over_positions(_at(windows, at) * wide, grad.dtype) for at in all_of(*map(range, weight[2:]))
        ]
        return torch.stack(taps, 1).reshape(tuple(weight))
    columns = _columns(windows, groups, dims).transpose(0, 1)
    rows = _by_groups(grad, groups).transpose(0, 1)
    return addbmm(None, rows, columns, None, grad.dtype, key).reshape(tuple(weight))  # type: ignore[no-any-return]


def _over_positions(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of ``terms[batch, channels, *sizes]`` for every channel: chains over all positions, in order."""
    rows = terms.movedim(1, -1).reshape(terms[:, 0].numel(), terms.shape[1])
    return backend(terms).column_sum(rows, dtype)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.options = inputs
    ctx.shapes = list(x.shape[2:]), weight.shape
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Any, ...]:
    x, weight = saved
    sizes, shape_of_weight = ctx.shapes
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    grad_x = _grad_x_operator(grad, weight, sizes, *ctx.options) if of_x else None
    grad_weight = _grad_weight_operator(grad, x, [*shape_of_weight], *ctx.options) if of_weight else None
    grad_bias = _grad_bias_operator(grad) if of_bias else None
    return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _fake_grad_x(grad: Tensor, weight: Tensor, sizes: list[int], *options: Any) -> Tensor:
    out = grad.new_empty((grad.shape[0], weight.shape[1] * options[3], *sizes))
    return out.contiguous(memory_format=memory_format(grad, weight))


def _fake_grad_weight(grad: Tensor, x: Tensor, weight: list[int], *options: Any) -> Tensor:
    return grad.new_empty(weight).contiguous(memory_format=memory_format(grad, x))


def _grad_bias(grad: Tensor) -> Tensor:
    return _over_positions(grad, grad.dtype)


def _fake_grad_bias(grad: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1])


_OPTIONS = "int[] stride, SymInt[] padding, int[] dilation, int groups, str contract) -> Tensor"
_grad_x_operator = Operator(
    f"conv_grad_x(Tensor grad, Tensor weight, SymInt[] sizes, {_OPTIONS}", cpu=_grad_x, fake=_fake_grad_x
)
_grad_weight_operator = Operator(
    f"conv_grad_weight(Tensor grad, Tensor x, SymInt[] weight, {_OPTIONS}",
    cpu=_grad_weight,
    fake=_fake_grad_weight,
)
_grad_bias_operator = Operator("conv_grad_bias(Tensor grad) -> Tensor", cpu=_grad_bias, fake=_fake_grad_bias)
_operator.register_autograd(_backward, setup_context=_setup_context)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, other, _, *ctx.options = inputs
    ctx.shape = other.shape
    needed = ctx.needs_input_grad
    ctx.save_for_backward(grad if needed[1] else None, other if needed[0] else None)


def _second_of_x(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Any, ...]:
    grad, weight = saved
    of_grad = _operator(v, weight, None, *ctx.options) if weight is not None else None
    of_weight = _grad_weight_operator(grad, v, [*ctx.shape], *ctx.options) if grad is not None else None
    return of_grad, of_weight, *(None for _ in range(6))


def _second_of_weight(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Any, ...]:
    grad, x = saved
    of_grad = _operator(x, v, None, *ctx.options) if x is not None else None
    of_x = _grad_x_operator(grad, v, [*ctx.shape[2:]], *ctx.options) if grad is not None else None
    return of_grad, of_x, *(None for _ in range(6))


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _second_of_bias(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> Tensor:
    return expand(v.reshape(-1, *[1] * (len(ctx.shape) - 2)), ctx.shape)


_grad_x_operator.register_autograd(_second_of_x, setup_context=_keep_operands)
_grad_weight_operator.register_autograd(_second_of_weight, setup_context=_keep_operands)
_grad_bias_operator.register_autograd(_second_of_bias, setup_context=_keep_shape)
