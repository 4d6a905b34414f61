"""Kernels of short causal convolutions, compiled for a CPU: the reference's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends.cuda import causal_conv1d as kernels
from samebits.backends.cuda import devices, operands
from samebits.ops import causal_conv1d as reference
from samebits.testing import KINDS, assert_same_bits, values
from tests.support import host_kernels
from tests.support.fake_gpu import INFO

pytestmark = host_kernels.needs_compiler
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Rows, channels, tokens, taps.
SHAPES = (
    *(
        (2, 24, 40, 4),
        (1, 5, 11, 3),
        (3, 8, 1, 4),
        (1, 2, 5, 1),
        (2, 40, 136, 2),
        (1, 1, 33, 4),
        (1, 8, 264, 4),
    ),
    *((2, 16, 24, 7), (1, 68, 70, 4)),
)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens": Tensor.contiguous,
    "sliced": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "at any address": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "in a wider row": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]
    ),
}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated has NaN until something is written."""

    def new_empty(t: Tensor, *size: Any, **options: Any) -> Tensor:
        return t.new_full(size[0] if isinstance(size[0], Sequence) else size, torch.nan, **options)

    host_kernels.use(monkeypatch, kernels)
    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))
    monkeypatch.setattr(Tensor, "new_empty", new_empty)


def given(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, channels, tokens, taps = shape
    sizes = (rows, channels, tokens), (channels, taps), (channels,), (rows, channels, taps - 1)
    x, weight, bias, before = (values(kind, size, dtype, i) for i, size in enumerate(sizes))
    return x, weight, bias, before


def places(rows: int, tokens: int) -> Tensor:
    numbers = torch.stack([torch.arange(tokens) // (3 + 4 * row) for row in range(rows)])
    found = reference.places(tokens, numbers, None)
    assert found is not None
    return found


CASES = [
    pytest.param(*case, KINDS[i % len(KINDS)], (BF16, F16, F32)[i % 3], id=f"{case[0]}, {case[1]}")
    for i, case in enumerate(itertools.product(SHAPES, LAYOUTS))
]


@pytest.mark.parametrize(("shape", "layout", "kind", "dtype"), CASES)
def test_tokens_and_gradients(
    shape: tuple[int, ...], layout: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, before = given(kind, shape, dtype)
    x, grad = LAYOUTS[layout](x), values(kind, tuple(x.shape), dtype, 9)
    if layout == "at any address":
        weight, bias, before = map(LAYOUTS[layout], (weight, bias, before))
    at = places(shape[0], shape[2])
    options: list[tuple[Any, ...]] = [
        (bias, before, None, True),
        (None, None, at, False),
        (bias, None, None, True),
    ]
    options += [(None, before, None, False), (bias, None, at, True)]
    for number, (b, states, packed, silu) in enumerate(options):
        args = x, weight, b, states, packed, silu
        assert_same_bits(kernels.convolved(*args), reference._forward(*args), f"{number}")
        needed = [True, True, b is not None, states is not None]
        want = reference._run_gradients(grad, *args, needed)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "on_gpu", lambda *_: (kernels, None))
            got = reference._run_gradients_on_gpu(grad, *args, needed)
        for name, ours, theirs in zip(("x", "weight", "bias", "before"), got, want, strict=True):
            assert_same_bits(ours, theirs, f"{number}: {name}")
            assert name == "before" or ours.stride() == theirs.stride(), name


@pytest.mark.parametrize("shape", [(2, 24, 4), (3, 5, 3), (1, 40, 1), (2, 16, 2)])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("extra", [0, 1, 20])
def test_steps(shape: tuple[int, ...], dtype: torch.dtype, extra: int) -> None:
    rows, channels, taps = shape
    for (i, kind), tokens, side in itertools.product(enumerate(KINDS), (1, 2, 5), (False, True)):
        x, weight, bias, _ = given(kind, (rows, channels, tokens, taps), dtype)
        state = values(kind, (rows, channels, taps - 1 + extra), dtype, 8)
        state = state.mT.contiguous().mT if side else state
        args = weight, bias if i % 2 else None, i % 3 > 0
        ours, theirs = state.clone(), state.clone()
        assert_same_bits(kernels.move_on(x, ours, *args), reference._move_on(x, theirs, *args))
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (ours, theirs)))


@pytest.mark.parametrize(("dtype", "taps"), [(F32, 4), (BF16, 8)], ids=str)
def test_weights_are_read_from_whole_addresses(
    dtype: torch.dtype, taps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads a channel's together, which on a GPU must lie at a multiple of 16 bytes."""
    found = []

    def address(t: Tensor | None) -> int:
        if t is not None and t.shape == (8, taps):
            found.append(t.data_ptr() % 16)
        return operands.address(t)

    monkeypatch.setattr(kernels, "address", address)
    x, weight, bias, _ = given("normal", (2, 8, 1, taps), dtype)
    weight = LAYOUTS["at any address"](weight)
    assert weight.data_ptr() % 16
    kernels.convolved(x, weight, bias, None, None, True)
    kernels.move_on(x, x.new_zeros(2, 8, taps), weight, bias, True)
    kernels.gradients(x, x, weight, bias, None, None, True, True, True, True)
    assert found
    assert not any(found)


def test_no_token_is_an_empty_result() -> None:
    x, weight = torch.ones(2, 8, 0, dtype=BF16), torch.ones(8, 4, dtype=BF16)
    assert reference._forward(x, weight, None, None, None, True).shape == x.shape
    assert reference._run_gradients(x, x, weight, None, None, None, True, [True] * 4)[0].shape == x.shape


def test_no_token_has_gradients_of_zero() -> None:
    x, weight = torch.empty(2, 8, 0, dtype=BF16), torch.ones(8, 4, dtype=BF16)
    _, of_x, *sums = kernels.gradients(x, x, weight, weight[:, 0], None, None, True, True, True, True)
    assert of_x.shape == x.shape
    assert not any(t.any() for t in sums)
