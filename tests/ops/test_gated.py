"""``samebits.gated``: the naive implementation's bits, and those of PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits import gated
from samebits.backends.cuda import compiler
from samebits.backends.cuda import gated as host
from samebits.backends.reference import fused as reference
from samebits.ops.activation import gelu
from samebits.testing import assert_same_bits
from tests.support import naive_fused
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import NAMES, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "gpt_oss"]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@on_devices
@in_dtypes
@activations
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "special"])
def test_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, activation: Any, kind: str
) -> None:
    gate, up = case(kind, (300,), dtype, device), case("normal", (300,), dtype, device, 1)
    gate[:100] *= 4
    for limit, alpha in ((None, 1.702), (2.3, 1.702), (7.0, 0.9)):
        got = gated(gate, up, activation=activation, limit=limit, alpha=alpha)
        want = [
            naive_fused.gated(a, b, activation, limit, alpha, NAMES[dtype])
            for a, b in zip(gate.tolist(), up.tolist(), strict=True)
        ]
        assert_same_bits(got, rounded(want, dtype), f"{limit}")
    for approximate, name in (("none", "gelu"), ("tanh", "gelu_tanh")):
        want = [naive_fused.activated(a, name) for a in gate.tolist()]
        assert_same_bits(gelu(gate, approximate), rounded(want, dtype), name)


# Of all 65,536 values: how many differ from PyTorch's on a CPU, and on an H100.
EXACT = {
    ("silu", BF16): (0, 0),
    ("silu", F16): (0, 0),
    ("sigmoid", BF16): (0, 0),
    ("sigmoid", F16): (0, 3),
    ("gelu", BF16): (3, 11),
    ("gelu", F16): (216, 152),
    ("gelu_tanh", BF16): (4, 0),
    ("gelu_tanh", F16): (29, 3),
}
PYTORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def different(x: Tensor, y: Tensor) -> int:
    nan = x.isnan() & y.isnan()
    return int(((x.view(torch.int16) != y.view(torch.int16)) & ~nan).sum())


@on_devices
@pytest.mark.parametrize(("activation", "dtype"), EXACT, ids=str)
def test_every_value_of_16_bits(device: str, activation: str, dtype: torch.dtype) -> None:
    """Beside PyTorch's functions. Those of gelu are this one under the mode."""
    x = every_value(dtype)
    mine = reference.activated(x, activation).to(dtype)
    theirs = PYTORCH[activation](x.to(device)).cpu()
    most = EXACT[activation, dtype][device == "cuda"]
    assert different(mine, theirs) <= most
    one = torch.ones_like(x).to(device)
    if activation != "sigmoid":
        assert different(gated(x.to(device), one, activation=activation).cpu(), mine) == 0  # type: ignore[arg-type]
    if activation.startswith("gelu"):
        with samebits.batch_invariant("error"):
            assert different(PYTORCH[activation](x.to(device)).cpu(), mine) == 0


@pytest.mark.parametrize(
    ("activation", "bound"), [("silu", 2.0), ("sigmoid", 2.0), ("gelu", 3.1), ("gelu_tanh", 4.0)]
)
def test_errors_in_float32(activation: str, bound: float) -> None:
    """In units of the last place, where PyTorch's formula does not cancel."""
    x = torch.linspace(-1, 20, 200_001)
    x = x[x.abs() > 1e-3]
    exact = PYTORCH[activation](x.double())
    unit = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()
    error = (reference.activated(x, activation).double() - exact).abs() / unit.double()
    assert float(error.max()) < bound


