"""The state space of Mamba: the naive implementation's bits, however tokens are fed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import selective_scan, selective_state_update
from samebits.backends.reference import state_space as reference
from samebits.ops.activation import activation
from samebits.testing import assert_same_bits
from tests.support import naive_state_space as naive
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def channels(
    dtype: torch.dtype = F32,
    device: str = "cpu",
    kind: str = "normal",
    shape: tuple[int, int, int, int] = (2, 37, 21, 11),
) -> dict[str, Tensor]:
    rows, count, tokens, states = shape
    return {
        "u": case(kind, (rows, count, tokens), dtype, device),
        "delta": case("normal", (rows, count, tokens), dtype, device, 1),
        "A": -case("normal", (count, states), F32, device, 2).abs(),
        "B": case("normal", (rows, states, tokens), dtype, device, 3),
        "C": case("normal", (rows, states, tokens), dtype, device, 4),
        "D": case("normal", (count,), F32, device, 5),
        "z": case("normal", (rows, count, tokens), dtype, device, 6),
        "delta_bias": case("normal", (count,), F32, device, 7) - 1,
        "initial_state": case("normal", (rows, count, states), F32, device, 8),
    }


OF = {"delta_softplus": True, "return_last_state": True}


@on_devices
@pytest.mark.parametrize("name", ["softplus", "sigmoid"])
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "special"])
def test_functions_have_the_bits_of_the_naive_ones(device: str, name: str, kind: str) -> None:
    x = case(kind, (400,), F32, device)
    x[:100] *= 8
    want = [float(getattr(naive, name)(v)) for v in x.tolist()]
    assert_same_bits(activation(x, name), rounded(want, F32))


def test_softplus_is_accurate_for_small_steps() -> None:
    x = torch.linspace(-80, 30, 10_001)
    want = F.softplus(x.double(), threshold=1000)
    assert ((activation(x, "softplus") - want) / want).abs().max() < 4e-7


@on_devices
@in_dtypes
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
def test_channels_have_the_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, kind: str
) -> None:
    """With states of three pieces."""
    given = channels(dtype, device, kind, (2, 3, 5, 20))
    y, after = selective_scan(**given, **OF)
    u, delta, A, B, C, D, z, bias, states = (t.tolist() for t in given.values())
    want, last = [], []
    for r, d in np.ndindex(2, 3):
        channel = naive.Channel(A[d], D[d], states[r][d])
        for t in range(5):
            step = naive.softplus(naive.f32(naive.f32(delta[r][d][t]) + naive.f32(bias[d])))
            b, c = ([row[t] for row in of[r]] for of in (B, C))
            out = channel.step(u[r][d][t], float(step), b, c)
            want.append(float(naive.f32(out * naive.f32(naive.silu(z[r][d][t])))))
        last.append([float(s) for s in channel.states[-1]])
    assert_same_bits(y.flatten(), rounded(want, dtype))
    assert_same_bits(after.flatten(0, 1), rounded(last, F32))


@on_devices
@in_dtypes
def test_channels_have_the_same_bits_however_they_are_fed(device: str, dtype: torch.dtype) -> None:
    given = channels(dtype, device)
    y, after = selective_scan(**given, **OF)
    state, first = given["initial_state"].clone(), {}
    for name, t in given.items():
        first[name] = t[..., :8] if name in ("u", "delta", "B", "C", "z") else t
    out, after_first = selective_scan(**first, **OF)
    assert_same_bits(out, y[..., :8])
    state = after_first.clone()
    for t in range(8, 21):
        at = (
            [given[n][..., t] for n in ("u", "delta")] + [given["A"]] + [given[n][..., t] for n in ("B", "C")]
        )
        step = selective_state_update(
            state, *at, given["D"], given["z"][..., t], given["delta_bias"], dt_softplus=True
        )
        assert_same_bits(step, y[..., t])
    assert_same_bits(state, after)


def test_gradients_have_the_bits_of_the_naive_implementation() -> None:
    """Of the reference."""
    tokens, count, states = 7, 35, 11
    x, g = case("normal", (tokens, count), F32, "cpu"), case("normal", (tokens, count), F32, "cpu", 1)
    steps = case("normal", (tokens, count), F32, "cpu", 2).abs()
    decays = -case("normal", (count, states), F32, "cpu", 3).abs()
    b, c = (case("normal", (tokens, 1, states), F32, "cpu", seed) for seed in (4, 5))
    before, of_after = (case("normal", (2, count, states), F32, "cpu", seed) for seed in (6, 7))
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    given = (g, of_after, x, steps, decays, b, c, before, offsets)
    dv, dw, db, dc, da, of_before = reference.scan_backward(*given)
    terms: dict[tuple[str, int], list[Any]] = {}
    for s, (start, stop) in enumerate(((0, 3), (3, 7))):
        for d in range(count):
            channel = naive.Channel(decays[d].tolist(), None, before[s, d].tolist())
            for t in range(start, stop):
                channel.step(float(x[t, d]), float(steps[t, d]), b[t, 0].tolist(), c[t, 0].tolist())
            want = channel.backward(g[start:stop, d].tolist(), of_after[s, d].tolist())
            assert_same_bits(dv[start:stop, d], torch.tensor(np.array(want["dv"])))
            assert_same_bits(dw[start:stop, d], torch.tensor(np.array(want["w"])))
            assert_same_bits(of_before[s, d], torch.tensor(np.array(want["state"])))
            assert_same_bits(da[s, d], torch.tensor(np.array(want["alpha"])))
            for which in ("b", "c"):
                for t in range(start, stop):
                    terms.setdefault((which, t), []).append(want[which][t - start])
    for (which, t), rows in terms.items():
        sums = naive.row_sum
        of_blocks = (db if which == "b" else dc)[t, 0].T.tolist()
        for n in range(states):
            want_n = naive.over_channels([row[n] for row in rows])
            assert_same_bits(torch.tensor(sums(of_blocks[n])), torch.tensor(want_n))


def test_states_of_a_view_are_written() -> None:
    given = channels()
    whole = torch.zeros(2, 3, 37, 11)
    alone = torch.zeros(2, 37, 11)
    at = [given[n][..., 0] for n in ("u", "delta")] + [given["A"], given["B"][..., 0], given["C"][..., 0]]
    selective_state_update(whole[:, 1], *at)
    selective_state_update(alone, *at)
    assert_same_bits(whole[:, 1].contiguous(), alone)
    assert not whole[:, ::2].any()


def test_a_step_has_no_gradients() -> None:
    given = channels()
    at = [given[n][..., 0] for n in ("u", "delta")] + [given["A"], given["B"][..., 0], given["C"][..., 0]]
    with pytest.raises(NotImplementedError, match="A: gradients are not implemented"):
        selective_state_update(torch.zeros(2, 37, 11), *at[:2], at[2].requires_grad_(), *at[3:])
    at[2] = at[2].detach()
    with pytest.raises(NotImplementedError, match="state: gradients are not implemented"):
        selective_state_update(torch.zeros(2, 37, 11, requires_grad=True) * 1, *at)


def test_heads_have_states_of_their_own() -> None:
    x = torch.zeros(2, 4, 6)
    with pytest.raises(ValueError, match=r"heads of Mamba 2 decode by samebits\.ssd"):
        selective_state_update(torch.zeros(2, 4, 6, 20), x, x, *[torch.zeros(2, 20)] * 3)


@pytest.mark.parametrize("limit", [(3.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (1.0,), (0.0, 1.0, 2.0)])
def test_limits_of_a_step_are_a_lower_and_an_upper_bound(limit: Any) -> None:
    state, x, of_states = torch.zeros(2, 4, 6), torch.ones(2, 4), torch.ones(2, 6)
    with pytest.raises(ValueError, match="selective_state_update: dt_limit: expected a lower and an upper"):
        selective_state_update(state, x, x, torch.ones(4, 6), of_states, of_states, dt_limit=limit)
    assert not state.any()


@pytest.mark.parametrize("limit", [(), (1.0,), (0.0, 1.0, 2.0), (3.0, 1.0)])
def test_limits_of_ssd_are_a_lower_and_an_upper_bound(limit: Any) -> None:
    x, dt, of_states = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2), torch.ones(1, 3, 1, 5)
    with pytest.raises(ValueError, match="ssd: dt_limit: expected a lower and an upper"):
        samebits.ssd(x, dt, torch.ones(2), of_states, of_states, dt_limit=limit)
