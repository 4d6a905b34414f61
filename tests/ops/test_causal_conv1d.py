"""Short causal convolutions: the naive implementation's bits, and PyTorch's under the mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import causal_conv1d, causal_conv1d_update
from samebits.backends.cuda import causal_conv1d as host
from samebits.backends.cuda import compiler
from samebits.testing import KINDS, assert_same_bits
from tests.support import naive_state_space as naive
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import NAMES, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def given(
    dtype: torch.dtype = F32,
    device: str = "cpu",
    shape: tuple[int, ...] = (2, 24, 37, 4),
    kind: str = "normal",
) -> tuple[Tensor, Tensor, Tensor]:
    rows, channels, tokens, width = shape
    x = case(kind, (rows, channels, tokens), dtype, device)
    return (
        x,
        case("normal", (channels, width), dtype, device, 1),
        case("normal", (channels,), dtype, device, 2),
    )


def last(x: Tensor) -> Tensor:
    """The same values, channels side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@on_devices
@in_dtypes
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, kind: str, activation: str | None
) -> None:
    x, weight, bias = given(dtype, device, (2, 3, 9, 4), kind)
    before = case("normal", (2, 3, 3), dtype, device, 3)
    y = causal_conv1d(x, weight, bias, initial_states=before, activation=activation)
    seen, want = torch.cat((before, x), 2), []
    with np.errstate(all="ignore"):
        for b, d, t in np.ndindex(2, 3, 9):
            taps = seen[b, d, t : t + 4].tolist()
            args = weight[d].tolist(), float(bias[d]), NAMES[dtype], activation is not None
            want.append(naive.convolved(taps, *args))
    assert_same_bits(y.flatten(), rounded(want, dtype))


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_bits_and_gradients_are_those_of_pytorchs_functions_under_the_mode(
    device: str, dtype: torch.dtype, activation: str | None
) -> None:
    ours, theirs = ([t.clone().requires_grad_() for t in given(dtype, device)] for _ in range(2))
    y = causal_conv1d(*ours, activation=activation)
    g = case("normal", tuple(y.shape), dtype, device, 4)
    with samebits.batch_invariant():
        x, weight, bias = theirs
        want = F.conv1d(x, weight[:, None], bias, padding=3, groups=24)[..., :37]
        want = F.silu(want) if activation else want
        expected = torch.autograd.grad(want, theirs, g)
    assert_same_bits(y, want)
    for a, b in zip(torch.autograd.grad(y, ours, g), expected, strict=True):
        assert_same_bits(a, b)


