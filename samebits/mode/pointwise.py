"""Replacements of elementwise functions: in whole vectors on a CPU, or broadcasting with a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.backends import broadcast, same_shape
from samebits.mode.arguments import records, takes
from samebits.mode.vectors import glu_of_halves, in_whole_vectors
from samebits.ops.expand import expand
from samebits.ops.reduce import mean, sum

__all__ = [
    "broadcasting",
    "complex_in_whole_vectors",
    "cross_entropy_of_logits",
    "glu_in_whole_vectors",
    "loss_gradient_in_whole_vectors",
    "scaling_in_whole_vectors",
]


def broadcasting(func: Callable[..., Any], out_of_place: Callable[..., Any] | None) -> Callable[..., Any]:
    """The elementwise `func` of two tensors, with this library's gradient of an operand that broadcasts."""
    compute = scaling_in_whole_vectors(func, out_of_place)

    def pointwise(input: Any, other: Any, *args: Any, **rest: Any) -> Any:
        both = isinstance(input, Tensor) and isinstance(other, Tensor)
        nested = both and (input.is_nested or other.is_nested)
        if both and not nested and not same_shape(input.shape, other.shape):
            theirs, ours = records(other), not out_of_place and records(input)
            if theirs or ours:
                shape = broadcast(input.shape, other.shape)
                if theirs and not same_shape(other.shape, shape):
                    other = expand(other, shape)
                if ours and not same_shape(input.shape, shape):
                    input = expand(input, shape)
        return compute(input, other, *args, **rest)

    return pointwise


def scaling_in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`func`, of two operands, for scales, roundings and complex numbers :func:`in_whole_vectors`."""
    scaled = in_whole_vectors(func, out_of_place)

    def pointwise(input: Any, other: Any, *args: Any, **rest: Any) -> Any:
        if args or rest.get("alpha", 1) != 1 or rest.get("rounding_mode") or _complex(input, other):
            return scaled(input, other, *args, **rest)
        return func(input, other, **rest)

    return pointwise


def _complex(*operands: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_complex() for x in operands)


def complex_in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`func`, for complex numbers :func:`in_whole_vectors`. Real ones have the same bits at any position."""
    scaled = in_whole_vectors(func, out_of_place)

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        return (scaled if _complex(*args, *kwargs.values()) else func)(*args, **kwargs)

    return pointwise


def glu_in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The gated unit `func`, whose operands are the halves of a tensor, :func:`in_whole_vectors`."""

    def gated(input: Tensor, dim: int = -1) -> Any:
        if not input.is_cpu or input.ndim == 0 or input.shape[dim] % 2:
            return func(input, dim)  # it raises its errors
        return glu_of_halves(*input.chunk(2, dim))

    return gated


def loss_gradient_in_whole_vectors(func: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient `func` of an elementwise loss, :func:`in_whole_vectors`; a mean is over the loss's own."""
    compute = in_whole_vectors(func)

    def gradient(grad: Tensor, input: Tensor, target: Tensor, reduction: int, *rest: Any) -> Any:
        if not input.is_cpu:
            return func(grad, input, target, reduction, *rest)
        if reduction == 1:
            grad = grad / max(1, math.prod(torch.broadcast_shapes(input.shape, target.shape)))
        return compute(grad.expand_as(input), input, target, 0, *rest)

    return gradient


_binary_cross_entropy = torch.binary_cross_entropy_with_logits


def cross_entropy_of_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    loss = in_whole_vectors(_binary_cross_entropy)(input, target, weight, pos_weight, 0)
    if reduction == 0:
        return loss
    return NotImplemented if not takes(loss) else mean(loss) if reduction == 1 else sum(loss)
