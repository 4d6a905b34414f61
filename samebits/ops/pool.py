"""Means over windows: ``F.avg_pool2d`` and ``F.adaptive_avg_pool2d``, and those of other dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from samebits.ops.conv import conv
from samebits.ops.reduce import mean

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
    for i, n in enumerate(outputs):  # a last window may begin in the padding
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
    """
    dims = len(outputs)
    sizes = x.shape[x.ndim - dims :]
    if all(m == n for m, n in zip(outputs, sizes, strict=True)):
        return x.clone()
    parts = [
        [slice(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        for n, m in zip(sizes, outputs, strict=True)
    ]
    last = list(range(-dims, 0))
    means = []
    for part in product(*parts):
        index: Any = (..., *part)
        means.append(mean(x[index], last))
    lead = x.shape[: x.ndim - dims]
    if not means:
        return x.new_empty((*lead, *outputs))
    return torch.stack(means, -1).reshape(*lead, *outputs)