@on_devices
@in_dtypes
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_the_mode(device: str, dtype: torch.dtype, approximate: str) -> None:
    x, grad = (case("normal", (5, 33), dtype, device, seed) for seed in (0, 1))
    want = gelu(x, approximate)
    x.requires_grad_()
    with samebits.batch_invariant("error"):
        y = F.gelu(x, approximate=approximate)
        (dx,) = torch.autograd.grad(y, x, grad)
        assert_same_bits(F.gelu(x[1:2, 3:], approximate=approximate), want[1:2, 3:])
        rows = [x.detach()[i : i + 1].requires_grad_() for i in range(5)]
        for i, row in enumerate(rows):
            (of_row,) = torch.autograd.grad(F.gelu(row, approximate=approximate), row, grad[i : i + 1])
            assert_same_bits(of_row, dx[i : i + 1])
        double = torch.randn(7, dtype=torch.float64, device=device)
        assert_same_bits(F.gelu(double).float(), torch.nn.functional.gelu(double).float())
    assert_same_bits(y, want)
    torch.testing.assert_close(dx, torch.autograd.grad(F.gelu(x, approximate=approximate), x, grad)[0])


@on_devices
@in_dtypes
@activations
def test_code_of_transformers(device: str, dtype: torch.dtype, activation: str) -> None:
    """Under the mode; in float32 gelu's alone, whose function the mode has."""
    if dtype == F32 and not activation.startswith("gelu"):
        pytest.skip("PyTorch's float32 exponential is another one")
    if dtype == F16 and activation == "gpt_oss" and device == "cuda":
        pytest.skip("PyTorch's sigmoid has other bits for 3 values of float16 there")
    x = case("normal", (3, 70), dtype, device) * 4
    with samebits.batch_invariant("error"):
        if activation == "gpt_oss":
            from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

            class Of:
                limit, alpha = 7.0, 1.702

            want = GptOssExperts._apply_gate(Of, x)  # type: ignore[arg-type]
        else:
            want = PYTORCH[activation](x[:, :35]) * x[:, 35:]
    if activation == "gpt_oss":
        got = gated(x[..., ::2], x[..., 1::2], activation="gpt_oss", limit=7.0)
    else:
        got = gated(x, activation=activation)  # type: ignore[arg-type]
    assert_same_bits(got, want)


@on_devices
@in_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS[:3])
def test_gradients_of_the_code(device: str, dtype: torch.dtype, activation: Any) -> None:
    """Those of autograd under the mode; in float32 gelu's alone, whose function the mode has."""
    if dtype == F32 and activation == "silu":
        pytest.skip("PyTorch's float32 exponential is another one")
    for shape in ((3, 35), (2, 5, 40), (7,)):
        gate, up, grad = (case("normal", shape, dtype, device, seed) for seed in range(3))
        gate, up = (gate * 3).requires_grad_(), up.requires_grad_()
        with samebits.batch_invariant("error"):
            want = torch.autograd.grad(PYTORCH[activation](gate) * up, [gate, up], grad)
        got = torch.autograd.grad(gated(gate, up, activation=activation), [gate, up], grad)
        packed = torch.cat((gate, up), -1).detach().requires_grad_()
        (both,) = torch.autograd.grad(gated(packed, activation=activation), packed, grad)
        (alone,) = torch.autograd.grad(gated(gate, up.detach(), activation=activation), gate, grad)
        for a, b in zip((*got, *both.chunk(2, -1), alone), (*want, *want, want[0]), strict=True):
            assert_same_bits(a.contiguous(), b, f"{shape}")


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, 10, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"samebits\.gated: second derivatives"):
        torch.autograd.grad(gated(x).sum(), x, create_graph=True)


