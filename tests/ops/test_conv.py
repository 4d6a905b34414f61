"""Convolutions under the mode: against a second implementation, and in every company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits.mode import UncoveredError
from samebits.ops.conv import conv
from samebits.testing import assert_same_bits, bits, values
from tests.mode.conftest import Within, within  # noqa: F401 - a fixture
from tests.support import naive_conv
from tests.support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)
on_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}

# name -> batch, channels, sizes, outputs, taps, stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "causal, depthwise": (2, 3, (7,), 3, (4,), (1,), (3,), (1,), 3),
    "depthwise, apart": (1, 4, (9,), 4, (3,), (2,), (1,), (2,), 4),
    "depthwise pictures": (1, 2, (4, 5), 2, (3, 2), (1, 2), (1, 0), (1, 1), 2),
    "depthwise patches": (2, 2, (6,), 2, (3,), (3,), (0,), (1,), 2),
    "one tap": (2, 5, (4,), 3, (1,), (1,), (0,), (1,), 1),
    "whisper's first": (2, 6, (7,), 4, (3,), (1,), (1,), (1,), 1),
    "whisper's second": (1, 6, (8,), 4, (3,), (2,), (1,), (1,), 1),
    "patches": (2, 3, (6, 4), 5, (3, 2), (3, 2), (0, 0), (1, 1), 1),
    "patches with a rest": (1, 2, (7,), 4, (3,), (4,), (1,), (1,), 1),
    "groups": (2, 4, (6,), 6, (3,), (1,), (2,), (2,), 2),
    "pictures": (1, 2, (5, 4), 3, (3, 2), (2, 1), (1, 1), (1, 2), 1),
    "patches in groups": (1, 4, (6,), 4, (2,), (2,), (0,), (1,), 2),
    "much padding": (1, 2, (3,), 2, (2,), (1,), (3,), (1,), 1),
}


def given(
    name: str, dtype: torch.dtype, device: str, kind: str = "normal"
) -> tuple[naive_conv.Conv, Tensor, Tensor, Tensor]:
    batch, channels, sizes, outputs, taps, stride, padding, dilation, groups = CASES[name]
    contract = "FMA" if dtype == torch.float32 else "HOPPER"
    sizing = naive_conv.Conv(
        *(batch, channels, sizes, outputs, taps, stride, padding, padding, dilation, groups),
        *(contract, NAMES[dtype]),
    )
    x = values(kind, (batch, channels, *sizes), dtype, 0).to(device)
    w = values(kind, (outputs, channels // groups, *taps), dtype, 1).to(device)
    return sizing, x, w, values(kind, (outputs,), dtype, 2).to(device)


def call(sizing: naive_conv.Conv, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    f = getattr(F, f"conv{len(sizing.taps)}d")
    out: Tensor = f(x, w, b, sizing.stride, sizing.before, sizing.dilation, sizing.groups)
    return out


def assert_bits(found: Tensor, want: dict[tuple[int, ...], int], message: str) -> None:
    found = found.cpu()
    mask = 0xFFFFFFFF if found.dtype == torch.float32 else 0xFFFF
    assert found.numel() == len(want)
    for at, pattern in want.items():
        assert int(bits(found[at])) & mask == pattern, f"{message} at {at}"


@pytest.mark.parametrize("kind", ["normal", "sparse"])
@pytest.mark.parametrize("name", CASES)
@on_dtypes
@on_devices
def test_against_a_second_implementation(device: str, dtype: torch.dtype, name: str, kind: str) -> None:
    sizing, x, w, b = given(name, dtype, device, kind)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    with samebits.batch_invariant("error"):
        y = call(sizing, *leaves)
        plain = call(sizing, x.detach(), w.detach(), None)
    seed = values(kind, tuple(y.shape), dtype, 3).to(device)
    grads = torch.autograd.grad(y, leaves, seed)
    of_x, of_w = naive_conv.values_of(x.detach().cpu()), naive_conv.values_of(w.detach().cpu())
    g = naive_conv.values_of(seed.cpu())
    assert_bits(y.detach(), naive_conv.forward(sizing, of_x, of_w, b.tolist()), "result")
    assert_bits(plain, naive_conv.forward(sizing, of_x, of_w, None), "without a bias")
    assert_bits(grads[0], naive_conv.of_x(sizing, g, of_w), "gradient of x")
    assert_bits(grads[1], naive_conv.of_weight(sizing, g, of_x), "gradient of the weight")
    assert_bits(grads[2], naive_conv.of_bias(sizing, g), "gradient of the bias")


@pytest.mark.parametrize("name", CASES)
@on_devices
def test_as_pytorch_within_rounding(device: str, name: str, within: Within) -> None:  # noqa: F811
    sizing, x, w, b = given(name, torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    want = call(sizing, *(t.double() for t in leaves))
    seed = values("normal", tuple(want.shape), torch.float32, 3).to(device)
    with within("error"):
        got = call(sizing, *leaves)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want.float())
    found = torch.autograd.grad(got, leaves, seed)
    for a, c in zip(found, torch.autograd.grad(want, leaves, seed.double()), strict=True):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("name", CASES)
@on_dtypes
@on_devices
def test_rows_in_every_company(device: str, dtype: torch.dtype, name: str, within: Within) -> None:  # noqa: F811
    sizing, _, w, b = given(name, dtype, device)
    x = values("normal", (5, sizing.channels, *sizing.sizes), dtype, 4).to(device)

    def run(rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        with within("error"):
            y = call(sizing, leaf, w, b)
        seed = values("normal", (5, *y.shape[1:]), dtype, 5).to(device)[first : first + len(rows)]
        return y.detach(), torch.autograd.grad(y, leaf, seed)[0]

    y, dx = run(x, 0)
    for first, last in ((0, 1), (4, 5), (1, 4)):
        some, d_some = run(x[first:last], first)
        assert_same_bits(some, y[first:last])
        assert_same_bits(d_some, dx[first:last])


@pytest.mark.parametrize("name", ["causal, depthwise", "whisper's first", "groups", "patches with a rest"])
@on_dtypes
@on_devices
def test_gradients_of_weights_in_a_padded_batch(device: str, dtype: torch.dtype, name: str) -> None:
    """Zeros at the ends of sequences, where gradients are zero, too."""
    sizing, _, w, b = given(name, dtype, device)
    x = values("normal", (3, sizing.channels, 40), dtype, 4).to(device)

    def run(rows: Tensor, shown: int) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (w, b)]
        with samebits.batch_invariant("error"):
            y = call(sizing, rows, *leaves)
            seed = torch.zeros_like(y)
            seed[:, :, :shown] = values("normal", (3, sizing.outputs, shown), dtype, 5).to(device)
            return torch.autograd.grad(y, leaves, seed)

    count = call(sizing, x, w, b).shape[2]
    for got, want in zip(run(F.pad(x, (0, 13)), count), run(x, count), strict=True):
        assert_same_bits(got, want)


def test_prefixes_of_a_causal_convolution(within: Within) -> None:  # noqa: F811
    """As a state-space model decodes: the last taps alone give the bits of the whole sequence."""
    layer = nn.Conv1d(6, 6, 4, groups=6, padding=3)
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)
        x = values("normal", (2, 6, 20), dtype, 0)
        with within("error"), torch.no_grad():
            whole = layer(x)[..., :20]
            for i in range(3, 20):
                last = F.conv1d(x[..., i - 3 : i + 1], layer.weight, layer.bias, groups=6)
                assert_same_bits(last, whole[..., i : i + 1])


def test_modules_and_forms(within: Within) -> None:  # noqa: F811
    x = values("normal", (2, 4, 9), torch.float32, 0)
    with within("error"):
        for layer in (
            nn.Conv1d(4, 6, 3, padding="same", dilation=2),
            nn.Conv1d(4, 6, 2, padding="same"),
            nn.Conv1d(4, 6, 3, padding="valid", bias=False),
            nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
        ):
            whole = layer(x)
            assert_same_bits(layer(x[1]), whole[1])
        assert_same_bits(torch.conv1d(input=x, weight=x[:, :, :3]), F.conv1d(x, x[:, :, :3]))
        with torch.inference_mode():
            assert_same_bits(F.conv1d(x, x[:, :, :3]), F.conv1d(x[:], x[:, :, :3]))
        with pytest.raises(RuntimeError):
            F.conv1d(x, x[:, :3])
        with pytest.raises(RuntimeError):
            F.conv1d(x, x[:, :, :3], groups=3)
        with pytest.raises(UncoveredError):
            F.conv_transpose1d(x, x.transpose(0, 1))
        for groups in (1, 2, 4):  # of no rows
            none, w = x[:0].clone().requires_grad_(), torch.ones(4, 4 // groups, 3, requires_grad=True)
            y = F.conv1d(none, w, stride=2, groups=groups)
            grads = torch.autograd.grad(y, (none, w), y.detach())
            assert y.shape == (0, 4, 4)
            assert [g.shape for g in grads] == [none.shape, w.shape]
            assert (grads[1] == 0).all()
        with torch.autocast("cpu", torch.bfloat16):
            low = F.conv1d(x, x[:, :, :3])
            assert_same_bits(low, F.conv1d(x.bfloat16(), x[:, :, :3].bfloat16()))


def test_compiled() -> None:
    sizing, x, w, b = given("pictures", torch.float32, "cpu")

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return call(sizing, x, w, b).relu()

    leaves = [t.requires_grad_() for t in (x, w, b)]
    with samebits.batch_invariant("error"):
        got = torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
        want = f(*leaves)
    assert_same_bits(got.detach(), want.detach())
    seed = torch.ones_like(got)
    for a, c in zip(*(torch.autograd.grad(y, leaves, seed) for y in (got, want)), strict=True):
        assert_same_bits(a, c)


def test_refusals() -> None:
    x, w = torch.ones(1, 2, 5), torch.ones(3, 2, 2)
    for options, match in (
        ({"groups": 2}, "groups"),
        ({"stride": (0,)}, "stride"),
        ({"padding": (0,)}, "padding"),
        ({"dilation": (9,)}, "taps"),
        ({"bias": torch.ones(2)}, "bias"),
    ):
        with pytest.raises(ValueError, match=match):
            conv(x, w, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight"):
        conv(x, w.double())
    with pytest.raises(ValueError, match="x, weight"):
        conv(x[0], w)
