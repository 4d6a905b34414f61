"""Pictures in another size: ``F.interpolate``, each entry by the few old entries that it has a weight for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops._rows import backend, check_rows, rounded
from samebits.ops.layout import memory_format

__all__ = ["Kind", "resized"]

Kind = Literal["nearest", "nearest-exact", "linear", "cubic"]

_A = -0.75  # of cubic weights, as PyTorch's


def resized(
    x: Tensor,
    sizes: Sequence[int],
    scales: Sequence[float | None],
    kind: Kind,
    align_corners: bool = False,
) -> Tensor:
    """Interpolation of ``x[batch, channels, *]`` to `sizes`, from the last dimension to the first.

    Along each dimension a new entry is a chain over the one, two or four old entries that `kind` has weights
    for, ``acc = acc + RNE(weight * x)`` from +0 in float32, in order. Weights are computed in float64 and
    rounded to float32. Taps at one old entry, beyond the first or the last, are one term with the sum of
    their weights. What has a weight of 0 is not read. Linear and cubic results are rounded once, to the dtype
    of ``x``; the nearest are copies.

    The gradient along a dimension is the chain ``acc = acc + RNE(weight * grad)`` over the new entries that
    read an old one, in order. That of the nearest is rounded after each dimension. So no row depends on
    others. Memory goes with the size of the result, not with that of a matrix of weights.
    """
    check_rows("interpolate", x)
    last = memory_format(x) != torch.contiguous_format
    copies = kind.startswith("nearest")
    out = x if copies else x.to(torch.float32)
    out = out.movedim(1, -1) if last else out
    for i in reversed(range(len(sizes))):
        dim = (1 if last else 2) + i
        before, after = out.shape[:dim], out.shape[dim + 1 :]
        flat = out.reshape(math.prod(before), out.shape[dim], math.prod(after))
        out = _operator(flat, sizes[i], scales[i], kind, align_corners).reshape(*before, sizes[i], *after)
    out = out.movedim(-1, 1) if last else out
    return out.to(x.dtype).contiguous(memory_format=memory_format(x))


def _taps(
    n: int, size: int, scale: float | None, kind: str, align_corners: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which of `n` old entries each of `size` new ones reads, and their weights: two ``[size, taps]``."""
    if kind.startswith("nearest"):
        near = torch.arange(size, device=device, dtype=torch.float32) + (0.5 if "exact" in kind else 0.0)
        places = (near * (n / size if scale is None else 1 / scale)).floor().clamp(max=n - 1)
        return places.to(torch.int64)[:, None], torch.ones(size, 1, device=device)
    at = torch.arange(size, device=device, dtype=torch.float64)
    if align_corners:
        at = at * ((n - 1) / (size - 1) if size > 1 else 0.0)
    else:
        at = (at + 0.5) * (n / size if scale is None else 1 / scale) - 0.5
        at = at if kind == "cubic" else at.clamp(min=0)
    first = at.floor()
    tap = torch.arange(-1 if kind == "cubic" else 0, 3 if kind == "cubic" else 2, device=device)
    distance = ((at - first)[:, None] - tap).abs()
    weights = _cubic(distance) if kind == "cubic" else 1 - distance
    places = (first.to(torch.int64)[:, None] + tap).clamp(0, n - 1)
    for t in range(1, len(tap)):  # one term for each entry
        same = places[:, t] == places[:, t - 1]
        weights[:, t] += torch.where(same, weights[:, t - 1], 0.0)
        weights[:, t - 1].masked_fill_(same, 0.0)
    return places, weights.to(torch.float32)


def _cubic(d: Tensor) -> Tensor:
    """The weight of an entry at the distance `d`, up to 2."""
    near = ((_A + 2) * d - (_A + 3)) * d * d + 1
    far = ((_A * d - 5 * _A) * d + 8 * _A) * d - 4 * _A
    return torch.where(d <= 1, near, far)


def _forward(x: Tensor, size: int, scale: float | None, kind: str, align_corners: bool) -> Tensor:
    places, weights = _taps(x.shape[1], size, scale, kind, align_corners, x.device)
    if kind.startswith("nearest"):
        return x.index_select(1, places[:, 0])
    out = torch.zeros((len(x), size, x.shape[2]), device=x.device)
    for place, weight in zip(places.unbind(1), weights[:, :, None].unbind(1), strict=True):
        out += x.index_select(1, place).mul_(weight).masked_fill_(weight == 0, 0.0)
    return rounded(out, torch.float32)


def _fake(x: Tensor, size: int, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], size, x.shape[2]))


# One dimension of x[before, n, after], in float32 unless kind is nearest.
_operator = Operator(
    "resize(Tensor x, SymInt size, float? scale, str kind, bool align_corners) -> Tensor",
    cpu=_forward,
    fake=_fake,
)


def _grad(grad: Tensor, n: int, scale: float | None, kind: str, align_corners: bool) -> Tensor:
    before, size, after = grad.shape
    places, weights = _taps(n, size, scale, kind, align_corners, grad.device)
    terms = grad.movedim(1, 0)[:, None]
    if not kind.startswith("nearest"):
        weights = weights[:, :, None, None]
        terms = (terms * weights).masked_fill_(weights == 0, 0.0)
    rows = terms.reshape(places.numel(), before * after)
    out: Tensor = backend(grad).embedding_backward(rows, places.reshape(-1), n, -1)
    return out.reshape(n, before, after).movedim(0, 1).contiguous()


_gradient = Operator(
    "resize_backward(Tensor grad, SymInt n, float? scale, str kind, bool align_corners) -> Tensor",
    cpu=_grad,
    fake=_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.options = inputs
    ctx.n = x.shape[1]


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Any, ...]:
    return _gradient(grad, ctx.n, *ctx.options), None, None, None, None


def _second(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Any, ...]:
    return _operator(grad, ctx.n, *ctx.options), None, None, None, None


_operator.register_autograd(_backward, setup_context=_keep)
_gradient.register_autograd(_second, setup_context=_keep)