@on_devices
@in_dtypes
@pytest.mark.parametrize("n", [16, 37])
def test_places(device: str, dtype: torch.dtype, n: int) -> None:
    """Packed, in turns, with any strides, in place or elsewhere; and beside any neighbours."""
    for lead in ((), (5,), (2, 3), (0,), (2, 3, 2)):
        packed = case("normal", (*lead, 2 * n), dtype, device)
        gate, up = packed.chunk(2, -1)
        want = gated(gate.clone(), up.clone())
        turns = torch.stack((gate, up), -1).flatten(-2)
        wide = torch.full((*lead, 2 * n + 3), torch.nan, dtype=dtype, device=device)
        wide[..., 1:-2] = turns
        found = [gated(packed), gated(gate, up), gated(turns[..., ::2], turns[..., 1::2])]
        found.append(gated(wide[..., 1:-2:2], wide[..., 2:-2:2]))
        found.append(gated(gate.clone(), up))
        if len(lead) > 1:
            swapped = packed.transpose(0, 1).contiguous().transpose(0, 1)
            found += [gated(swapped), gated(*swapped.chunk(2, -1))]
            mixed = turns.transpose(0, 1).contiguous().transpose(0, 1)
            found.append(gated(mixed[..., ::2], mixed[..., 1::2]))
        room = torch.full((*lead, n + 1), torch.nan, dtype=dtype, device=device)[..., 1:]
        assert gated(packed, out=room) is room
        found.append(room)
        for place in (0, 1):
            mine = packed.clone()
            halves = mine.chunk(2, -1)
            gated(mine, out=halves[place])
            found.append(halves[place])
            mine = turns.clone()
            pair = mine[..., ::2], mine[..., 1::2]
            gated(*pair, out=pair[place])
            found.append(pair[place])
        for got in found:
            assert_same_bits(got.contiguous(), want)


X = torch.ones(2, 4)
call: Any = gated
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: call(X.double()), TypeError, "gate: expected bfloat16"),
    (lambda: call(X, X.half()), TypeError, "up: expected torch.float32 like gate"),
    (lambda: call(X, X[:1]), ValueError, "gate, up: expected"),
    (lambda: call(X[:, :3]), ValueError, r"gate: expected \[..., 2 N\]"),
    (lambda: call(X, activation="relu"), ValueError, "activation: expected one of"),
    (lambda: call(X, limit=0), ValueError, "limit: expected a number above 0"),
    (lambda: call(X, out=X), ValueError, "out: expected shape"),
    (lambda: call(X, X.clone(), out=X.half()), TypeError, "out: expected a dense tensor"),
    (lambda: call(X, out=X[:, 1:3]), ValueError, "out: expected memory"),
    (lambda: call(X.clone().requires_grad_(), limit=7.0), NotImplementedError, "gate: gradients"),
    (lambda: call(X.clone().requires_grad_(), activation="gpt_oss"), NotImplementedError, "gate: gradients"),
    (lambda: call(X.clone().requires_grad_(), X, out=X.clone()), NotImplementedError, "gate: gradients"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    wrong, kind, message = REFUSED[number]
    with pytest.raises(kind, match=rf"samebits\.gated: .*{message}"):
        wrong()
    assert (X == 1).all()


def test_operators_are_what_they_say() -> None:
    x = torch.randn(3, 8)
    torch.library.opcheck(torch.ops.samebits.gated, (x.clone().requires_grad_(), None, "silu", 7.0, 1.0))
    torch.library.opcheck(torch.ops.samebits.gated_into, (x, x + 1, torch.empty_like(x), "gelu", 7.0, 1.0))
    torch.library.opcheck(torch.ops.samebits.activation, (x.requires_grad_(), "gelu"))


def test_compiles() -> None:
    x = torch.randn(3, 8)
    layer = torch.compile(lambda x: gated(x, activation="gelu"), backend="aot_eager", fullgraph=True)
    assert_same_bits(layer(x), gated(x, activation="gelu"))


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    forms = [(BF16, "silu", "APART", 8), (F16, "gelu", "ALONE", 8), (F32, "gelu_tanh", "APART", 4)]
    forms += [(BF16, "gpt_oss", "ALTERNATING", 8), (F32, "gpt_oss", "ALTERNATING", 1)]
    at = compiler.ARCHITECTURES.index(arch)
    for of in (forms[at % 5], forms[(at + 2) % 5]):
        cubin = resources(host.kernel_spec(*of), arch)
        assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0)
