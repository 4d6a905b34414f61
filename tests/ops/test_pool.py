"""Pools, and norms of channels, under the mode: against a second implementation and beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import floor
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
from tests.support.naive import f32

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


def weights_of(n: int, size: int, cubic: bool, corners: bool) -> list[dict[int, float]]:
    """For each new entry the old ones that it reads, in order, and their weights."""
    found = []
    for i in range(size):
        at = i * (n - 1) / (size - 1) if corners else (i + 0.5) * (n / size) - 0.5
        at = at if cubic else max(at, 0.0)
        first = floor(at)
        row: dict[int, float] = {}
        for place in range(first - 1, first + 3) if cubic else (first, first + 1):
            d = abs(at - first - (place - first))
            w = 1 - d
            if cubic and d <= 1:
                w = ((-0.75 + 2) * d - (-0.75 + 3)) * d * d + 1
            elif cubic:
                w = ((-0.75 * d + 5 * 0.75) * d - 8 * 0.75) * d + 4 * 0.75
            inside = min(max(place, 0), n - 1)
            row[inside] = row.get(inside, 0.0) + w
        found.append({j: float(f32(w)) for j, w in row.items() if f32(w) != 0})
    return found


def chain(terms: list[tuple[float, float]]) -> Any:
    acc = f32(0)
    for a, w in terms:
        acc = f32(acc + f32(f32(a) * f32(w)))
    return acc


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("sizes", [(2, 8), (7, 3), (3, 1)])
@on_devices
def test_interpolation(device: str, sizes: tuple[int, int], mode: str, corners: bool) -> None:
    """Chains over the few old entries that have weights, along the last dimension first; gradients back."""
    x = values("normal", (3, 5), torch.float32, 0).to(device).requires_grad_()
    seed = values("normal", sizes, torch.float32, 1).to(device)
    corners = corners and 1 not in sizes
    tables = [weights_of(n, m, mode == "bicubic", corners) for n, m in zip((5, 3), sizes[::-1], strict=True)]
    rows: list[list[Any]] = x.tolist()
    for table in tables:  # of columns, and then of rows as columns
        rows = [[chain([(row[j], w) for j, w in taps.items()]) for taps in table] for row in rows]
        rows = [list(column) for column in zip(*rows, strict=True)]
    grads: list[list[Any]] = seed.tolist()
    for table, n in zip(tables[::-1], (3, 5), strict=True):
        grads = [list(column) for column in zip(*grads, strict=True)]
        readers = [[(i, taps[j]) for i, taps in enumerate(table) if j in taps] for j in range(n)]
        grads = [[chain([(row[i], w) for i, w in reads]) for reads in readers] for row in grads]
    with samebits.batch_invariant("error"):
        got = F.interpolate(x[None, None], sizes, mode=mode, align_corners=corners)[0, 0]
    assert_same_bits(got.detach().cpu(), torch.tensor(rows))
    assert_same_bits(torch.autograd.grad(got, x, seed)[0].cpu(), torch.tensor(grads))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear"])
def test_what_is_not_finite_reaches_only_what_reads_it(mode: str, value: float) -> None:
    dims = {"linear": 1, "trilinear": 3}.get(mode, 2)
    for at in product(range(4), repeat=dims):
        x = torch.zeros(1, 1, *[4] * dims)
        x[(0, 0, *at)] = value
        for options in ({"scale_factor": 2.0}, {"size": 7, "align_corners": True}):
            theirs = F.interpolate(x, mode=mode, **options)
            with samebits.batch_invariant("error"):
                ours = F.interpolate(x, mode=mode, **options)
            assert (ours.isfinite() | ~theirs.isfinite()).all()
            assert not (ours.isnan() & ~theirs.isnan()).any()


@on_devices
def test_interpolation_of_many_samples_has_no_matrix_of_weights(device: str) -> None:
    x = values("normal", (1, 1, 60_000), torch.float32, 0).to(device).requires_grad_()  # one of 28.8 GB
    with samebits.batch_invariant("error"):
        y = F.interpolate(x, scale_factor=2.0, mode="linear")
    y.sum().backward()
    torch.testing.assert_close(y, F.interpolate(x, scale_factor=2.0, mode="linear"))
    assert x.grad is not None
    assert x.grad.sum() == 120_000


@pytest.mark.parametrize("outputs", [(2, 3), (4, 6), (5, 7), (1, 1)])
@on_dtypes
@on_devices
def test_parts_of_a_picture(device: str, dtype: torch.dtype, outputs: tuple[int, int]) -> None:
    """Means of parts, and gradients over the parts that an element is in, in order."""
    x = values("normal", (2, 4, 6), dtype, 0).to(device).requires_grad_()
    seed = values("normal", (2, *outputs), dtype, 1).to(device)
    parts = [
        [range(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        for n, m in zip((4, 6), outputs, strict=True)
    ]
    means, grads = [], []
    for b in range(2):
        row = x[b].tolist()
        means += [naive_rows.mean([row[h][w] for h, w in product(hs, ws)]) for hs, ws in product(*parts)]
        shares = [1 / (len(hs) * len(ws)) for hs, ws in product(*parts)]
        g = seed[b].flatten().tolist()
        for h, w in product(range(4), range(6)):
            inside = [i for i, (hs, ws) in enumerate(product(*parts)) if h in hs and w in ws]
            grads.append(chain([(g[i], shares[i]) for i in inside]))
    with samebits.batch_invariant("error"):
        got = F.adaptive_avg_pool2d(x, outputs)
    assert_same_bits(got.detach().cpu(), rounded(means, (2, *outputs), dtype))
    assert_same_bits(torch.autograd.grad(got, x, seed)[0].cpu(), rounded(grads, (2, 4, 6), dtype))


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


OPS = torch.ops.samebits
OPCHECKS: list[tuple[Any, tuple[Any, ...]]] = [
    (OPS.resize, ((2, 5, 3), 7, None, "linear", False)),
    (OPS.resize, ((2, 5, 3), 7, 1.4, "cubic", False)),
    (OPS.resize, ((2, 5, 3), 7, None, "nearest", False)),
    (OPS.resize_backward, ((2, 7, 3), 5, None, "linear", True)),
    (OPS.resize_backward, ((2, 7, 3), 5, None, "nearest-exact", False)),
    (OPS.adaptive_avg_pool, ((2, 5, 6), [3, 4])),
    (OPS.adaptive_avg_pool_backward, ((2, 3, 4), [5, 6])),
]


@pytest.mark.parametrize(("operator", "given"), OPCHECKS, ids=range(len(OPCHECKS)))
def test_opcheck(operator: Any, given: tuple[Any, ...]) -> None:
    sizes, *rest = given
    torch.library.opcheck(operator.default, (torch.randn(sizes, requires_grad=True), *rest))
