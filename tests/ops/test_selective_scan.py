"""The scan of Mamba: its steps, gates and gradients, on all devices. `test_state_space` has how it is fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samebits import selective_scan
from samebits.backends.cuda import selective_scan as kernels
from samebits.ops.activation import activation
from samebits.ops.expand import expand
from samebits.testing import assert_same_bits, values
from tests.support.cubins import resources
from tests.support.devices import DEVICES
from tests.support.selective_scans import BF16, CASES, F16, F32, Case, change, compare

on_devices = pytest.mark.parametrize("device", DEVICES)
SMALL = Case(F32, F32, shape=(2, 37, 21, 1, 11))


def leaves(case: Case, device: str = "cpu") -> dict[str, Any]:
    given = case.operands()
    given |= {"delta_bias": given.pop("bias"), "initial_state": given.pop("states")}
    del given["softplus"], given["offsets"]
    return {k: None if t is None else t.to(device).requires_grad_() for k, t in given.items()}


def gradients(y: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    grad = values("normal", y.shape, BF16, 20).to(y)
    return torch.autograd.grad(y, [t for t in given.values() if t is not None], grad)


@on_devices
@pytest.mark.parametrize("part", ["gate", "steps"])
def test_gates_and_steps_have_the_bits_of_their_functions(device: str, part: str) -> None:
    """In float32 they round like operations of their own."""
    given = leaves(SMALL, device)
    y = selective_scan(**given, delta_softplus=True)
    apart = dict(given)
    if part == "gate":
        apart["z"] = None
        want = selective_scan(**apart, delta_softplus=True) * activation(given["z"], "silu")
    else:
        delta, bias = (apart.pop(name) for name in ("delta", "delta_bias"))
        raw = delta.transpose(1, 2) + expand(bias, delta.transpose(1, 2).shape)
        want = selective_scan(**apart, delta=activation(raw, "softplus").transpose(1, 2))
    assert_same_bits(y, want)
    for name, a, b in zip(given, gradients(y, given), gradients(want, given), strict=True):
        assert_same_bits(a + 0, b + 0, name)


@pytest.mark.parametrize("layout", ["tokens", "channels"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_results_and_gradients_are_those_of_float64(dtype: torch.dtype, layout: str) -> None:
    given = leaves(Case(dtype, dtype, shape=(2, 12, 33, 2, 16), layout=layout))
    wide = {k: t.detach().double().requires_grad_() for k, t in given.items()}
    y = selective_scan(**given, delta_softplus=True)
    u, step, z = (wide[n].transpose(1, 2) for n in ("u", "delta", "z"))
    step = F.softplus(step + wide["delta_bias"])
    B, C = (wide[n].permute(0, 3, 1, 2).repeat_interleave(6, 2) for n in "BC")
    state, out = wide["initial_state"], []
    for t in range(33):
        a = torch.exp(step[:, t, :, None] * wide["A"])
        state = state * a + (step[:, t] * u[:, t])[..., None] * B[:, t]
        out.append((state * C[:, t]).sum(-1))
    want = ((torch.stack(out, 1) + wide["D"] * u) * F.silu(z)).transpose(1, 2)
    found = zip(("y", *given), (y, *gradients(y, given)), (want, *gradients(want, wide)), strict=True)
    for name, a, b in found:
        error = (a.double() - b).norm() / b.norm()
        assert error < (2e-6 if dtype == F32 else 6e-3), name


@pytest.mark.parametrize(("rows", "tokens"), [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_and_no_rows(rows: int, tokens: int) -> None:
    given = leaves(Case(F32, F32, shape=(rows, 6, tokens, 2, 3)))
    y, after = selective_scan(**given, delta_softplus=True, return_last_state=True)
    assert y.shape == (rows, 6, tokens)
    assert_same_bits(after, given["initial_state"])
    of_after = values("normal", after.shape, F32, 20)
    got = torch.autograd.grad([y, after], [*given.values()], [torch.ones_like(y), of_after])
    for (name, t), found in zip(given.items(), got, strict=True):
        assert_same_bits(found, of_after if name == "initial_state" else torch.zeros_like(t), name)


@pytest.mark.parametrize("name", [*leaves(SMALL)])
def test_a_gradient_alone_is_that_beside_others(name: str) -> None:
    every = leaves(SMALL)
    alone = {k: t if k == name else t.detach() for k, t in every.items()}
    seed = values("normal", every["u"].shape, F32, 20)
    want, got = (
        torch.autograd.grad(selective_scan(**given, delta_softplus=True), given[name], seed)[0]
        for given in (every, alone)
    )
    assert_same_bits(got, want)


def test_second_derivatives_are_refused() -> None:
    given = leaves(SMALL)
    with pytest.raises(NotImplementedError, match="selective_scan: second derivatives"):
        torch.autograd.grad(selective_scan(**given).sum(), [*given.values()], create_graph=True)


def cut_off(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: a[name][..., 1:]}


NUMBERS = torch.zeros(2, 21, dtype=torch.int32)
ERRORS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    (r"u, A: expected \[batch, channels, T\] and \[channels, N\]", lambda a: {"u": a["u"][0]}),
    (r"u, A: expected \[batch, channels, T\] and \[channels, N\]", lambda a: {"A": a["A"][:, 0]}),
    (r"delta: expected shape \(2, 37, 21\)", cut_off("delta")),
    (r"A: expected shape \(37, 11\)", lambda a: {"A": a["A"][1:]}),
    (r"B: expected \[batch, N, T\] or \[batch, groups, N, T\]", lambda a: {"B": a["B"][0, 0]}),
    (r"B: expected shape \(2, 1, 11, 21\)", cut_off("B")),
    (r"C: expected shape \(2, 1, 11, 21\)", cut_off("C")),
    (r"D: expected shape \(37,\)", cut_off("D")),
    (r"z: expected shape \(2, 37, 21\)", cut_off("z")),
    (r"delta_bias: expected shape \(37,\)", cut_off("delta_bias")),
    (r"initial_state: expected shape \(2, 37, 11\)", cut_off("initial_state")),
    ("B: expected groups that divide 37, got 2", lambda a: {n: a[n].repeat(1, 2, 1, 1) for n in "BC"}),
    (
        "B: expected a state N of 1 to 256, got 264",
        lambda a: (
            {n: a[n].repeat(1, 1, 24, 1) for n in "BC"}
            | {n: a[n].repeat_interleave(24, -1) for n in ("A", "initial_state")}
        ),
    ),
    ("seq_idx, cu_seqlens: expected one of them", lambda a: {"seq_idx": NUMBERS, "cu_seqlens": NUMBERS}),
    ("seq_idx: expected a tensor of int32 or int64", lambda a: {"seq_idx": NUMBERS.float()}),
    (r"seq_idx: expected shape \(2, 21\)", lambda a: {"seq_idx": NUMBERS[:, 1:]}),
    ("seq_idx: expected no states", lambda a: {"seq_idx": NUMBERS}),
    ("cu_seqlens: expected one dimension, and u with one row", lambda a: {"cu_seqlens": NUMBERS[0]}),
]


@pytest.mark.parametrize(("message", "change"), ERRORS)
def test_shapes_that_do_not_fit_are_refused(
    message: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    given = leaves(SMALL)
    with pytest.raises((TypeError, ValueError), match=f"selective_scan: {message}"):
        selective_scan(**given | change(given))


@pytest.mark.parametrize("name", [*leaves(SMALL)])
def test_other_dtypes_and_kinds_are_refused(name: str) -> None:
    given = leaves(SMALL)
    message = f"selective_scan: {name}: expected bfloat16, float16 or float32, got torch"
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(TypeError, match=message):
            selective_scan(**given | {name: given[name].detach().to(dtype)})
    with pytest.raises(TypeError, match=f"selective_scan: {name}: expected a Tensor, got list"):
        selective_scan(**given | {name: given[name].tolist()})
    with pytest.raises(TypeError, match=f"selective_scan: {name}: expected a dense"):
        selective_scan(**given | {name: given[name].detach().to_sparse()})


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_have_the_bits_of_the_reference(name: str) -> None:
    """Under a schedule, and under the choice."""
    for schedule in (CASES[name].schedule, None):
        compare(CASES[name].operands(), schedule, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["steep", "growing", "infinite", "backwards"])
def test_kernels_of_decays_that_are_not_the_usual_ones(how: str) -> None:
    compare(change(CASES["packed"].operands(), how), CASES["packed"].schedule, "cuda")


def test_schedules_and_their_choice() -> None:
    """One sequence gives all multiprocessors blocks, and few channels more of them."""
    assert kernels.choose(16, 8192, 1, 1, 132) == kernels.ChannelScan(128, 32, 4)
    assert kernels.choose(16, 1024, 1, 1, 132) == kernels.ChannelScan(64, 32, 4)
    for size in (1, 16, 20, 64, 256):
        assert kernels.choose(size, 8192, 1, 1, 132) in kernels.catalogue(size)


@pytest.mark.parametrize("size", [8, 16, 64])
def test_kernels_compile(size: int) -> None:
    form = kernels.Form(BF16, F32, F16, BF16, size, True, True, True, True, True, True)
    step = kernels.step_spec(BF16, F32, F16, BF16, size, True, True, True)
    scan = kernels.kernel_spec(form, kernels.catalogue(size)[0])
    for spec in (scan, step, kernels.sums_spec(BF16, size, 2)):
        assert resources(spec, "sm_90a").spill_bytes == 0
    spec = kernels.gradients_spec(form)
    assert resources(spec, "sm_90a").spill_bytes < 1 << 10  # of a tile, not of a token
    assert spec.smem <= 99 << 10


def test_the_operators_are_well_formed() -> None:
    given = Case(F32, F32, shape=(2, 4, 6, 1, 3), layout="channels").operands()
    args = [t.requires_grad_() if isinstance(t, Tensor) else t for t in given.values()]
    torch.library.opcheck(torch.ops.samebits.selective_scan.default, tuple(args))