@on_devices
@in_dtypes
@pytest.mark.parametrize("shape", [(2, 24, 37, 4), (1, 5, 11, 3), (3, 512, 8, 2), (1, 2, 5, 1)])
@pytest.mark.parametrize("layout", [last, Tensor.contiguous, lambda x: x[..., ::2]])
def test_tokens_have_the_same_bits_however_they_are_fed(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], layout: Callable[[Tensor], Tensor]
) -> None:
    x, weight, bias = given(dtype, device, shape)
    width, plain = shape[3], layout(x).contiguous()
    want, states = causal_conv1d(plain, weight, bias, activation="silu", return_final_states=True)
    x = layout(x)
    tokens = x.shape[2]
    got = causal_conv1d(x, weight, bias, activation="silu")
    assert_same_bits(got, want)
    for extra in (0, 1, 3):
        state = torch.zeros(len(x), x.shape[1], width - 1 + extra, dtype=dtype, device=device)
        cuts = [0, tokens // 2, *range(tokens // 2 + 1, tokens + 1)]
        for start, stop in itertools.pairwise(cuts):
            out = causal_conv1d_update(x[..., start:stop], state, weight, bias, "silu")
            assert_same_bits(out, want[..., start:stop])
        assert_same_bits(state[..., extra:], states)
        first = causal_conv1d_update(x[..., 0], torch.zeros_like(state), weight, bias, "silu")
        assert_same_bits(first, want[..., 0])
    half, state = causal_conv1d(
        x[..., : tokens // 2], weight, bias, return_final_states=True, activation="silu"
    )
    rest = causal_conv1d(x[..., tokens // 2 :], weight, bias, initial_states=state, activation="silu")
    assert_same_bits(torch.cat((half, rest), 2), want)


@on_devices
@in_dtypes
@pytest.mark.parametrize("layout", [last, Tensor.contiguous])
def test_packed_sequences_do_not_see_each_other(
    device: str, dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    x, weight, bias = given(dtype, device, (1, 24, 37, 4))
    g = case("normal", tuple(x.shape), dtype, device, 3)
    ends = [0, 2, 2, 3, 20, 37]
    leaves = [layout(x).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    numbers = torch.repeat_interleave(torch.arange(5), torch.tensor(ends).diff())[None].to(device)
    found = []
    for options in ({"cu_seqlens": torch.tensor(ends, device=device)}, {"seq_idx": numbers}):
        y = causal_conv1d(*leaves, activation="silu", **options)
        found.append((y, *torch.autograd.grad(y, leaves, g)))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)
    y, of_x, *_ = found[0]
    for start, stop in itertools.pairwise(ends):
        if start < stop:
            part = x[..., start:stop].detach().requires_grad_()
            alone = causal_conv1d(part, weight, bias, activation="silu")
            assert_same_bits(alone, y[..., start:stop])
            assert_same_bits(torch.autograd.grad(alone, part, g[..., start:stop])[0], of_x[..., start:stop])


def test_gradients_of_states() -> None:
    x, weight, bias = given(F32)
    before = case("normal", (2, 24, 3), F32, "cpu", 3)
    leaves = [t.requires_grad_() for t in (x, weight, bias, before)]
    y, states = causal_conv1d(x, weight, bias, None, before, True, "silu")
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    seen = torch.cat((doubles[3], doubles[0]), 2)
    want = F.silu(F.conv1d(seen, doubles[1][:, None], doubles[2], groups=24))
    g = [torch.randn(y.shape), torch.randn(states.shape)]
    got = torch.autograd.grad([y, states], leaves, g)
    expected = torch.autograd.grad([want, seen[..., -3:]], doubles, [t.double() for t in g])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


ERRORS: dict[str, tuple[Callable[..., object], type[Exception]]] = {
    r"x, weight: expected \[B, D, T\] and \[D, W\]": (lambda x, w, b: causal_conv1d(x[0], w, b), ValueError),
    r"bias: expected shape \(24,\)": (lambda x, w, b: causal_conv1d(x, w, b[1:]), ValueError),
    "weight: expected torch.float32 like x": (lambda x, w, b: causal_conv1d(x, w.half(), b), TypeError),
    "activation: expected None, 'silu' or 'swish', got 'gelu'": (
        lambda x, w, b: causal_conv1d(x, w, b, activation="gelu"),
        ValueError,
    ),
    r"initial_states: expected shape \(2, 24, 3\)": (
        lambda x, w, b: causal_conv1d(x, w, b, initial_states=x[..., :2]),
        ValueError,
    ),
    "seq_idx: expected no states": (
        lambda x, w, b: causal_conv1d(x, w, b, torch.zeros(2, 37).int(), return_final_states=True),
        ValueError,
    ),
    r"seq_idx: expected shape \(2, 37\)": (
        lambda x, w, b: causal_conv1d(x, w, b, torch.zeros(2, 36).int()),
        ValueError,
    ),
    "seq_idx: expected a tensor of int32 or int64": (
        lambda x, w, b: causal_conv1d(x, w, b, torch.zeros(2, 37)),
        TypeError,
    ),
    r"conv_state: expected shape \(2, 24, 3\) or a longer one": (
        lambda x, w, b: causal_conv1d_update(x, x[..., :2].clone(), w, b),
        ValueError,
    ),
    "conv_state: expected a dense float32 tensor": (
        lambda x, w, b: causal_conv1d_update(x, x.half(), w, b),
        TypeError,
    ),
    "x: gradients are not implemented": (
        lambda x, w, b: causal_conv1d_update(x.requires_grad_(), x[..., :3].detach().clone(), w, b),
        NotImplementedError,
    ),
    "conv_state: gradients are not implemented": (
        lambda x, w, b: causal_conv1d_update(x, x[..., :3].clone().requires_grad_() * 1, w, b),
        NotImplementedError,
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_are_refused(message: str) -> None:
    call, error = ERRORS[message]
    with pytest.raises(error, match=message):
        call(*given())


def test_the_operator_is_well_formed() -> None:
    x, weight, bias = (t.requires_grad_() for t in given(shape=(1, 3, 5, 2)))
    before = torch.randn(1, 3, 1, requires_grad=True)
    args: tuple[Any, ...] = x, weight, bias, before, None, True
    torch.library.opcheck(torch.ops.samebits.causal_conv1d.default, args)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [last, Tensor.contiguous])
def test_silu_of_every_value_of_16_bits(layout: Callable[[Tensor], Tensor]) -> None:
    for dtype in (BF16, F16):
        x = layout(torch.arange(1 << 16).to(torch.int16).view(dtype).view(1, 256, 256))
        weight = torch.ones(256, 1, dtype=dtype)
        got = causal_conv1d(x.cuda(), weight.cuda(), activation="silu")
        assert_same_bits(got.cpu(), causal_conv1d(x, weight, activation="silu"))
        state = torch.empty(256, 256, 0, dtype=dtype, device="cuda")
        step = causal_conv1d_update(x[0].cuda(), state, weight.cuda(), activation="silu")
        assert_same_bits(step, got[0])


@pytest.mark.gpu
@in_dtypes
@pytest.mark.parametrize("shape", [(1, 264, 1032, 4), (4, 136, 520, 4), (2, 37, 131, 3), (3, 64, 64, 1)])
@pytest.mark.parametrize("layout", [last, Tensor.contiguous, lambda x: x[..., ::2]])
def test_a_gpu_has_the_bits_of_a_cpu(
    dtype: torch.dtype, shape: tuple[int, ...], layout: Callable[[Tensor], Tensor]
) -> None:
    for i, kind in enumerate(KINDS):
        x, weight, bias = given(dtype, "cpu", shape, kind)
        g = layout(case(KINDS[-i], tuple(x.shape), dtype, "cpu", 4))
        before = case("normal", (*x.shape[:2], shape[3] - 1), dtype, "cpu", 3)
        numbers = torch.arange(x.shape[2]).expand(len(x), -1) // (2 + i)
        x = layout(x)
        silu, packed, results = (None if i % 4 == 1 else "silu"), i % 2 == 0, []
        for device in ("cpu", "cuda"):
            leaves = [t.to(device).detach().requires_grad_() for t in (x, weight, bias, before)]
            leaves = leaves[:3] if packed else leaves
            options: dict[str, Any] = {"seq_idx": numbers[..., : x.shape[2]].to(device)} if packed else {}
            options |= {} if packed else {"initial_states": leaves[3]}
            y: Any = causal_conv1d(*leaves[:3], activation=silu, **options)
            results.append([y, *torch.autograd.grad(y, leaves, g.to(device))])
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(theirs.cpu(), ours, f"{kind}, {silu}, {packed=}")


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    turn = compiler.ARCHITECTURES.index(arch)
    fast = {"fast_silu": arch == "sm_90a"}
    specs = [
        host.kernel_spec(BF16, 4, 4, True, "SILU", False, turn % 2 == 1, **fast),
        host.kernel_spec(BF16, 4, 8, False, "SILU", False, turn % 2 == 0, 32, **fast),
        host.kernel_spec(F16, 4, 4, True, "SILU_GRADIENT"),
        host.kernel_spec(F32, 1 + turn % 4, 1, turn % 2 == 0, "SUM", True, lanes=4),
        host.kernel_spec(BF16, 4, 8, False, "SUM", True, lanes=32),
        host.step_spec(BF16, 4, 8, 3 + turn % 2, True, **fast),
        host.step_spec(F16, 3, 1, 0, False),
        host.sums_spec(BF16, 4, 8, turn % 2 == 0, turn % 2 == 1, 64),
        host.sums_spec(F32, 1 + turn % 4, 4, turn % 2 == 1, False, 32),
    ]
    for spec in specs:
        cubin = resources(spec, arch)
        assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0), spec
