"""``samebits.add_rms_norm``: the naive implementation's bits, and those of the modules that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits import add_rms_norm
from samebits.backends.cuda import compiler, rows
from samebits.testing import assert_same_bits
from tests.support import naive_fused
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import NAMES, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
FORMS = {"twice": ("twice", 0.0), "once": ("once", 0.0), "offset": ("once", 1.0)}
EPS = float(np.float32(1e-5))
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
of_forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


@on_devices
@in_dtypes
@of_forms
@pytest.mark.parametrize(
    ("kind", "n"),
    [("normal", 1), ("wide", 140), ("tiny", 140), ("cancel", 128), ("special", 140), ("normal", 256)],
)
def test_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, form: str, kind: str, n: int
) -> None:
    rounding, offset = FORMS[form]
    x, residual = (case(kind, (2, n), dtype, device, seed) for seed in (0, 1))
    of_dtype, wide = (case("normal", (n,), of, device, 2) for of in (dtype, F32))
    for r in (None, residual):
        for w in (None, of_dtype, wide):
            found = add_rms_norm(x, r, w, EPS, rounding=rounding, offset=offset)
            y, total = (found, None) if r is None else found
            want = [
                naive_fused.add_rms_norm(
                    *(a, b, None if w is None else w.tolist(), EPS, offset, rounding == "once", NAMES[dtype])
                )
                for a, b in zip(x.tolist(), [None] * 2 if r is None else r.tolist(), strict=True)
            ]
            out = F32 if w is not None and w.dtype == F32 and rounding == "twice" else dtype
            assert_same_bits(y, rounded([a for a, _ in want], out))
            if total is not None:
                assert_same_bits(total, rounded([b for _, b in want], dtype))


def llama(n: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(n, 1e-6)


def olmo2(n: int) -> nn.Module:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    return Olmo2RMSNorm(n, 1e-6)


def gpt_oss(n: int) -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    return GptOssRMSNorm(n, 1e-6)


def gemma2(n: int) -> nn.Module:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    return Gemma2RMSNorm(n, 1e-6)


MODULES: dict[str, tuple[Callable[[int], nn.Module], dict[str, Any]]] = {
    "llama": (llama, {}),
    "olmo2": (olmo2, {"rounding": "once"}),
    "gpt_oss": (gpt_oss, {"rounding": "once"}),
    "gemma2": (gemma2, {"rounding": "once", "offset": 1.0}),
}


@on_devices
@in_dtypes
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wide", [False, True], ids=["weight like x", "float32 weight"])
def test_bits_of_the_module(device: str, dtype: torch.dtype, name: str, wide: bool) -> None:
    pytest.importorskip("transformers")
    make, options = MODULES[name]
    for n, count in ((64, 70), (128, 9), (129, 3), (256, 5), (5000, 2)):
        module = make(n)
        weight = case("normal", (n,), F32 if wide else dtype, "cpu", 3)
        module.weight = nn.Parameter(weight, requires_grad=False)
        module = module.to(device)
        x, residual = (case("normal", (2, count, n), dtype, device, seed) for seed in (0, 1))
        with torch.no_grad(), samebits.batch_invariant("error"):
            total = residual + x
            want, alone = module(total), module(x)
        y, s = add_rms_norm(x, residual, module.weight, 1e-6, **options)
        assert_same_bits(s, total, name)
        assert_same_bits(y, want, name)
        assert_same_bits(add_rms_norm(x, None, module.weight, 1e-6, **options), alone, name)


@on_devices
@in_dtypes
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wide", [False, True], ids=["weight like x", "float32 weight"])
def test_gradients_of_the_module(device: str, dtype: torch.dtype, name: str, wide: bool) -> None:
    """Those of autograd under the mode, where the sum goes on to another layer, or ends here."""
    pytest.importorskip("transformers")
    make, options = MODULES[name]
    for shape in ((7, 64), (2, 5, 130), (3, 1), (64,), (3, 1100)):
        module = make(shape[-1])
        module.weight = nn.Parameter(case("normal", shape[-1:], F32 if wide else dtype, "cpu", 3))
        module = module.to(device)
        x, residual = (case("normal", shape, dtype, device, seed).requires_grad_() for seed in (0, 1))
        weight: Any = module.weight
        of_y = case("normal", shape, F32 if wide and not options else dtype, device, 5)
        of_sum = case("normal", shape, dtype, device, 6)
        leaves = [x, residual, weight]
        with samebits.batch_invariant("error"):
            total = residual + x
            y = module(total)
            want = [
                torch.autograd.grad([y, total * 1.0], leaves, [of_y, of_sum], retain_graph=True),
                torch.autograd.grad(y, leaves, of_y),
                torch.autograd.grad(module(x), [x, weight], of_y),
            ]
        y, total = add_rms_norm(x, residual, weight, 1e-6, **options)
        got = [
            torch.autograd.grad([y, total], leaves, [of_y, of_sum], retain_graph=True),
            torch.autograd.grad(y, leaves, of_y),
            torch.autograd.grad(add_rms_norm(x, None, weight, 1e-6, **options), [x, weight], of_y),
        ]
        for grads, wanted in zip(got, want, strict=True):
            for a, b in zip(grads, wanted, strict=True):
                assert_same_bits(a, b, f"{name} {shape}")


@on_devices
@in_dtypes
@of_forms
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "special"])
def test_gradients_of_the_naive_implementation(device: str, dtype: torch.dtype, form: str, kind: str) -> None:
    rounding, offset = FORMS[form]
    n = 70
    x, of_y = (case(kind, (2, n), dtype, device, seed) for seed in (0, 1))
    of_sum = case("normal", (2, n), dtype, device, 4)
    for w in (None, case("normal", (n,), dtype, device, 2)):
        leaf = x.clone().requires_grad_()
        y, total = add_rms_norm(leaf, torch.full_like(x, -0.0), w, EPS, rounding=rounding, offset=offset)
        (got,) = torch.autograd.grad([y, total], leaf, [of_y, of_sum])
        want = [
            naive_fused.add_rms_norm_backward(
                *(a, b, c, None if w is None else w.tolist(), EPS, offset, rounding == "once", NAMES[dtype])
            )
            for a, b, c in zip(of_y.tolist(), of_sum.tolist(), x.tolist(), strict=True)
        ]
        assert_same_bits(got, rounded(want, dtype))


def test_gradients_alone() -> None:
    """Of what is asked for, and of a sum that nothing else uses."""
    x, r, w = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,)))
    y, total = add_rms_norm(x, r, w)
    every = torch.autograd.grad(y.sum(), [x, r, w], retain_graph=True)
    for i, leaf in enumerate((x, r, w)):
        (alone,) = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
        assert_same_bits(alone, every[i])
    assert_same_bits(torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones(3, 8))
    assert torch.autograd.grad(total.sum(), w, allow_unused=True, retain_graph=True) == (None,)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@on_devices
@in_dtypes
def test_rows_know_nothing_of_each_other(device: str, dtype: torch.dtype) -> None:
    """At any number, place, stride and beside any neighbours."""
    for n in (40, 1100):
        w = case("normal", (n,), dtype, device, 2)
        x, r = (case("normal", (1030, n), dtype, device, seed) for seed in (0, 1))
        y, s = add_rms_norm(x, r, w)
        for first, last in ((0, 1), (5, 12), (1000, 1030)):
            some = slice(first, last)
            beside = case("special", (last - first + 2, n), dtype, device, 5)
            beside[1:-1] = x[some]
            spread = torch.full((last - first, n, 2), torch.nan, dtype=dtype, device=device)[..., 0]
            pitched = torch.full((last - first, n + 3), torch.nan, dtype=dtype, device=device)[:, 1 : n + 1]
            for place in (spread, pitched):
                place.copy_(x[some])
            for got in (
                add_rms_norm(x[some], r[some], w),
                add_rms_norm(spread, r[some], w),
                add_rms_norm(pitched, r[some], w),
            ):
                assert_same_bits(got[0], y[some])
                assert_same_bits(got[1], s[some])
            assert_same_bits(add_rms_norm(beside, None, w)[1:-1], add_rms_norm(x[some], None, w))


@on_devices
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "of_weight"), [(BF16, BF16), (F16, F16), (F32, BF16), (BF16, F16)], ids=str
)
def test_nan_of_a_weights_gradient(
    device: str, dtype: torch.dtype, of_weight: torch.dtype, rows: int
) -> None:
    """It is canonical, where PyTorch's rounding of a sum in float32 gives what a device likes."""
    x = case("normal", (rows, 40), dtype, device)
    x[0] = torch.nan
    weight = torch.ones(40, dtype=of_weight, device=device, requires_grad=True)
    y = samebits.add_rms_norm(x, None, weight, rounding="once")
    (found,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert (found.view(torch.int16) == 0x7FFF).all()


@on_devices
@in_dtypes
@pytest.mark.parametrize("n", [64, 130])
def test_in_place(device: str, dtype: torch.dtype, n: int) -> None:
    """Of whole matrices, and of heads that lie in a larger one."""
    w = case("normal", (n,), dtype, device, 2)
    for count in (3, 1030):
        packed = case("normal", (count, 5, n), dtype, device)
        for x in (packed.clone()[:, 1:4], packed.clone()[:, 0], packed.clone().transpose(0, 1)):
            r = case("normal", tuple(x.shape), dtype, device, 1)
            y, s = add_rms_norm(x.clone(), r, w)
            whole = x._base
            assert whole is not None
            before = whole.clone()
            into, total = add_rms_norm(x, r, w, out=x, out_sum=r)
            assert into is x
            assert total is r
            assert_same_bits(x, y)
            assert_same_bits(r, s)
            x.copy_(y)
            left = torch.ones_like(whole, dtype=torch.bool).as_strided(
                x.shape, x.stride(), x.storage_offset()
            )
            beside = torch.ones_like(whole, dtype=torch.bool)
            beside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
            assert left.all()
            assert_same_bits(whole[beside], before[beside])


@on_devices
def test_other_outputs(device: str) -> None:
    x, r = (case("normal", (2, 3, 4, 96), BF16, device, seed) for seed in (0, 1))
    w = case("normal", (96,), F32, device, 2)
    y, s = add_rms_norm(x, r, w)
    assert y.dtype == F32
    out = torch.full((2, 3, 4, 97), torch.nan, device=device)[..., 1:]
    for out_sum in (torch.empty_like(x), r.clone(), None):
        got, total = add_rms_norm(x, r, w, out=out, out_sum=out_sum)
        assert got is out
        assert_same_bits(got, y)
        assert_same_bits(total, s)
    swapped = torch.empty(4, 3, 2, 96, device=device).permute(2, 1, 0, 3)
    add_rms_norm(x, r, w, out=swapped, out_sum=s)
    assert_same_bits(swapped.contiguous(), y)
    x2, r2 = x.clone(), r.clone()
    add_rms_norm(x2, r2, None, out=r2, out_sum=x2)  # they change places
    plain, total = add_rms_norm(x, r)
    assert_same_bits(r2, plain)
    assert_same_bits(x2, total)
    step = case("normal", (192,), BF16, device, 4)[::2]
    assert_same_bits(add_rms_norm(x, None, step), add_rms_norm(x, None, step.clone()))


@on_devices
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 8), (5,)])
def test_edges(device: str, shape: tuple[int, ...]) -> None:
    x = case("normal", shape, BF16, device)
    y, s = add_rms_norm(x, x, case("normal", shape[-1:], BF16, device))
    assert y.shape == s.shape == shape
    assert_same_bits(add_rms_norm(x, None, out=torch.empty_like(x)), add_rms_norm(x))


