"""Means over windows: ``F.avg_pool2d`` and ``F.adaptive_avg_pool2d``, and those of other dimensions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops._rows import backend, check_rows, rounded
from samebits.ops.conv import conv

__all__ = ["adaptive_avg_pool", "avg_pool"]


def avg_pool(
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    outputs: Sequence[int],
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    """Means over the windows of ``x[batch, channels, *sizes]``, with `outputs` windows in each dimension.

    A window's sum is a chain over its taps in row-major order (that of :func:`samebits.ops.conv.conv` with
    weights of 1), in float32, divided by `divisor`, or by the number of its taps: of those in `x`, or, with
    `count_padding`, of those in the padded `x` too.
    """
    after = [
        max(0, (n - 1) * s + k - size - p)
        for n, s, k, size, p in zip(outputs, stride, taps, x.shape[2:], padding, strict=True)
    ]
    around = [n for pair in zip(padding, after, strict=True) for n in pair]
    ones = torch.ones((x.shape[1], 1, *taps), dtype=torch.float32, device=x.device)
    total = conv(x.to(torch.float32), ones, None, stride, around, [1] * len(taps), x.shape[1])
    for i, n in enumerate(outputs):
        if total.shape[2 + i] != n:  # a last window that begins in the padding
            total = total.narrow(2 + i, 0, n)
    counts = torch.ones((), dtype=torch.float32, device=x.device)
    if divisor is not None:
        counts = counts * divisor
    else:
        for i, (n, s, k, p) in enumerate(zip(outputs, stride, taps, padding, strict=True)):
            start = torch.arange(n, device=x.device) * s - p
            stop = (start + k).clamp(max=x.shape[2 + i] + (p if count_padding else 0))
            length = stop - (start if count_padding else start.clamp(min=0))
            counts = counts * length.to(torch.float32).reshape(-1, *[1] * (len(taps) - 1 - i))
    return (total / counts.expand(total.shape)).to(x.dtype)


def adaptive_avg_pool(x: Tensor, outputs: Sequence[int]) -> Tensor:
    """Means over parts of the last dimensions of `x`, each a row's mean in row-major order.

    In a dimension of size n, part i of m is from ``i * n // m`` to, not including, ``-(-(i + 1) * n // m)``.
    The gradient of an element is the chain ``acc = acc + RNE(grad * w)`` from +0 in float32 over the parts
    that it is in, in row-major order, rounded once; w is the float32 nearest to 1 / the part's size.
    """
    check_rows("adaptive_avg_pool", x)
    first = x.ndim - len(outputs)
    rows = x.reshape(math.prod(x.shape[:first]), *x.shape[first:])
    out: Tensor = _adaptive(rows, [*outputs])
    return out.reshape(*x.shape[:first], *outputs)


def _along(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first element of each of `m` parts of `n`, and the numbers of elements."""
    part = torch.arange(m, device=device)
    first = part * n // m
    return first, -(-(part + 1) * n // m) - first


def _by_length(n: int, m: int, device: torch.device) -> list[tuple[int, Tensor, Tensor | None]]:
    """Parts by their number of elements: that, which they are, and their elements (None: all of `n`)."""
    first, lengths = _along(n, m, device)
    if n % m == 0:
        return [(n // m, torch.arange(m, device=device), None)]
    found: list[tuple[int, Tensor, Tensor | None]] = []
    order, at = lengths.argsort(stable=True), 0
    for length, count in sorted(Counter(-(-(i + 1) * n // m) - i * n // m for i in range(m)).items()):
        parts = order[at : at + count]
        elements = first[parts][:, None] + torch.arange(length, device=device)
        found.append((length, parts, elements.reshape(-1)))
        at += count
    return found


def _forward_adaptive(x: Tensor, outputs: list[int]) -> Tensor:
    out, dims = x.new_empty((len(x), *outputs)), len(outputs)
    if not out.numel():
        return out
    for groups in product(*(_by_length(n, m, x.device) for n, m in zip(x.shape[1:], outputs, strict=True))):
        seen, at = x, []
        for d, (length, parts, elements) in enumerate(groups):
            seen = seen if elements is None else seen.index_select(1 + 2 * d, elements)
            seen = seen.unflatten(1 + 2 * d, (-1, length))
            at.append(parts.reshape(-1, *[1] * (dims - 1 - d)))
        seen = seen.permute(0, *range(1, 2 * dims, 2), *range(2, 2 * dims + 1, 2))
        rows = seen.reshape(-1, math.prod(length for length, *_ in groups))
        index: Any = (slice(None), *at)
        out[index] = backend(x).row_sum(rows, True, x.dtype).reshape(seen.shape[: 1 + dims])
    return out


def _fake_adaptive(x: Tensor, outputs: list[int]) -> Tensor:
    return x.new_empty((x.shape[0], *outputs))


_adaptive = Operator(
    "adaptive_avg_pool(Tensor x, SymInt[] outputs) -> Tensor", cpu=_forward_adaptive, fake=_fake_adaptive
)


def _grad_adaptive(grad: Tensor, sizes: list[int]) -> Tensor:
    """An element takes the gradients of its parts, of which there are few, one after the other."""
    if not grad.numel():
        return grad.new_zeros((len(grad), *sizes))
    counts = torch.ones((), dtype=torch.float64, device=grad.device)
    reads = []  # for each dimension the first and the last part of every element, and the most of them
    for n, m in zip(sizes, grad.shape[1:], strict=True):
        counts = counts[..., None] * _along(n, m, grad.device)[1]
        element = torch.arange(n, device=grad.device)
        first, last = element * m // n, -(-(element + 1) * m // n) - 1
        most = max((-(-(i + 1) * m // n) - i * m // n for i in range(n)), default=0)
        reads.append((first, last, most))
    shares = grad.to(torch.float32) * counts.reciprocal().to(torch.float32)
    total = torch.zeros((len(grad), *sizes), device=grad.device)
    for offsets in product(*(range(most) for *_, most in reads)):
        term = shares
        for d, (offset, (first, last, _)) in enumerate(zip(offsets, reads, strict=True)):
            term = term.index_select(1 + d, torch.minimum(first + offset, last))
            if offset:
                beyond = (first + offset > last).reshape(-1, *[1] * (len(sizes) - 1 - d))
                term = term.masked_fill(beyond, 0.0)
        total += term
    return rounded(total, grad.dtype)


_adaptive_gradient = Operator(
    "adaptive_avg_pool_backward(Tensor grad, SymInt[] sizes) -> Tensor",
    cpu=_grad_adaptive,
    fake=_fake_adaptive,
)


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = list(inputs[0].shape[1:])


def _backward_adaptive(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
    return _adaptive_gradient(grad, ctx.sizes), None


def _second_adaptive(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None]:
    return _adaptive(grad, ctx.sizes), None


_adaptive.register_autograd(_backward_adaptive, setup_context=_keep_sizes)
_adaptive_gradient.register_autograd(_second_adaptive, setup_context=_keep_sizes)
