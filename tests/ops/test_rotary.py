"""``samebits.rotary``: the naive implementation's bits, and those of the functions that it stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import samebits
from samebits import rotary
from samebits.backends.cuda import compiler
from samebits.backends.cuda import rotary as host
from samebits.testing import assert_same_bits
from tests.support import naive_fused
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case
from tests.support.naive_bits import NAMES, rounded

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
LAYOUTS = ["halves", "pairs", "pairs to halves"]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GRADIENTS = ["rounded", "wide", "split"]
in_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


@on_devices
@in_dtypes
@in_layouts
@pytest.mark.parametrize("full", [False, True], ids=["of pairs", "of entries"])
@pytest.mark.parametrize(("head", "dim"), [(6, 6), (32, 32), (40, 16), (5, 2), (80, 32)])
def test_bits_of_the_naive_implementation(
    device: str, dtype: torch.dtype, layout: Any, full: bool, head: int, dim: int
) -> None:
    kinds = ("normal", "special", "tiny")
    for of_cos, kind in zip((dtype, F32, BF16), kinds, strict=True):
        q, k = case(kind, (3, 2, head), dtype, device), case("normal", (3, 1, head), dtype, device, 1)
        cos, sin = (case("normal", (3, dim if full else dim // 2), of_cos, device, seed) for seed in (2, 3))
        between = NAMES[dtype if of_cos == dtype else F32]
        for x, got in zip((q, k), rotary(q, k, cos, sin, rotary_dim=dim, layout=layout), strict=True):
            want = [
                [naive_fused.rotary(h, c, s, dim, layout, between) for h in heads]
                for heads, c, s in zip(x.tolist(), cos.tolist(), sin.tolist(), strict=True)
            ]
            assert got is not None
            assert_same_bits(got[..., :dim], rounded(want, dtype)[..., :dim], f"{kind} {of_cos}")
            assert_same_bits(got[..., dim:], x[..., dim:])


def function(family: str, name: str = "apply_rotary_pos_emb") -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name
    )
    return found


# Of each family: the part of a head that is rotated, its layout, whether cosines are float32, of which values
# they are, and the rounding of its gradients.
FAMILIES: dict[str, tuple[int, Any, bool, str, str]] = {
    "llama": (64, "halves", False, "halves", "rounded"),
    "qwen3": (64, "halves", False, "halves", "rounded"),
    "olmo2": (64, "halves", True, "halves", "rounded"),
    "modernbert": (64, "halves", True, "halves", "rounded"),
    "hunyuan_vl": (64, "halves", True, "halves", "wide"),
    "gpt_neox": (16, "halves", False, "halves", "rounded"),
    "phi3": (48, "halves", False, "halves", "rounded"),
    "gpt_oss": (64, "halves", False, "pairs", "split"),
    "glm4": (32, "pairs", False, "halves of pairs", "rounded"),
    "cohere": (64, "pairs", True, "twice", "wide"),
    "ernie4_5": (64, "pairs", True, "halves of pairs", "rounded"),
    "deepseek_v3": (64, "pairs to halves", False, "halves of pairs", "rounded"),
}


@on_devices
@in_dtypes
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_transformers(device: str, dtype: torch.dtype, family: str) -> None:
    pytest.importorskip("transformers")
    dim, layout, wide, values, gradients = FAMILIES[family]
    name = "apply_rotary_pos_emb_interleave" if family == "deepseek_v3" else "apply_rotary_pos_emb"
    q, k = (case("normal", (2, heads, 7, 64), dtype, device, heads) for heads in (4, 2))
    angles = torch.randn(2, 7, dim // 2, generator=torch.Generator().manual_seed(0)) * 9
    angles = angles.repeat_interleave(2, -1) if values == "twice" else torch.cat((angles, angles), -1)
    cos, sin = (t.to(F32 if wide else dtype).to(device) for t in (angles.cos(), angles.sin()))
    if values == "pairs":
        cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
    of_results = [case("normal", tuple(t.shape), dtype, device, 5) * 1e-3 for t in (q, k)]
    for t, g in zip((q, k), of_results, strict=True):
        t.requires_grad_()
        g[:, 0, 0], g[:, 0, 1], g[:, 0, 2] = 0.0, -0.0, 1e-7
    with samebits.batch_invariant("error"):
        want = function(family, name)(q, k, cos, sin)
        wanted_grads = torch.autograd.grad(want, (q, k), of_results)
    if values == "halves of pairs":
        cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
    given = q.transpose(1, 2), k.transpose(1, 2)
    found: Any = rotary(*given, cos, sin, rotary_dim=dim, layout=layout, gradients=gradients)  # type: ignore[call-overload]
    grads = torch.autograd.grad(found, (q, k), [g.transpose(1, 2) for g in of_results])
    for got, wanted in zip(found, want, strict=True):
        assert_same_bits(got.transpose(1, 2).contiguous(), wanted.contiguous(), family)
    for got, wanted in zip(grads, wanted_grads, strict=True):
        assert_same_bits(got.contiguous(), wanted.contiguous(), f"gradients of {family}")


@pytest.mark.sampled(2)
@on_devices
@in_dtypes
@in_layouts
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize(("head", "dim", "full"), [(32, 32, True), (40, 16, False), (9, 6, True)])
def test_gradients_of_the_naive_implementation(
    device: str, dtype: torch.dtype, layout: Any, gradients: Any, head: int, dim: int, full: bool
) -> None:
    for of_cos, kind in zip((dtype, F32, BF16), ("normal", "special", "tiny"), strict=True):
        grads = [case(kind, (3, heads, head), dtype, device, heads) for heads in (2, 1)]
        cos, sin = (case("normal", (3, dim if full else dim // 2), of_cos, device, seed) for seed in (2, 3))
        q, k = (torch.zeros_like(g).requires_grad_() for g in grads)
        turned = rotary(q, k, cos, sin, rotary_dim=dim, layout=layout, gradients=gradients)
        between = NAMES[dtype if of_cos == dtype or gradients != "wide" else F32]
        for g, got in zip(grads, torch.autograd.grad(turned, (q, k), grads), strict=True):
            want = [
                [
                    naive_fused.rotary_backward(h, c, s, dim, layout, between, gradients == "split")
                    for h in heads
                ]
                for heads, c, s in zip(g.tolist(), cos.tolist(), sin.tolist(), strict=True)
            ]
            assert_same_bits(got[..., :dim], rounded(want, dtype)[..., :dim], f"{kind} {of_cos}")
            if gradients == "split":
                assert_same_bits(got[..., dim:], g[..., dim:])
            else:
                assert_same_bits(got[..., dim:], rounded(want, dtype)[..., dim:])


@on_devices
def test_gradients_alone(device: str) -> None:
    """Of what is asked for, with results that nothing uses, by positions, and of any strides."""
    packed = case("normal", (5, 6, 16), BF16, device).requires_grad_()
    table = case("normal", (9, 16), BF16, device, 1)
    at = torch.tensor([3, 8, 0, 5, 3], device=device)
    cos, sin = table.chunk(2, -1)
    g = case("normal", (4, 5, 16), BF16, device, 2).transpose(0, 1)
    q, k = rotary(packed[:, :4], packed[:, 4:], cos, sin, positions=at)
    (both,) = torch.autograd.grad([q, k], packed, [g, g[:, :2]], retain_graph=True)
    (alone,) = torch.autograd.grad(q, packed, g, retain_graph=True)
    assert_same_bits(alone[:, :4], both[:, :4])
    assert not alone[:, 4:].any()
    (alone,) = torch.autograd.grad(k, packed, g[:, :2].contiguous(), retain_graph=True)
    assert_same_bits(alone[:, 4:], both[:, 4:])
    x = packed.detach()[:, :4].clone().requires_grad_()
    only = rotary(x, None, cos, sin, positions=at)[0]
    assert_same_bits(torch.autograd.grad(only, x, g)[0], both[:, :4])
    each = rotary(x, None, cos[at], sin[at])[0]
    assert_same_bits(torch.autograd.grad(each, x, g)[0], both[:, :4])
    unknown = rotary(x, None, cos, sin, positions=at - 5)[0]
    assert torch.autograd.grad(unknown, x, g)[0].isnan().all(-1).all(-1).tolist() == (at < 5).tolist()
    fixed = rotary(packed.detach()[:, :4], packed[:, 4:], cos, sin, positions=at)
    assert_same_bits(torch.autograd.grad(fixed[1], packed, g[:, :2])[0][:, 4:], both[:, 4:])
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(q.float().sum(), packed, create_graph=True)


@on_devices
@in_dtypes
@in_layouts
@pytest.mark.parametrize(("head", "dim"), [(64, 64), (96, 32), (9, 6)])
def test_places(device: str, dtype: torch.dtype, layout: Any, head: int, dim: int) -> None:
    """Tokens in any number of dimensions, packed with values, in place or elsewhere; tables and positions."""
    table = case("normal", (50, 2 * (dim // 2)), dtype, device, 7)
    cos, sin = table.chunk(2, -1)
    for lead in ((), (5,), (2, 3), (2, 2, 3), (0,)):
        packed = case("normal", (*lead, 7 * head), dtype, device).unflatten(-1, (7, head))
        q, k = packed[..., :4, :], packed[..., 4:6, :]
        at = torch.randint(0, 50, lead, generator=torch.Generator().manual_seed(1)).to(device)
        want = rotary(q.clone(), k.clone(), cos[at], sin[at], rotary_dim=dim, layout=layout)
        options: dict[str, Any] = {"rotary_dim": dim, "layout": layout}
        found = [
            rotary(q, k, cos, sin, positions=at, **options),
            rotary(q, k, cos, sin, positions=at.int(), **options),
            rotary(q, k, cos.clone()[at], sin.clone()[at], **options),
        ]
        alone = rotary(q, None, cos, sin, positions=at, **options)
        assert alone[1] is None
        found.append((alone[0], want[1]))
        room = torch.full((*lead, 7, head + 1), torch.nan, dtype=dtype, device=device)
        out = room[..., :4, 1:], room[..., 4:6, 1:]
        assert rotary(q, k, cos, sin, positions=at, out=out, **options) == out
        found.append(out)
        if layout != "pairs to halves":
            mine = packed.clone()
            out = mine[..., :4, :], mine[..., 4:6, :]
            rotary(*out, cos, sin, positions=at, out=out, **options)
            found.append(out)
            assert_same_bits(mine[..., 6:, :], packed[..., 6:, :])
        for got in found:
            for a, b in zip(got, want, strict=True):
                assert_same_bits(a.contiguous(), b)


@on_devices
def test_cosines_broadcast_over_the_batch(device: str) -> None:
    q, k = (case("normal", (3, 5, heads, 16), BF16, device, heads) for heads in (4, 2))
    cos, sin = (case("normal", (1, 5, 8), BF16, device, seed) for seed in (2, 3))
    want = rotary(q, k, cos.expand(3, 5, 8).clone(), sin.expand(3, 5, 8).clone())
    for c, s in ((cos, sin), (cos[0], sin[0]), (cos.expand(3, 5, 8), sin.expand(3, 5, 8))):
        for got, wanted in zip(rotary(q, k, c, s), want, strict=True):
            assert_same_bits(got, wanted)


@on_devices
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unknown_positions_give_nan(device: str, dtype: torch.dtype) -> None:
    q, k = (case("normal", (4, heads, 24), BF16, device, heads) for heads in (2, 1))
    cos, sin = (case("normal", (9, 8), BF16, device, seed) for seed in (2, 3))
    at = torch.tensor([-1, 8, 9, 2**31 - 1], dtype=dtype, device=device)
    for x, got in zip((q, k), rotary(q, k, cos, sin, positions=at, rotary_dim=16), strict=True):
        assert got is not None
        assert got[[0, 2, 3], :, :16].isnan().all()
        assert not got[1].isnan().any()
        assert_same_bits(got[..., 16:], x[..., 16:])


Q, C = torch.ones(2, 3, 8), torch.ones(2, 4)
call: Any = rotary  # with arguments of any type
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: call(Q.double(), None, C, C), TypeError, "q: expected bfloat16"),
    (lambda: call(Q, Q.half(), C, C), TypeError, "k: expected torch.float32 like q"),
    (lambda: call(Q, Q[:1], C, C), ValueError, r"k: expected \(2, heads, 8\)"),
    (lambda: call(Q, None, C, C.half()), TypeError, "sin: expected torch.float32 like cos"),
    (lambda: call(Q, None, C, C[:1]), ValueError, "sin: expected shape"),
    (lambda: call(Q, None, C[:, :3], C[:, :3]), ValueError, "cos: expected"),
    (lambda: call(Q, None, *2 * [C[:, None]]), ValueError, "cos: expected the tokens' shape"),
    (lambda: call(Q, None, *2 * [torch.ones(3, 4)]), ValueError, "cos: expected the tokens' shape"),
    (lambda: call(Q, None, C, C, rotary_dim=3), ValueError, "rotary_dim: expected an even number up to 8"),
    (lambda: call(Q, None, C, C, rotary_dim=10), ValueError, "rotary_dim: expected an even number up to 8"),
    (lambda: call(Q, None, C, C, layout="neox"), ValueError, "layout: expected one of"),
    (lambda: call(Q, None, C, C, positions=torch.ones(2)), TypeError, "positions: expected int32"),
    (lambda: call(Q, None, C, C, positions=torch.ones(3).int()), ValueError, "positions: expected the"),
    (lambda: call(Q, None, C, C, out=Q), TypeError, "out: expected a tuple of two"),
    (lambda: call(Q, None, C, C, out=(Q[:1], None)), ValueError, r"out\[0\]: expected shape"),
    (lambda: call(Q, Q.clone(), C, C, out=((a := torch.ones(2, 3, 8)), a)), ValueError, "that of out"),
    (lambda: call(Q, (b := Q.clone()), C, C, out=(b, Q.clone())), ValueError, r"out\[0\]: expected memory"),
    (lambda: call(Q, None, C, C, out=(Q, None), layout="pairs to halves"), ValueError, "expected memory"),
    (lambda: call(Q, None, C, C, gradients="exact"), ValueError, "gradients: expected one of"),
    (lambda: call(Q, None, C.clone().requires_grad_(), C), NotImplementedError, "cos: gradients"),
    (
        lambda: call(Q.clone().requires_grad_(), None, C, C, out=(Q.clone(), None)),
        NotImplementedError,
        "q: gradients",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    wrong, kind, message = REFUSED[number]
    with pytest.raises(kind, match=rf"samebits\.rotary: .*{message}"):
        wrong()
    assert (Q == 1).all()


def test_operators_are_what_they_say() -> None:
    q, k, cos, sin = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(5, 4), torch.randn(5, 4)
    at = torch.tensor([0, 3, 1])
    for leaves in (
        (q.clone().requires_grad_(), k.clone().requires_grad_()),
        (q.clone().requires_grad_(), None),
    ):
        options = cos, sin, at, 4, "halves", "rounded"
        torch.library.opcheck(torch.ops.samebits.rotary, (*leaves, *options))
        torch.library.opcheck(
            torch.ops.samebits.rotary_backward,
            (*(None if t is None else t.detach() for t in leaves), *options),
        )
    torch.library.opcheck(torch.ops.samebits.rotary_backward, (None, k, *options))
    out = torch.empty_like(q), torch.empty_like(k)
    torch.library.opcheck(torch.ops.samebits.rotary_into, (q, k, cos, sin, at, *out, 4, "pairs"))


def test_compiles() -> None:
    q, k, cos, sin = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 4), torch.randn(3, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(*args: Tensor) -> tuple[Tensor, Tensor | None]:
        return rotary(*args)

    for got, want in zip(layer(q, k, cos, sin), rotary(q, k, cos, sin), strict=True):
        assert got is not None
        assert want is not None
        assert_same_bits(got, want)


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    forms = [(BF16, BF16, "halves", False, 8), (F16, F32, "pairs", True, 8), (F32, F32, "halves", True, 4)]
    forms += [(BF16, F32, "pairs to halves", True, 1), (F32, BF16, "pairs", False, 4)]
    at = compiler.ARCHITECTURES.index(arch)
    for form in (forms[at % 5], forms[(at + 2) % 5]):
        for gradients in ("none", GRADIENTS[at % 3]):
            cubin = resources(host.kernel_spec(*form, gradients), arch)
            assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0)
