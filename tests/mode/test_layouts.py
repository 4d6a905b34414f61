"""Memory formats: results under the mode have their channels where PyTorch's have them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within, within  # noqa: F401 - a fixture
from tests.support.devices import DEVICES

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


Call = Callable[[Tensor], Tensor]


@functools.cache
def calls(dims: int, device: str) -> dict[str, Call]:
    """Functions of ``x[batch, 8, *sizes]``."""

    def weight(*taps: int, inputs: int = 8) -> Tensor:
        return values("normal", (8, inputs, *taps), torch.float32, 1).to(device)

    V1, V2, V3, V4 = (values("normal", (8,), torch.float32, n).abs().to(device) for n in (1, 2, 3, 4))
    W1, W2, W3, W_3D = weight(1, 1), weight(2, 2), weight(3, 3), weight(2, 3, 3)
    W_LAST = W3.contiguous(memory_format=LAST)
    DEPTHWISE, GROUPED = weight(3, 3, inputs=1), weight(3, 3, inputs=4)
    of_pictures: dict[str, Call] = {
        "conv2d": lambda x: F.conv2d(x, W3, V2, padding=1),
        "conv2d, one tap": lambda x: F.conv2d(x, W1),
        "conv2d, strides": lambda x: F.conv2d(x, W2, stride=2),
        "conv2d, depthwise": lambda x: F.conv2d(x, DEPTHWISE, V2, groups=8),
        "conv2d, groups": lambda x: F.conv2d(x, GROUPED, V2, groups=2),
        "conv2d, by the weight": lambda x: F.conv2d(x.contiguous(), W_LAST, padding=1),
        "group_norm": lambda x: F.group_norm(x, 2, V1, V2),
        "instance_norm": lambda x: F.instance_norm(x, weight=V1),
        "batch_norm": lambda x: F.batch_norm(x, V1, V2, V3, V4),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "avg_pool2d, a last window": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        "avg_pool2d, one picture": lambda x: F.avg_pool2d(x[0], 2),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 5)),
        "adaptive_avg_pool2d, whole": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_avg_pool2d, same": lambda x: F.adaptive_avg_pool2d(x, 6),
        "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
        "bilinear": lambda x: F.interpolate(x, (9, 4), mode="bilinear"),
        "bicubic": lambda x: F.interpolate(x, (9, 4), mode="bicubic"),
        "area": lambda x: F.interpolate(x, (3, 4), mode="area"),
        "silu": F.silu,
        "a broadcast product": lambda x: x * V1[:, None, None],
    }
    of_clips: dict[str, Call] = {
        "conv3d": lambda x: F.conv3d(x, W_3D, V2, padding=1),
        "group_norm": lambda x: F.group_norm(x, 2),
        "instance_norm": F.instance_norm,
        "batch_norm": lambda x: F.batch_norm(x, V1, V2),
        "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
        "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 2),
        "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
        "trilinear": lambda x: F.interpolate(x, (3, 9, 4), mode="trilinear"),
    }
    return of_pictures if dims == 2 else of_clips


@functools.cache
def pictures(device: str, *sizes: int) -> dict[str, Tensor]:
    """One tensor in several layouts."""
    last = LAST if len(sizes) == 2 else LAST_3D
    x = values("normal", (2, 8, *sizes), torch.float32, 0).to(device)
    wide = torch.cat([x, x], 1).contiguous(memory_format=last)
    bordered = F.pad(x, (1, 2) * len(sizes)).contiguous(memory_format=last)
    return {
        "contiguous": x,
        "channels last": x.contiguous(memory_format=last),
        "some channels": wide[:, :8],
        "a part": bordered[(..., *(slice(1, -2) for _ in sizes))],
    }


SIZES = {2: (6, 6), 3: (4, 6, 6)}
CASES = [(d, f, x) for d in SIZES for f in calls(d, "cpu") for x in pictures("cpu", *SIZES[d])]


def steps(t: Tensor) -> list[int]:
    """Strides that mean anything."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size != 1]


@pytest.mark.parametrize(("dims", "name", "layout"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_results_have_the_strides_of_pytorch(
    device: str,
    dims: int,
    name: str,
    layout: str,
    within: Within,  # noqa: F811
) -> None:
    f, x = calls(dims, device)[name], pictures(device, *SIZES[dims])[layout]
    want = f(x)
    plain = x.contiguous()
    leaf = x.detach().requires_grad_()
    with within("error"):
        got, same = f(leaf), f(plain)
    assert steps(got) == steps(want)
    assert_same_bits(got.detach(), same)
    got.backward(torch.ones_like(got))
    assert leaf.grad is not None
    if x.is_contiguous() or x.is_contiguous(memory_format=LAST if x.ndim == 4 else LAST_3D):
        assert leaf.grad.stride() == x.stride()  # which autograd promises of a dense leaf


@pytest.mark.parametrize("dims", SIZES)
def test_compiled_results_have_them_too(dims: int) -> None:
    torch._dynamo.reset()
    functions, given = calls(dims, "cpu"), pictures("cpu", *SIZES[dims])["channels last"]

    def every(x: Tensor) -> list[Tensor]:
        return [f(x) for f in functions.values()]

    compiled = torch.compile(every, backend="aot_eager", fullgraph=True)
    with samebits.batch_invariant("error"):
        eager, traced = every(given), compiled(given)
    for name, want, got in zip(functions, eager, traced, strict=True):
        assert steps(got) == steps(want), name
        assert_same_bits(got, want)
