"""The state space of Mamba 2: float64's results, tokens however they are fed, states, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import RecurrentState, lightning_attention, ssd
from samebits.testing import assert_same_bits
from tests.support.devices import DEVICES

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HEADS, SIZE, GROUPS, STATES = 4, 12, 2, 20
TOKENS = ("x", "dt", "B", "C", "z")
ON = {"dt_softplus": True, "return_final_states": True}
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)


def operands(
    dtype: torch.dtype = F32, device: str = "cpu", rows: int = 2, tokens: int = 70
) -> dict[str, Any]:
    r = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=r)

    given = {
        "x": normal(rows, tokens, HEADS, SIZE).to(dtype),
        "dt": normal(rows, tokens, HEADS).to(dtype),
        "A": -normal(HEADS).abs(),
        "B": (normal(rows, tokens, GROUPS, STATES) / 3).to(dtype),
        "C": (normal(rows, tokens, GROUPS, STATES) / 3).to(dtype),
        "D": normal(HEADS),
        "z": normal(rows, tokens, HEADS, SIZE).to(dtype),
        "dt_bias": normal(HEADS) - 1,
        "initial_states": normal(rows, HEADS, SIZE, STATES),
    }
    return {name: t.to(device) for name, t in given.items()}


def part(given: dict[str, Any], start: int, stop: int, rows: slice = slice(None)) -> dict[str, Any]:
    return {k: t[rows, start:stop] if k in TOKENS else t for k, t in given.items()}


def in_float64(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    u, state, out = F.softplus(given["dt"] + given["dt_bias"]), given["initial_states"], []
    B, C = (given[n].repeat_interleave(HEADS // GROUPS, 2) for n in "BC")
    for t in range(u.shape[1]):
        decay = torch.exp(u[:, t] * given["A"])[..., None, None]
        state = state * decay + (u[:, t, :, None] * given["x"][:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(out, 1) + given["D"][:, None] * given["x"]
    return y * F.silu(given["z"]), state


@pytest.mark.parametrize(("dtype", "error"), [(F32, 3e-5), (BF16, 2e-2), (F16, 4e-3)], ids=str)
def test_results_and_gradients_are_those_of_float64(dtype: torch.dtype, error: float) -> None:
    given = {k: t.requires_grad_() for k, t in operands(dtype).items()}
    wide = {k: t.detach().double().requires_grad_() for k, t in given.items()}
    y, state = ssd(**given, **ON)
    want = in_float64(wide)
    r = torch.Generator().manual_seed(1)
    seeds = torch.randn(y.shape, generator=r).to(dtype), torch.randn(state.matrix.shape, generator=r)
    got = torch.autograd.grad([y, state.matrix], [*given.values()], seeds)
    expected = torch.autograd.grad(want, [*wide.values()], [s.double() for s in seeds])
    for name, a, b in zip(("y", "state", *given), (y, state.matrix, *got), (*want, *expected), strict=True):
        assert (a.double() - b).norm() / b.norm() < error, name


def test_it_is_linear_attention() -> None:
    """Steps of 1, and no more than x, B and C."""
    given = operands(BF16)
    x, A, B, C = (given[n] for n in ("x", "A", "B", "C"))
    y, state = ssd(x, torch.ones(x.shape[:3]), A, B, C, return_final_states=True)
    want, of = lightning_attention(C, B, x, A.expand(x.shape[:3]), scale=1.0, output_final_state=True)
    assert of is not None
    assert_same_bits(y, want)
    assert_same_bits(state.matrix, of.matrix.mT)


@on_devices
@in_dtypes
def test_tokens_have_the_same_bits_however_they_are_fed(device: str, dtype: torch.dtype) -> None:
    given = operands(dtype, device)
    y, after = ssd(**given, **ON)

    def fed(cuts: list[int], rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        state, found = given["initial_states"][rows], []
        for start, stop in itertools.pairwise(cuts):
            of = part(given, start, stop, rows) | {"initial_states": state}
            out, state = ssd(**of, **ON)
            found.append(out)
        return torch.cat(found, 1), state.matrix

    for cuts in ([0, 9, 70], [0, 60, *range(61, 71)], [0, 1, 64, 65, 70]):
        for a, b in zip(fed(cuts), (y, after.matrix), strict=True):
            assert_same_bits(a, b)
    for a, b in zip(fed([0, 70], slice(1, 2)), (y[1:], after.matrix[1:]), strict=True):
        assert_same_bits(a, b)


def test_states_are_updated_copied_and_taken_back() -> None:
    given = operands(BF16)
    _, state = ssd(**part(given, 0, 60), **ON)
    assert isinstance(state, RecurrentState)
    kept = state.clone()
    rest = part(given, 60, 70) | {"initial_states": state}
    want, after = ssd(**rest, **ON)
    assert after is state
    assert_same_bits(ssd(**rest | {"initial_states": kept}, dt_softplus=True), want)  # kept as it is
    assert_same_bits(ssd(**rest | {"initial_states": kept}, **ON)[0], want)
    swapped = ssd(
        **{k: t.flip(0) if k in TOKENS else t for k, t in part(given, 0, 60).items()}
        | {"initial_states": given["initial_states"].flip(0)},
        **ON,
    )[1]
    again = ssd(**rest | {"initial_states": swapped[torch.tensor([1, 0])]}, **ON)
    assert_same_bits(again[0], want)
    more = ssd(**part(given, 60, 64) | {"initial_states": ssd(**part(given, 0, 60), **ON)[1]}, **ON)[1]
    assert_same_bits(ssd(**rest | {"initial_states": more.cut(4)}, **ON)[0], want)


LAYOUTS = ("left padding", "right padding", "packed", "numbered", "beside others")


@on_devices
@in_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_padding_and_packing(device: str, dtype: torch.dtype, layout: str) -> None:
    """Two sequences of 9 and 14 tokens: apart, and in one call. Padding is NaN."""
    given = operands(dtype, device, tokens=23)
    del given["initial_states"]
    ends = (9, 14)
    seeds = torch.randn(23, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def run(arguments: dict[str, Tensor], seen: Callable[[Tensor], Tensor], **options: Any) -> Any:
        leaves = {k: t.detach().clone().requires_grad_() for k, t in arguments.items()}
        y = ssd(**leaves, dt_softplus=True, **options)
        return seen(y), torch.autograd.grad(seen(y), [*leaves.values()], seeds), [*leaves]

    def parts(t: Tensor) -> list[Tensor]:
        return [t[0, :9], t[1, :14]]

    packed = {k: torch.cat(parts(t))[None] if k in TOKENS else t for k, t in given.items()}
    cuts = torch.tensor([0, 9, 23], device=device)
    want, grads, names = run(packed, lambda y: y[0], cu_seqlens=cuts)
    if layout == "packed":
        for of, alone in zip(want.split(ends), (0, 1), strict=True):
            single = {k: parts(t)[alone][None] if k in TOKENS else t for k, t in given.items()}
            assert_same_bits(ssd(**single, dt_softplus=True)[0], of)
        return
    if layout == "numbered":
        numbers = torch.tensor([[5] * 9 + [2] * 14], device=device)
        got, found, _ = run(packed, lambda y: y[0], seq_idx=numbers)
    else:
        left, more = layout == "left padding", 5 if layout == "beside others" else 0

        def padded(name: str, t: Tensor) -> Tensor:
            if name not in TOKENS:
                return t
            rows = []
            for p in parts(t):
                free = 17 - len(p)
                sides = (free, 0) if left else (0, free)
                value = 0.0 if name in ("z", "dt") else math.nan
                rows.append(F.pad(p, (0, 0) * (p.ndim - 1) + sides, value=value))
            return torch.stack(rows + [torch.ones_like(rows[0])] * more)

        def seen(y: Tensor) -> Tensor:
            return torch.cat([r[17 - n :] if left else r[:n] for r, n in zip(y, ends, strict=False)])

        bounds = [17 - n for n in ends] + [0] * more if left else [*ends] + [17] * more
        where = {"key_start" if left else "key_length": torch.tensor(bounds, device=device)}
        got, found, _ = run({k: padded(k, t) for k, t in given.items()}, seen, **where)
        found = [seen(t) if name in TOKENS else t for name, t in zip(names, found, strict=True)]
        grads = [t[0] if name in TOKENS else t for name, t in zip(names, grads, strict=True)]
    assert_same_bits(got, want)
    for name, a, b in zip(names, found, grads, strict=True):
        assert_same_bits(a + 0, b + 0, name)  # the sign of zeros apart


def test_limits_bound_steps() -> None:
    given = operands(tokens=5)
    limited = ssd(**given, dt_limit=(0.1, 0.2), dt_softplus=True)
    steps = F.softplus(given["dt"] + given["dt_bias"]).clamp(0.1, 0.2)
    plain = ssd(**given | {"dt": steps, "dt_bias": None})
    torch.testing.assert_close(limited, plain)


ERRORS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception]]] = {
    r"x: expected \[batch, T, heads, P\]": (lambda a: ssd(**a | {"x": a["x"][0]}), ValueError),
    r"dt: expected shape \(2, 23, 4\)": (lambda a: ssd(**a | {"dt": a["dt"][:, 1:]}), ValueError),
    r"A: expected shape \(4,\)": (lambda a: ssd(**a | {"A": a["A"][:3]}), ValueError),
    r"C: expected shape": (lambda a: ssd(**a | {"C": a["C"][..., 1:]}), ValueError),
    r"D: expected shape \(4,\) or \(4, 12\)": (lambda a: ssd(**a | {"D": a["D"][:1]}), ValueError),
    "B: expected groups that divide 4": (
        lambda a: ssd(**a | {n: a[n].repeat(1, 1, 2, 1)[:, :, :3] for n in "BC"}),
        ValueError,
    ),
    "B: expected a state N of 1 to 256": (
        lambda a: ssd(**{k: a[k] for k in ("x", "dt", "A")}, **{n: a[n].repeat(1, 1, 1, 20) for n in "BC"}),
        ValueError,
    ),
    "x: expected P from 1 to 256": (
        lambda a: ssd(a["x"].repeat(1, 1, 1, 30), a["dt"], a["A"], a["B"], a["C"]),
        ValueError,
    ),
    "initial_states: expected shape": (
        lambda a: ssd(**a | {"initial_states": a["initial_states"][:1]}),
        ValueError,
    ),
    "initial_states: expected a state of such heads, sizes and dtype": (
        lambda a: ssd(**a | {"initial_states": ssd(**operands(BF16, tokens=3), **ON)[1]}),
        ValueError,
    ),
    "initial_states: expected 1 sequences, got 2": (
        lambda a: ssd(**operands(rows=1) | {"initial_states": ssd(**a, **ON)[1]}),
        ValueError,
    ),
    "seq_idx: expected no states": (lambda a: ssd(**a, seq_idx=torch.zeros(2, 23).int()), ValueError),
    "key_start, key_length: expected none with seq_idx": (
        lambda a: ssd(
            **a | {"initial_states": None}, seq_idx=torch.zeros(2, 23).int(), key_start=torch.zeros(2)
        ),
        ValueError,
    ),
    "cu_seqlens: expected one dimension, and x with one row": (
        lambda a: ssd(**a, cu_seqlens=torch.tensor([0, 23])),
        ValueError,
    ),
    "x: expected bfloat16, float16 or float32": (lambda a: ssd(**a | {"x": a["x"].double()}), TypeError),
    "B: expected torch.float32 like x": (lambda a: ssd(**a | {"B": a["B"].bfloat16()}), TypeError),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_are_refused(message: str) -> None:
    call, error = ERRORS[message]
    with pytest.raises(error, match=message):
        call(operands(tokens=23))


@pytest.mark.parametrize(("rows", "tokens"), [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_and_no_rows(rows: int, tokens: int) -> None:
    given = {k: t.requires_grad_() for k, t in operands(rows=rows, tokens=tokens).items()}
    y, after = ssd(**given, **ON)
    assert y.shape == (rows, tokens, HEADS, SIZE)
    assert_same_bits(after.matrix, given["initial_states"])
    of_after = torch.randn(after.matrix.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad([y, after.matrix], [*given.values()], [torch.ones_like(y), of_after])
    for (name, t), found in zip(given.items(), got, strict=True):
        assert_same_bits(found, of_after if name == "initial_states" else torch.zeros_like(t), name)


@pytest.mark.parametrize("name", [*operands()])
def test_a_gradient_alone_is_that_beside_others(name: str) -> None:
    given = operands(tokens=5)
    seed = torch.randn(2, 5, HEADS, SIZE, generator=torch.Generator().manual_seed(1))

    def gradient(leaves: dict[str, Tensor]) -> Tensor:
        y = ssd(**given | leaves, dt_softplus=True)
        return torch.autograd.grad(y, leaves[name], seed)[0]

    every = {k: t.clone().requires_grad_() for k, t in given.items()}
    assert_same_bits(gradient({name: given[name].clone().requires_grad_()}), gradient(every))


def test_second_derivatives_are_refused() -> None:
    given = {k: t.requires_grad_() for k, t in operands(tokens=3).items()}
    with pytest.raises(NotImplementedError, match="ssd: second derivatives"):
        torch.autograd.grad(ssd(**given).sum(), [*given.values()], create_graph=True)


@pytest.mark.parametrize("columns", [True, False])
def test_the_operator_is_well_formed(columns: bool) -> None:
    r = torch.Generator().manual_seed(0)
    sizes = (5, 4), (4,), (4,), (4, 6) if columns else (4,)
    given = [torch.rand(size, generator=r).requires_grad_() for size in sizes]
    for args in ((*given, 6, True, 0.0, 1.0), (given[0], None, given[2], None, 6, False, 0.1, 0.5)):
        torch.library.opcheck(torch.ops.samebits.ssd_steps.default, args)


@pytest.mark.parametrize("columns", [True, False])
def test_the_operator_that_goes_on_is_well_formed(columns: bool) -> None:
    given = {k: t.detach() for k, t in operands(tokens=3).items()}
    x, dt, A, B, C = (given[k] for k in ("x", "dt", "A", "B", "C"))
    _, state = ssd(x, dt, A, B, C, return_final_states=True)
    d = torch.rand(x.shape[2:] if columns else x.shape[2:3])
    key = samebits.TENSOR_CORE.key if x.dtype != torch.float32 else samebits.FMA.key
    spans = torch.empty(len(x), 0, dtype=torch.int32)
    q, k, v, steps = (t.flatten(0, 1) for t in (C, B, x, dt))
    args = (q, k, v, steps, None, A, d, True, 0.0, 1.0, state.data, spans, 1.0, columns, key)
    torch.library.opcheck(torch.ops.samebits.ssd_.default, args)


def test_it_is_called_as_in_mamba_ssm() -> None:
    assert "ssd" in samebits.__all__
    assert math.isinf(ssd.__defaults__[-2][1])
