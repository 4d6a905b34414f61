"""State spaces: the naive implementation's bits, however tokens are fed, and float64's but for rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import selective_scan, selective_state_update, ssd
from samebits.backends.cuda import state_space as host
from samebits.ops import state_space
from samebits.ops.activation import activation
from samebits.testing import assert_same_bits
from tests.support import naive_state_space as naive
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def heads(
    dtype: torch.dtype = F32,
    device: str = "cpu",
    shape: tuple[int, ...] = (2, 23, 4, 6, 2, 20),
    kind: str = "normal",
) -> dict[str, Tensor]:
    """Arguments of `ssd`: rows, tokens, heads, channels of a head, groups, states."""
    rows, tokens, count, of_head, groups, states = shape
    normal = [
        case("normal", sizes, dtype, device, seed)
        for seed, sizes in enumerate(
            ((rows, tokens, count), *[(rows, tokens, groups, states)] * 2, (count,)), 1
        )
    ]
    return {
        "x": case(kind, (rows, tokens, count, of_head), dtype, device),
        "dt": normal[0],
        "A": -case("normal", (count,), F32, device, 6).abs(),
        "B": normal[1],
        "C": normal[2],
        "D": normal[3],
        "z": case(kind, (rows, tokens, count, of_head), dtype, device, 7),
        "dt_bias": case("normal", (count,), F32, device, 8) - 1,
        "initial_states": case("normal", (rows, count, of_head, states), F32, device, 9),
    }


def channels(dtype: torch.dtype = F32, device: str = "cpu", kind: str = "normal") -> dict[str, Tensor]:
    rows, count, tokens, states = 2, 37, 21, 11
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


ON = {"dt_softplus": True, "return_final_states": True}
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
def test_heads_have_the_bits_of_the_naive_implementation(device: str, dtype: torch.dtype, kind: str) -> None:
    given = heads(dtype, device, (2, 5, 2, 3, 1, 20), kind)
    y, after = ssd(**given, **ON)
    x, dt, B, C, z, states = (given[n].tolist() for n in ("x", "dt", "B", "C", "z", "initial_states"))
    A, D, bias = (given[n].tolist() for n in ("A", "D", "dt_bias"))
    want, last = [], []
    for r, h, p in np.ndindex(2, 2, 3):
        channel = naive.Channel([A[h]], D[h], states[r][h][p])
        for t in range(5):
            u = naive.softplus(naive.f32(naive.f32(dt[r][t][h]) + naive.f32(bias[h])))
            out = channel.step(x[r][t][h][p], float(u), B[r][t][0], C[r][t][0])
            want.append(float(naive.f32(out * naive.f32(naive.silu(z[r][t][h][p])))))
        last.append([float(s) for s in channel.states[-1]])
    assert_same_bits(y.permute(0, 2, 3, 1).flatten(), rounded(want, dtype))
    assert_same_bits(after.flatten(0, 2), rounded(last, F32))


@on_devices
@pytest.mark.parametrize("own", [False, True])
def test_gradients_have_the_bits_of_the_naive_implementation(device: str, own: bool) -> None:
    tokens, count, states = 7, 35, 11
    x, g = case("normal", (tokens, count), F32, device), case("normal", (tokens, count), F32, device, 1)
    steps = case("normal", (tokens, count), F32, device, 2).abs()
    decays = -case("normal", (count, states if own else 1), F32, device, 3).abs()
    b, c = (case("normal", (tokens, 1, states), F32, device, seed) for seed in (4, 5))
    before, of_after = (case("normal", (2, count, states), F32, device, seed) for seed in (6, 7))
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    given = (g, of_after, x, steps, decays, b, c, before, offsets, own)
    found = state_space._backend(x).scan_backward(*given)
    dv, dw, db, dc, da, of_before = (t.cpu() for t in found)
    terms: dict[tuple[str, int], list[Any]] = {}
    for s, (start, stop) in enumerate(((0, 3), (3, 7))):
        for d in range(count):
            channel = naive.Channel(decays[d].tolist(), None, before[s, d].tolist())
            for t in range(start, stop):
                channel.step(float(x[t, d]), float(steps[t, d]), b[t, 0].tolist(), c[t, 0].tolist())
            want = channel.backward(g[start:stop, d].tolist(), of_after[s, d].tolist(), own)
            assert_same_bits(dv[start:stop, d], torch.tensor(np.array(want["dv"])))
            assert_same_bits(dw[start:stop, d], torch.tensor(np.array(want["w"])))
            assert_same_bits(of_before[s, d], torch.tensor(np.array(want["state"])))
            if own:
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


def _recurrence(
    u: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``[rows, tokens, channels]`` in float64."""
    out = []
    for t in range(x.shape[1]):
        state = state * torch.exp(u[:, t, :, None] * A) + (u[:, t] * x[:, t])[..., None] * B[:, t]
        out.append((state * C[:, t]).sum(-1))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_results_and_gradients_are_those_of_float64(dtype: torch.dtype) -> None:
    given = {k: t.to(dtype).float() for k, t in heads(dtype).items()}
    ours = {k: t.to(dtype if k in ("x", "B", "C", "z") else F32).requires_grad_() for k, t in given.items()}
    wide = {k: t.double().requires_grad_() for k, t in given.items()}
    y, after = ssd(**ours, **ON)
    of_head, per_group = 6, 12
    u = F.softplus(wide["dt"] + wide["dt_bias"]).repeat_interleave(of_head, 2)
    A = wide["A"].repeat_interleave(of_head)[:, None]
    B, C = (wide[n].repeat_interleave(per_group, 2) for n in "BC")
    want, last = _recurrence(u, wide["x"].flatten(2), A, B, C, wide["initial_states"].flatten(1, 2))
    want = want.view(y.shape) + wide["D"][:, None] * wide["x"]
    want, last = want * F.silu(wide["z"]), last.view(after.shape)
    g, of_after = torch.randn(y.shape).to(dtype), torch.randn(after.shape)
    got = torch.autograd.grad([y, after], [*ours.values()], [g, of_after])
    expected = torch.autograd.grad([want, last], [*wide.values()], [g.double(), of_after.double()])
    for name, a, b in zip(("y", "after", *ours), (y, after, *got), (want, last, *expected), strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < (1e-6 if a.dtype == F32 and dtype == F32 else 4e-3), name


@on_devices
@in_dtypes
def test_tokens_have_the_same_bits_however_they_are_fed(device: str, dtype: torch.dtype) -> None:
    given = heads(dtype, device)
    y, after = ssd(**given, **ON)
    tokens = {k: given[k] for k in ("x", "dt", "B", "C", "z")}
    rest = {k: given[k] for k in ("A", "D", "dt_bias")}

    def fed(cuts: list[int], rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        state, found = given["initial_states"][rows], []
        for start, stop in itertools.pairwise(cuts):
            part = {k: t[rows, start:stop] for k, t in tokens.items()}
            out, state = ssd(**part, **rest, initial_states=state, **ON)
            found.append(out)
        return torch.cat(found, 1), state

    for cuts in ([0, 9, 23], [*range(24)], [0, 1, 17, 18, 23]):
        for a, b in zip(fed(cuts), (y, after), strict=True):
            assert_same_bits(a, b)
    for a, b in zip(fed([0, 23], slice(1, 2)), (y[1:], after[1:]), strict=True):
        assert_same_bits(a, b)
    state = given["initial_states"].clone()
    wide = (4, 6)
    options = {
        "A": rest["A"][:, None, None].expand(*wide, 20),
        "D": rest["D"][:, None].expand(wide),
        "dt_bias": rest["dt_bias"][:, None].expand(wide),
    }
    for contiguous in (False, True):  # one step and decay of a head, or of each channel
        state = given["initial_states"].clone()
        for t in range(23):
            at = {k: v[:, t] for k, v in tokens.items()}
            at["dt"] = at["dt"][..., None].expand(-1, *wide)
            if contiguous:
                options = {k: v.contiguous() for k, v in options.items()}
                at["dt"] = at["dt"].contiguous()
            out = selective_state_update(state, **at, **options, dt_softplus=True)
            assert_same_bits(out, y[:, t])
        assert_same_bits(state, after)


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


LAYOUTS = ("left padding", "right padding", "packed", "numbered", "beside others")


@on_devices
@in_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_padding_and_packing(device: str, dtype: torch.dtype, layout: str) -> None:
    """Two sequences of 9 and 14 tokens: apart, and in one call."""
    given = heads(dtype, device)
    del given["initial_states"]
    tokens = ("x", "dt", "B", "C", "z")
    ends = (9, 14)

    def run(arguments: dict[str, Tensor], seen: Callable[[Tensor], Tensor], **options: Any) -> Any:
        leaves = {k: t.detach().clone().requires_grad_() for k, t in arguments.items()}
        y = ssd(**leaves, dt_softplus=True, **options)
        seeds = case("normal", (23, 4, 6), dtype, device, 20)
        return seen(y), torch.autograd.grad(seen(y), [*leaves.values()], seeds), [*leaves]

    def parts(t: Tensor) -> list[Tensor]:
        return [t[0, :9], t[1, :14]]

    packed = {k: torch.cat(parts(t))[None] if k in tokens else t for k, t in given.items()}
    cuts = torch.tensor([0, 9, 23], device=device)
    want, grads, names = run(packed, lambda y: y[0], cu_seqlens=cuts)
    if layout == "packed":
        for part, alone in zip(want.split(ends), (0, 1), strict=True):
            single = {k: parts(t)[alone][None] if k in tokens else t for k, t in given.items()}
            assert_same_bits(ssd(**single, dt_softplus=True)[0], part)
        return
    if layout == "numbered":
        numbers = torch.tensor([[5] * 9 + [2] * 14], device=device)
        got, found, _ = run(packed, lambda y: y[0], seq_idx=numbers)
    else:
        left, more = layout == "left padding", 5 if layout == "beside others" else 0

        def padded(name: str, t: Tensor) -> Tensor:
            if name not in tokens:
                return t
            rows = [
                F.pad(p, (0, 0) * (p.ndim - 1) + ((17 - len(p), 0) if left else (0, 17 - len(p))))
                for p in parts(t)
            ]
            return torch.stack(rows + [torch.ones_like(rows[0])] * more)

        def seen(y: Tensor) -> Tensor:
            return torch.cat([r[17 - n :] if left else r[:n] for r, n in zip(y, ends, strict=False)])

        got, found, _ = run({k: padded(k, t) for k, t in given.items()}, seen)
        found = [seen(t) if name in tokens else t for name, t in zip(names, found, strict=True)]
        grads = [t[0] if name in tokens else t for name, t in zip(names, grads, strict=True)]
    assert_same_bits(got, want)
    for name, a, b in zip(names, found, grads, strict=True):
        assert_same_bits(a + 0, b + 0, name)  # the sign of zeros apart


def test_states_of_a_view_are_written() -> None:
    given = channels()
    whole = torch.zeros(2, 3, 37, 11)
    alone = torch.zeros(2, 37, 11)
    at = [given[n][..., 0] for n in ("u", "delta")] + [given["A"], given["B"][..., 0], given["C"][..., 0]]
    selective_state_update(whole[:, 1], *at)
    selective_state_update(alone, *at)
    assert_same_bits(whole[:, 1].contiguous(), alone)
    assert not whole[:, ::2].any()


ERRORS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception]]] = {
    r"x: expected \[batch, T, heads, P\]": (lambda a: ssd(**a | {"x": a["x"][0]}), ValueError),
    r"dt: expected shape \(2, 23, 4\)": (lambda a: ssd(**a | {"dt": a["dt"][:, 1:]}), ValueError),
    r"A: expected shape \(4,\)": (lambda a: ssd(**a | {"A": a["A"][:3]}), ValueError),
    r"C: expected shape": (lambda a: ssd(**a | {"C": a["C"][..., 1:]}), ValueError),
    r"D: expected shape \(4,\) or \(4, 6\)": (lambda a: ssd(**a | {"D": a["D"][:1]}), ValueError),
    "B: expected groups that divide 4": (
        lambda a: ssd(**a | {n: a[n].repeat(1, 1, 2, 1)[:, :, :3] for n in "BC"}),
        ValueError,
    ),
    "B: expected a state N of 1 to 256": (
        lambda a: ssd(**{k: a[k] for k in ("x", "dt", "A")}, **{n: a[n].repeat(1, 1, 1, 20) for n in "BC"}),
        ValueError,
    ),
    "initial_states: expected shape": (
        lambda a: ssd(**a | {"initial_states": a["initial_states"][:1]}),
        ValueError,
    ),
    "seq_idx: expected no states": (lambda a: ssd(**a, seq_idx=torch.zeros(2, 23).int()), ValueError),
    "cu_seqlens: expected one dimension, and x with one row": (
        lambda a: ssd(**a, cu_seqlens=torch.tensor([0, 23])),
        ValueError,
    ),
    "cu_seqlens: expected to run from 0 to 23": (
        lambda a: ssd(
            *(a[k][:1] if k != "A" else a[k] for k in ("x", "dt", "A", "B", "C")),
            cu_seqlens=torch.tensor([0, 2]),
        ),
        ValueError,
    ),
    "x: expected bfloat16, float16 or float32": (lambda a: ssd(**a | {"x": a["x"].double()}), TypeError),
    "state: expected a dense float32 tensor": (
        lambda a: selective_state_update(torch.zeros(2, 4, 6, 20).bfloat16(), a["x"][:, 0], *[a["x"]] * 4),
        TypeError,
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_are_refused(message: str) -> None:
    call, error = ERRORS[message]
    with pytest.raises(error, match=message):
        call(heads())


def test_a_step_has_no_gradients() -> None:
    given = channels()
    at = [given[n][..., 0] for n in ("u", "delta")] + [given["A"], given["B"][..., 0], given["C"][..., 0]]
    with pytest.raises(NotImplementedError, match="A: gradients are not implemented"):
        selective_state_update(torch.zeros(2, 37, 11), *at[:2], at[2].requires_grad_(), *at[3:])


def test_the_operators_are_well_formed() -> None:
    given = heads(shape=(1, 3, 2, 2, 1, 4))
    x, dt, A, B, C = (given[k].requires_grad_() for k in ("x", "dt", "A", "B", "C"))
    args = (
        x.flatten(2)[0],
        dt[0],
        A[:, None],
        B[0],
        C[0],
        None,
        None,
        torch.tensor([0, 3]).int(),
        False,
        False,
    )
    torch.library.opcheck(torch.ops.samebits.state_space.default, args)


def test_no_tokens() -> None:
    given = heads(shape=(2, 0, 2, 3, 1, 4))
    y, after = ssd(**given, **ON)
    assert y.shape == (2, 0, 2, 3)
    assert_same_bits(after, given["initial_states"])


@pytest.mark.parametrize(("size", "own"), [(5, False), (16, True), (128, False), (256, False)])
def test_kernels_compile(size: int, own: bool) -> None:
    specs = [host.kernel_spec(BF16, size, own, s) for s in host.schedules(size, own)]
    step = host.kernel_spec(F16, size, own, host.Scan(1, 1), step=True, softplus=True, dt=BF16, gate=F32)
    for spec in (*specs, step, host.backward_spec(F32, BF16, size, own)):
        cubin = resources(spec, "sm_90a" if spec.smem else "sm_80")
        assert cubin.static_smem <= 48 << 10
        assert cubin.spill_bytes < 64 or size == 256


def test_a_gpu_full_of_blocks_keeps_more_channels_in_a_thread() -> None:
    assert [host.choose(128, False, 4096, 1, rows, 132).kept for rows in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert host.choose(16, True, 8192, 1, 8, 132).kept == 2


def test_the_public_names_are_these() -> None:
    assert {"ssd", "selective_scan", "selective_state_update", "causal_conv1d"} <= {*samebits.__all__}
    assert math.isinf(ssd.__defaults__[-2][1])  # as mamba-ssm's
