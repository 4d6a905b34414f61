"""Pictures in another size: ``F.interpolate``, by products with weights along each dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.ops.indexing import take
from samebits.ops.matmul import matmul

__all__ = ["nearest", "resized"]

_A = -0.75  # of cubic weights, as PyTorch's


def resized(
    x: Tensor, sizes: Sequence[int], scales: Sequence[float | None], align_corners: bool, cubic: bool
) -> Tensor:
    """Linear or cubic interpolation of ``x[batch, channels, *]`` to `sizes`.

    From the last dimension to the first: along each, an entry is a plain chain over the old entries, in
    order, with weights that are computed in float64 and rounded to float32. The result is rounded once, to
    the dtype of ``x``. So no row depends on others.
    """
    out = x.to(torch.float32)
    for i in reversed(range(len(sizes))):
        weights = _weights(out.shape[2 + i], sizes[i], scales[i], align_corners, cubic, x.device)
        out = matmul(out.movedim(2 + i, -1), weights.mT).movedim(-1, 2 + i)
    return out.to(x.dtype).contiguous()


def nearest(x: Tensor, sizes: Sequence[int], scales: Sequence[float | None], exact: bool) -> Tensor:
    """The nearest entries of ``x[batch, channels, *]``, with gradients that are summed in order."""
    for i, size in enumerate(sizes):
        n, scale = x.shape[2 + i], scales[i]
        at = torch.arange(size, device=x.device, dtype=torch.float32) + (0.5 if exact else 0.0)
        places = (at * (n / size if scale is None else 1 / scale)).floor().clamp(max=n - 1).to(torch.int64)
        x = take(x.movedim(2 + i, 0), places).movedim(0, 2 + i)
    return x.contiguous()


def _weights(
    n: int, size: int, scale: float | None, align_corners: bool, cubic: bool, device: torch.device
) -> Tensor:
    """Of `n` entries in each of `size` new ones."""
    at = torch.arange(size, device=device, dtype=torch.float64)
    if align_corners:
        at = at * ((n - 1) / (size - 1) if size > 1 else 0.0)
    else:
        at = (at + 0.5) * (n / size if scale is None else 1 / scale) - 0.5
        at = at if cubic else at.clamp(min=0)
    first = at.floor()
    t = at - first
    own = torch.arange(n, device=device)
    total = torch.zeros(size, n, device=device, dtype=torch.float64)
    for tap in range(-1, 3) if cubic else range(2):
        place = (first.to(torch.int64) + tap).clamp(0, n - 1)
        weight = _cubic((t - tap).abs()) if cubic else 1 - (t - tap).abs()
        total = total + torch.where(place[:, None] == own, weight[:, None], 0.0)
    return total.to(torch.float32)


def _cubic(d: Tensor) -> Tensor:
    """The weight of an entry at the distance `d`, up to 2."""
    near = ((_A + 2) * d - (_A + 3)) * d * d + 1
    far = ((_A * d - 5 * _A) * d + 8 * _A) * d - 4 * _A
    return torch.where(d <= 1, near, far)