X = torch.ones(2, 4)
call: Any = add_rms_norm  # with arguments of any type
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: call(X.double()), TypeError, "x: expected bfloat16, float16 or float32"),
    (lambda: call(torch.tensor(1.0)), ValueError, "x: expected"),
    (lambda: call(X, X[:1]), ValueError, "residual: expected shape"),
    (lambda: call(X, X.bfloat16()), TypeError, "residual: expected shape"),
    (lambda: call(X, None, X), ValueError, "weight: expected shape"),
    (lambda: call(X, None, X[0].long()), TypeError, "weight: expected"),
    (lambda: call(X, rounding="thrice"), ValueError, "rounding: expected"),
    (lambda: call(X, offset=1.0), ValueError, "offset: expected 0"),
    (lambda: call(X, out_sum=X), ValueError, "out_sum: expected None"),
    (lambda: call(X, out=X[:1]), ValueError, "out: expected shape"),
    (lambda: call(X, out=X.half()), TypeError, "out: expected a dense tensor of torch.float32"),
    (lambda: call(X, out=[1]), TypeError, "out: expected"),
    (lambda: call(X, out=torch.ones(4).expand(2, 4)), ValueError, "out: expected elements"),
    (lambda: call(X[:1], out=X.view(-1)[2:6].view(1, 4)), ValueError, "out: expected memory"),
    (lambda: call(X, X, out=(o := torch.ones(2, 4)), out_sum=o), ValueError, "that of out"),
    (lambda: call(X.clone().requires_grad_(), out=X.clone()), NotImplementedError, "x: gradients are not"),
    (
        lambda: call(X, None, X[0].clone().requires_grad_(), out=X.clone()),
        NotImplementedError,
        "weight: gradients",
    ),
    (lambda: call(X, out=torch.ones(2, 4, requires_grad=True)), ValueError, "out: expected a tensor"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    wrong, kind, message = REFUSED[number]
    before = X.clone()
    with pytest.raises(kind, match=rf"samebits\.add_rms_norm: .*{message}"):
        wrong()
    assert_same_bits(X, before)


@pytest.mark.parametrize("residual", [False, True])
def test_operators_are_what_they_say(residual: bool) -> None:
    x, w = torch.randn(3, 5), torch.randn(5)
    r = torch.randn(3, 5) if residual else None
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, r, w)]
    torch.library.opcheck(torch.ops.samebits.add_rms_norm, (*leaves, 1e-5, 0.0, False, F32))
    torch.library.opcheck(torch.ops.samebits.add_rms_norm_backward, (x, r, x, w, 1e-5, 0.0, False, True))
    total = torch.empty(3, 5) if residual else None
    torch.library.opcheck(
        torch.ops.samebits.add_rms_norm_into, (x, r, w, torch.empty(3, 5), total, 1e-5, 0.0, False)
    )


def test_compiles() -> None:
    x, r, w = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, r, w)

    with torch.no_grad():
        for got, want in zip(layer(x, r, w), add_rms_norm(x, r, w), strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    ways = [
        (128, BF16, BF16, True),
        (5120, BF16, BF16, True),
        (16384, F16, F16, True),
        (40000, BF16, F32, True),
    ]
    ways += [
        (8192, F32, F32, True),
        (1100, BF16, BF16, False),
        (4097, F16, F32, False),
        (4097, F32, F32, False),
    ]
    at = compiler.ARCHITECTURES.index(arch)
    for i, count in ((at, 1), (at + 3, 4096)):
        n, dtype, out, aligned = ways[i % len(ways)]
        for entry in ("add_rms_norm", "add_rms_norm_backward"):
            schedule = rows.choose(entry, count, n, dtype, aligned, out == F32)
            cubin = resources(rows.kernel_spec(entry, dtype, out, out, schedule), arch)
            assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0), (entry, n, dtype, out, schedule)
