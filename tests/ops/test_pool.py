"""Pools, and norms of channels, under the mode: against a second implementation and beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits.mode import UncoveredError
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within, within  # noqa: F401 - a fixture
from tests.support import naive_rows
from tests.support.devices import DEVICES
from tests.support.naive import f32, fma

on_devices = pytest.mark.parametrize("device", DEVICES)
on_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[:, 0], 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d, what is in x": lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1, True, False),
    "avg_pool2d, a last window": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d, a divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "avg_pool3d": lambda x: nn.AvgPool3d(2)(x[:, None]),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[:, 0], 5),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_avg_pool2d, whole": lambda x: nn.AdaptiveAvgPool2d(1)(x),
    "adaptive_avg_pool2d, one side": lambda x: F.adaptive_avg_pool2d(x, (None, 3)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x[:, None], 2),
    "linear": lambda x: F.interpolate(x[:, 0], 11, mode="linear"),
    "bilinear": lambda x: F.interpolate(x, (5, 13), mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, (12, 1), mode="bilinear", align_corners=True),
    "bilinear, a scale": lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bicubic"),
    "trilinear": lambda x: F.interpolate(x[:, None], (5, 4, 9), mode="trilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=1.7),
    "nearest, exact": lambda x: F.interpolate(x, (8, 19), mode="nearest-exact"),
    "area": lambda x: F.interpolate(x, (3, 4), mode="area"),
    "fold": lambda x: F.fold(x[..., :4].reshape(len(x), 36, 4), (6, 6), 3, stride=3),
    "group_norm": lambda x: F.group_norm(x, 2, _vector(x, 1), _vector(x, 2)),
    "instance_norm": lambda x: F.instance_norm(x, weight=_vector(x, 1)),
    "batch_norm": lambda x: F.batch_norm(x, _vector(x, 3), _vector(x, 4).abs(), _vector(x, 1), _vector(x, 2)),
}


def _vector(x: Tensor, seed: int) -> Tensor:
    return values("normal", (4,), x.dtype if x.dtype != torch.float64 else torch.float32, seed, x.device).to(
        x
    )


@pytest.mark.parametrize("name", CALLS)
@on_dtypes
@on_devices
def test_rows_in_every_company(device: str, dtype: torch.dtype, name: str, within: Within) -> None:  # noqa: F811
    f, x = CALLS[name], values("normal", (5, 4, 9, 8), dtype, 0).to(device)

    def run(rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        with within("error"):
            y = f(leaf)
        seed = values("normal", (5, *y.shape[1:]), dtype, 5).to(device)[first : first + len(rows)]
        return y.detach(), torch.autograd.grad(y, leaf, seed)[0]

    y, dx = run(x, 0)
    for first, last in ((0, 1), (4, 5), (1, 4)):
        some, d_some = run(x[first:last], first)
        assert_same_bits(some, y[first:last])
        assert_same_bits(d_some, dx[first:last])


@pytest.mark.parametrize("name", CALLS)
@on_devices
def test_as_pytorch_within_rounding(device: str, name: str, within: Within) -> None:  # noqa: F811
    f, x = CALLS[name], values("normal", (3, 4, 9, 8), torch.float32, 0).to(device).requires_grad_()
    want = f(x.double())
    seed = values("normal", tuple(want.shape), torch.float32, 1).to(device)
    (of_x,) = torch.autograd.grad(want, x, seed.double())
    with within("error"):
        got = f(x)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(got, x, seed)[0], of_x, rtol=1e-4, atol=1e-5)


def rounded(found: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor([float(v) for v in found]).reshape(shape).to(dtype)


@on_dtypes
@on_devices
def test_means_over_windows(device: str, dtype: torch.dtype) -> None:
    x = values("normal", (2, 3, 5, 6), dtype, 0).to(device)
    found = []
    for b, c, i, j in product(range(2), range(3), range(3), range(3)):
        acc = f32(0)
        places = list(product(range(2 * i - 1, 2 * i + 2), range(2 * j - 1, 2 * j + 2)))
        for h, w in places:
            acc = f32(acc + (f32(x[b, c, h, w].item()) if 0 <= h < 5 and 0 <= w < 6 else f32(0)))
        found.append(f32(acc / f32(len(places))))
    with samebits.batch_invariant("error"):
        assert_same_bits(F.avg_pool2d(x, 3, 2, 1).cpu(), rounded(found, (2, 3, 3, 3), dtype))
        whole = F.adaptive_avg_pool2d(x, 1).cpu()
    rows = [naive_rows.mean(x[b, c].flatten().tolist()) for b, c in product(range(2), range(3))]
    assert_same_bits(whole, rounded(rows, (2, 3, 1, 1), dtype))


@on_devices
def test_interpolation(device: str) -> None:
    """Chains over the old entries, along the last dimension first."""
    x = values("normal", (3, 5), torch.float32, 0).to(device)

    def weights(n: int, size: int) -> list[list[float]]:
        found = []
        for i in range(size):
            at = max((i + 0.5) * (n / size) - 0.5, 0.0)
            first = int(at)
            row = [0.0] * n
            row[first] += 1 - (at - first)
            row[min(first + 1, n - 1)] += at - first
            found.append([float(f32(w)) for w in row])
        return found

    rows: list[list[float]] = x.tolist()
    for size in (8, 2):  # of columns, and then of rows as columns
        by = weights(len(rows[0]), size)
        found = []
        for row in rows:
            found.append([0.0] * size)
            for j in range(size):
                for a, w in zip(row, by[j], strict=True):
                    found[-1][j] = fma(a, w, found[-1][j])
        rows = [list(column) for column in zip(*found, strict=True)]
    with samebits.batch_invariant("error"):
        got = F.interpolate(x[None, None], (2, 8), mode="bilinear")[0, 0]
    assert_same_bits(got.cpu(), torch.tensor(rows))


@on_dtypes
@on_devices
def test_norms_of_channels(device: str, dtype: torch.dtype) -> None:
    x = values("normal", (2, 4, 3, 5), dtype, 0).to(device)
    weight, bias, mean, var = (_vector(x, seed) for seed in (1, 2, 3, 4))
    w, b, m = (t.tolist() for t in (weight, bias, mean))
    v = var.abs().tolist()
    grouped, kept = [], []
    for row, first in product(range(2), (0, 2)):
        part = x[row, first : first + 2].flatten().tolist()
        y, _ = naive_rows.normalised(part, 1e-5, centred=True)
        grouped += [
            f32(f32(y[15 * c + i] * f32(w[first + c])) + f32(b[first + c]))
            for c, i in product(range(2), range(15))
        ]
    for row, c in product(range(2), range(4)):
        scale = f32(f32(w[c]) / np.sqrt(f32(f32(v[c]) + f32(1e-5))))
        kept += [f32(f32(f32(f32(t) - f32(m[c])) * scale) + f32(b[c])) for t in x[row, c].flatten().tolist()]
    with samebits.batch_invariant("error"):
        got = F.group_norm(x, 2, weight, bias)
        assert_same_bits(got.cpu(), rounded(grouped, (2, 4, 3, 5), dtype))
        got = F.batch_norm(x, mean, var.abs(), weight, bias)
        assert_same_bits(got.cpu(), rounded(kept, (2, 4, 3, 5), dtype))


@on_devices
def test_gradients_of_weights_of_channels(device: str, within: Within) -> None:  # noqa: F811
    """As for other vectors that are broadcast: PyTorch's within rounding, and free of zeros at the end."""
    for build in (lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4).eval()):
        layer = build().to(device)
        x = values("normal", (3, 4, 5, 5), torch.float32, 0).to(device)
        seed = values("normal", (3, 4, 5, 5), torch.float32, 1).to(device)
        want = torch.autograd.grad(layer(x), list(layer.parameters()), seed)
        more = torch.cat([seed, torch.zeros_like(seed)])
        with within("error"):
            got = torch.autograd.grad(layer(x), list(layer.parameters()), seed)
            padded = torch.autograd.grad(layer(torch.cat([x, x])), list(layer.parameters()), more)
        for a, c, d in zip(got, want, padded, strict=True):
            torch.testing.assert_close(a, c)
            assert_same_bits(d, a)


def test_what_pytorch_refuses(within: Within) -> None:  # noqa: F811
    x = values("normal", (2, 4, 6, 6), torch.float32, 0)
    with within("error"):
        for call in (
            lambda: F.avg_pool2d(x, 9),
            lambda: F.avg_pool2d(x, 2, padding=2),
            lambda: F.group_norm(x, 3),
            lambda: F.adaptive_avg_pool2d(x, (1, 2, 3)),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call()
        with pytest.raises(UncoveredError):
            nn.BatchNorm2d(4)(x)
        with pytest.raises(UncoveredError):
            F.interpolate(x, 3, mode="bilinear", antialias=True)
        with pytest.raises(UncoveredError):
            F.fold(x.reshape(2, 16, 9), (4, 4), 2)
        with pytest.raises(UncoveredError):
            nn.InstanceNorm2d(4, track_running_stats=True).eval()(x)
        assert F.avg_pool2d(x[0], 2).shape == (4, 3, 3)
        assert F.adaptive_avg_pool2d(x[0], 6).shape == (4, 6, 6)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(F.avg_pool2d(x, 2), F.avg_pool2d(x.clone(), 2))
