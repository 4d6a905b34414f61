"""Replacements of elementwise functions: in whole vectors on a CPU, or broadcasting with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import broadcast
from samebits.mode.arguments import records, takes, tensors_of
from samebits.ops.expand import expand
from samebits.ops.reduce import mean, sum

__all__ = [
    "broadcasting",
    "complex_in_whole_vectors",
    "cross_entropy_of_logits",
    "in_whole_vectors",
    "loss_gradient_in_whole_vectors",
    "scaling_in_whole_vectors",
]


def broadcasting(func: Callable[..., Any], out_of_place: Callable[..., Any] | None) -> Callable[..., Any]:
    """The elementwise `func` of two tensors, with this library's gradient of an operand that broadcasts."""
    compute = scaling_in_whole_vectors(func, out_of_place)

    def pointwise(input: Any, other: Any, *args: Any, **rest: Any) -> Any:
        both = isinstance(input, Tensor) and isinstance(other, Tensor)
        if both and not (input.is_nested or other.is_nested) and input.shape != other.shape:
            theirs, ours = records(other), not out_of_place and records(input)
            if theirs or ours:
                shape = broadcast(input.shape, other.shape)
                if theirs and other.shape != shape:
                    other = expand(other, shape)
                if ours and input.shape != shape:
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


_SHARE = 1 << 14  # so few elements PyTorch's CPU loops do not divide among threads


def in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The elementwise `func`, in lengths for which PyTorch's CPU loops compute all elements alike.

    PyTorch's loops run over whole SIMD vectors. They compute the remainder of each thread's share with other
    functions, which may give other bits. If `func` writes into its first argument, `out_of_place` is the
    function that computes.
    """
    parameters = func.__code__.co_varnames if isinstance(func, FunctionType) else ()
    flag = parameters.index("inplace") if "inplace" in parameters else None

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_of((*args, *kwargs.values())))
        if not tensors or not all(
            t.is_cpu and t.layout == torch.strided and not t.is_nested for t in tensors
        ):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            return NotImplemented
        compute, in_place, operands = out_of_place or func, out_of_place is not None, args
        options = dict(kwargs)
        if flag is not None:
            in_place = options.pop("inplace", False) or any(args[flag:])
            operands = args[:flag]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        count, wide = shape.numel(), {t.dtype for t in tensors if t.ndim > 0}

        def parts(x: Any) -> Any:
            if not isinstance(x, Tensor) or (x.ndim == 0 and shape and not (records(x) and x.dtype in wide)):
                return None  # PyTorch does not promote types for 0-D
            whole = x if x.shape == shape else expand(x, shape) if records(x) else x.expand(shape)
            padding = 0.5 if x.is_floating_point() else 1
            return F.pad(whole.reshape(-1), (0, -count % 64), value=padding).split(_SHARE)

        positional = [(x, parts(x)) for x in operands]
        named = {key: (x, parts(x)) for key, x in options.items()}
        out = torch.cat(
            [
                compute(
                    *(x if p is None else p[i] for x, p in positional),
                    **{key: x if p is None else p[i] for key, (x, p) in named.items()},
                )
                for i in range(max(1, -(-count // _SHARE)))
            ]
        )
        out = out[:count].view(shape)
        if not in_place:
            like = next((t for t in tensors if t.shape == shape), out)
            # The result has the strides of its operand, as PyTorch's has.
            return out if like.is_contiguous() else torch.empty_like(like, dtype=out.dtype).copy_(out)
        into = tensors[0]
        kinds = [(t.is_floating_point(), t.is_complex(), t.dtype == torch.bool) for t in (into, out)]
        if shape != into.shape or kinds[0] != kinds[1]:
            return func(*args, **kwargs)  # PyTorch raises an error in most of these cases
        return into.copy_(out)

    return pointwise


def loss_gradient_in_whole_vectors(func: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient `func` of an elementwise loss, :func:`in_whole_vectors`; a mean is over the loss's own."""
    compute = in_whole_vectors(func)

    def gradient(grad: Tensor, input: Tensor, target: Tensor, reduction: int, *rest: Any) -> Any:
        if not input.is_cpu:
            return func(grad, input, target, reduction, *rest)
        if reduction == 1:
            grad = grad / max(1, torch.broadcast_shapes(input.shape, target.shape).numel())
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
