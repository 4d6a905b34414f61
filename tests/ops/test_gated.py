"""``samebits.gated``: the naive implementation's bits, and those of PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from samebits.ops.activation import _FUNCTIONS as PYTORCH
from samebits.ops.activation import POINTWISE
from samebits.ops.activation import activation as activated
from samebits.ops.gated import ACTIVATIONS
from samebits.testing import assert_same_bits
from tests.support import naive_fused
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import NAMES, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
roundings = pytest.mark.parametrize("rounding", ["twice", "once"])


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.sampled(3)
@on_devices
@in_dtypes
@activations
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "special"])
@roundings
def test_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, activation: Any, kind: str, rounding: Any
) -> None:
    once = rounding == "once" and activation != "gpt_oss"
    gate, up, grad = (case(of, (60,), dtype, device, i) for i, of in enumerate((kind, "normal", "normal")))
    gate[:30] *= 4
    for limit, alpha in ((None, 1.702), (2.3, 1.702), (7.0, 0.9)):
        options: Any = {"limit": limit, "alpha": alpha, "rounding": "once" if once else "twice"}
        got = gated(gate, up, activation=activation, **options)
        want = [
            naive_fused.gated(a, b, activation, limit, alpha, NAMES[dtype], once)
            for a, b in zip(gate.tolist(), up.tolist(), strict=True)
        ]
        assert_same_bits(got, rounded(want, dtype), f"{limit}")
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        y = gated(*leaves, activation=activation, **options)
        pairs = [
            naive_fused.gated_backward(g, a, b, activation, limit, alpha, NAMES[dtype], once)
            for g, a, b in zip(grad.tolist(), gate.tolist(), up.tolist(), strict=True)
        ]
        for found, of in zip(torch.autograd.grad(y, leaves, grad), zip(*pairs, strict=True), strict=True):
            assert_same_bits(found, rounded([*of], dtype), f"gradients, {limit}")
    if activation != "gpt_oss":
        leaf = gate.clone().requires_grad_()
        alone = activated(leaf, activation)
        want = [naive_fused.activated(a, activation) for a in gate.tolist()]
        assert_same_bits(alone.detach(), rounded(want, dtype))
        wanted = [
            naive_fused.gradient(g, a, activation, NAMES[dtype])
            for g, a in zip(grad.tolist(), gate.tolist(), strict=True)
        ]
        assert_same_bits(torch.autograd.grad(alone, leaf, grad)[0], rounded(wanted, dtype))


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


def different(x: Tensor, y: Tensor) -> int:
    nan = x.isnan() & y.isnan()
    return int(((x.view(torch.int16) != y.view(torch.int16)) & ~nan).sum())


@on_devices
@pytest.mark.parametrize(("activation", "dtype"), EXACT, ids=str)
def test_every_value_of_16_bits(device: str, activation: str, dtype: torch.dtype) -> None:
    """Beside PyTorch's functions. Those of gelu are this one under the mode."""
    x = every_value(dtype)
    mine = reference.activated(x, activation).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False):  # on some CPUs it has a gelu of 16 bits of its own
        theirs = PYTORCH[activation](x.to(device)).cpu()
    most = EXACT[activation, dtype][device == "cuda"]
    assert different(mine, theirs) <= most
    one = torch.ones_like(x).to(device)
    assert different(gated(x.to(device), one, activation=activation).cpu(), mine) == 0  # type: ignore[arg-type]
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
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_functions_of_the_mode_take_no_values(device: str, name: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=device).requires_grad_()
    with samebits.batch_invariant("error"):
        y = PYTORCH[name](x)
        (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert y.shape == dx.shape == shape


@on_devices
@in_dtypes
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_functions_of_the_mode(device: str, dtype: torch.dtype, name: str) -> None:
    """With gradients, in place and of any layout, and second derivatives near PyTorch's."""
    function = PYTORCH[name]
    x, grad, v = (case("normal", (5, 33), dtype, device, seed) for seed in (0, 1, 2))
    want = activated(x, name)
    x.requires_grad_()
    with samebits.batch_invariant("error"):
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        (recorded,) = torch.autograd.grad(y, x, grad, create_graph=True)
        (curved,) = torch.autograd.grad(recorded, x, v)
        assert_same_bits(function(x[1:2, 3:]), want[1:2, 3:])
        rows = [x.detach()[i : i + 1].requires_grad_() for i in range(5)]
        for i, row in enumerate(rows):
            (of_row,) = torch.autograd.grad(function(row), row, grad[i : i + 1])
            assert_same_bits(of_row, dx[i : i + 1])
        double = torch.randn(7, dtype=torch.float64, device=device)
        assert_same_bits(function(double).float(), function(double).float())
        turned = function(x.detach().mT)
        assert turned.stride() == (1, 33)
        if name in ("silu", "sigmoid"):
            mine = x.detach().clone()
            assert (F.silu(mine, True) if name == "silu" else mine.sigmoid_()) is mine
            assert_same_bits(mine, want)
    for got, wanted in ((y, want), (turned.mT, want), (recorded, dx)):
        assert_same_bits(got.detach().contiguous(), wanted)
    torch.testing.assert_close(dx, torch.autograd.grad(function(x), x, grad)[0])
    if dtype == F32:  # PyTorch rounds each step of others
        plain = torch.autograd.grad(function(x), x, grad, create_graph=True)[0]
        torch.testing.assert_close(curved, torch.autograd.grad(plain, x, v)[0])


def of_transformers(activation: str, rounding: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The code that is replaced, of a gate and a factor."""
    if rounding == "once":
        return lambda gate, up: (up * PYTORCH[activation](gate.to(F32))).to(up.dtype)
    if activation != "gpt_oss":
        return lambda gate, up: PYTORCH[activation](gate) * up
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    class Of:
        limit, alpha = 7.0, 1.702

    return lambda gate, up: GptOssExperts._apply_gate(Of, torch.stack((gate, up), -1).flatten(-2))  # type: ignore[arg-type]


@on_devices
@in_dtypes
@activations
@roundings
def test_code_of_transformers(device: str, dtype: torch.dtype, activation: Any, rounding: Any) -> None:
    """Under the mode, with gradients of zeros, too."""
    pytest.importorskip("transformers")
    if activation == "gpt_oss" and rounding == "once":
        pytest.skip("it is refused")
    limit = 7.0 if activation == "gpt_oss" else None
    options: dict[str, Any] = {"activation": activation, "limit": limit, "rounding": rounding}
    for shape in ((3, 35), (2, 5, 40), (7,)):
        gate, up, grad = (case("normal", shape, dtype, device, seed) for seed in range(3))
        gate, up = (gate * 4).requires_grad_(), (up * 4).requires_grad_()
        grad.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-7, -1e-7])
        leaves = [gate, up]
        with samebits.batch_invariant("error"):
            want = of_transformers(activation, rounding)(gate, up)
            wanted = torch.autograd.grad(want, leaves, grad)
        got = gated(gate, up, **options)
        assert_same_bits(got, want)
        grads = torch.autograd.grad(got, leaves, grad)
        if activation == "gpt_oss":  # its slices make +0 of -0
            grads = tuple(g + 0.0 for g in grads)
        (alone,) = torch.autograd.grad(gated(gate.detach(), up, **options), up, grad)
        packed = torch.cat(leaves, -1).detach().requires_grad_()
        (halves,) = torch.autograd.grad(gated(packed, **options), packed, grad)
        turns = torch.stack(leaves, -1).flatten(-2).detach().requires_grad_()
        (each,) = torch.autograd.grad(gated(turns, interleaved=True, **options), turns, grad)
        found = [*grads, alone, *halves.chunk(2, -1)]
        if activation == "gpt_oss":
            found = [g + 0.0 for g in found]
        for a, b in zip(found, (*wanted, wanted[1], *wanted), strict=True):
            assert_same_bits(a.contiguous(), b, f"{shape}")
        for a, b in zip((each[..., ::2], each[..., 1::2]), wanted, strict=True):
            assert_same_bits(a.contiguous(), b + 0.0, f"in turns, {shape}")


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("activation", POINTWISE)
def test_rounded_once_every_value_of_16_bits(device: str, dtype: torch.dtype, activation: Any) -> None:
    """The bits of the code under the mode, with gradients, but for those of NaN, and of relu's zeros."""
    gate = every_value(dtype).to(device)
    gate = gate + 0.0 if activation.startswith("relu") else gate
    up, grad = (case(kind, (1 << 16,), dtype, device, i) for i, kind in enumerate(("wide", "normal"), 1))
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    with samebits.batch_invariant("error"):
        want = of_transformers(activation, "once")(*leaves)
        wanted = torch.autograd.grad(want, leaves, grad)
    got = gated(*leaves, activation=activation, rounding="once")
    for a, b in zip((got, *torch.autograd.grad(got, leaves, grad)), (want, *wanted), strict=True):
        assert different(a.detach(), b.detach()) == 0


@on_devices
@pytest.mark.parametrize("activation", POINTWISE)
def test_a_rounding_between_changes_nothing_in_float32(device: str, activation: Any) -> None:
    gate, up, grad = (case("wide", (5, 37), F32, device, i) for i in range(3))
    found = []
    for rounding in ("twice", "once"):
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        y = gated(*leaves, activation=activation, rounding=rounding)
        found.append((y, *torch.autograd.grad(y, leaves, grad)))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, 10, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"samebits\.gated: second derivatives"):
        torch.autograd.grad(gated(x).sum(), x, create_graph=True)


@on_devices
@in_dtypes
@pytest.mark.parametrize("n", [16, 37])
@roundings
def test_places(device: str, dtype: torch.dtype, n: int, rounding: Any) -> None:
    """Packed, in turns, with any strides, in place or elsewhere; and beside any neighbours."""
    gated = partial(samebits.gated, rounding=rounding)
    for lead in ((), (5,), (2, 3), (0,), (2, 3, 2)):
        packed = case("normal", (*lead, 2 * n), dtype, device)
        gate, up = packed.chunk(2, -1)
        want = gated(gate.clone(), up.clone())
        turns = torch.stack((gate, up), -1).flatten(-2)
        wide = torch.full((*lead, 2 * n + 3), torch.nan, dtype=dtype, device=device)
        wide[..., 1:-2] = turns
        found = [gated(packed), gated(gate, up), gated(turns[..., ::2], turns[..., 1::2])]
        found.append(gated(turns, interleaved=True))
        found.append(gated(wide[..., 1:-2:2], wide[..., 2:-2:2]))
        found.append(gated(wide[..., 1:-2], interleaved=True))
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
    (lambda: call(X, activation="swish"), ValueError, "activation: expected one of"),
    (lambda: call(X, rounding="never"), ValueError, "rounding: expected 'twice' or 'once'"),
    (lambda: call(X, activation="gpt_oss", rounding="once"), ValueError, "rounding: expected 'twice' with"),
    (lambda: call(X, limit=0), ValueError, "limit: expected a number above 0"),
    (lambda: call(X, out=X), ValueError, "out: expected shape"),
    (lambda: call(X, X.clone(), out=X.half()), TypeError, "out: expected a dense tensor"),
    (lambda: call(X, out=X[:, 1:3]), ValueError, "out: expected memory"),
    (lambda: call(X, X, interleaved=True), ValueError, "up: expected None with interleaved"),
    (lambda: call(X, interleaved=True, out=X[:, :2]), ValueError, "out: expected None with interleaved"),
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
    leaf = x.clone().requires_grad_()
    for up, interleaved in ((None, False), (None, True), (x + 1, False)):
        options = up, "silu", 7.0, 1.0, interleaved, interleaved
        torch.library.opcheck(torch.ops.samebits.gated, (leaf, *options))
        grad = torch.ones(3, 4 if up is None else 8)
        torch.library.opcheck(torch.ops.samebits.gated_backward, (grad, x, *options, True, up is None))
    torch.library.opcheck(
        torch.ops.samebits.gated_into, (x, x + 1, torch.empty_like(x), "gelu", 7.0, 1.0, True)
    )
    torch.library.opcheck(torch.ops.samebits.activation, (leaf, "gelu"))
    torch.library.opcheck(torch.ops.samebits.activation_backward, (x + 1, leaf, "gelu"))


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
    forms += [(F16, "sigmoid", "ALONE", 8), (BF16, "relu2", "APART", 8), (BF16, "relu", "ALTERNATING", 8)]
    for form in (forms[at % 8], forms[(at + 3) % 8]):
        for entry in ("gated", "gated_backward"):
            fast = {"fast_silu": arch == "sm_90a"}
            for once in {False, form[1] != "gpt_oss" and form[2] != "ALONE"}:
                cubin = resources(host.kernel_spec(entry, *form, once, **fast), arch)
                assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0), (entry, form, once)
