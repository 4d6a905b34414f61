"""``samebits.norm_rotary``: the bits of the norms and the rotation that it fuses, and of the models' code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits import add_rms_norm
from samebits.backends.cuda import compiler
from samebits.backends.cuda import norm_rotary as host
from samebits.testing import assert_same_bits
from tests.support.cubins import resources
from tests.support.devices import DEVICES, case

norm_rotary: Any = samebits.norm_rotary  # with arguments of any type
rotary: Any = samebits.rotary
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORMS: dict[str, dict[str, Any]] = {
    "twice": {},
    "once": {"rounding": "once"},
    "offset": {"rounding": "once", "offset": 1.0},
}
# Heads with 8 and 16 lanes, whole or not, and those that the kernel does not take.
SIZES = [(128, 128), (64, 64), (96, 32), (256, 256), (200, 80), (129, 128), (9, 6), (320, 64)]


def apart(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    of_norm = {name: options.pop(name) for name in ("rounding", "offset") if name in options}
    normed = [
        None if x is None else add_rms_norm(x, None, w, 1e-6, **of_norm)
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    return rotary(*normed, cos, sin, **options)


@pytest.mark.sampled(3)
@on_devices
@in_dtypes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["halves", "pairs", "pairs to halves"])
@pytest.mark.parametrize(("head", "dim"), SIZES)
def test_bits_of_the_operators_apart(
    device: str, dtype: torch.dtype, form: str, layout: Any, head: int, dim: int
) -> None:
    """With gradients, of every kind of weights, tables and strides, and without keys."""
    kinds = ("rounded", "wide", "split", "rounded")
    for i, (of_cos, full) in enumerate(((dtype, True), (F32, True), (BF16, False), (dtype, False))):
        options: dict[str, Any] = {**FORMS[form], "layout": layout, "rotary_dim": dim, "gradients": kinds[i]}
        of_weight = F32 if i == 1 and form != "twice" else dtype
        packed = case(("normal", "wide", "special", "tiny")[i], (2, 5, 6, head), dtype, device)
        q, k = (t.clone() if i % 2 else t for t in (packed[..., :4, :], packed[..., 4:, :]))
        grads = [case("normal", tuple(t.shape), dtype, device, 3) for t in (q, k)]
        weights = [case("normal", (head,), of_weight, device, seed) if i < 3 else None for seed in (1, 2)]
        width = dim if full else dim // 2
        cos, sin = (case("normal", (2, 5, width), of_cos, device, seed) for seed in (4, 5))
        leaves = [t.detach().requires_grad_() for t in (q, k, *weights) if t is not None]
        given: list[Any] = [*leaves, None, None][:4]
        got, want = (f(*given, cos, sin, **options) for f in (norm_rotary, apart))
        name = f"{form} {kinds[i]} {of_cos} {full}"
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a.contiguous(), b, name)
        found, wanted = (torch.autograd.grad(y, leaves, grads, retain_graph=True) for y in (got, want))
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(a, b, f"gradients, {name}")
        of_k = torch.autograd.grad(got[1], [t for t in (given[1], given[3]) if t is not None], grads[1])
        for a, b in zip(of_k, wanted[1::2], strict=True):
            assert_same_bits(a, b, f"gradients of keys, {name}")
        alone = norm_rotary(q, None, given[2], None, cos, sin, **options)
        assert alone[1] is None
        assert_same_bits(alone[0], got[0])


@on_devices
@in_dtypes
@pytest.mark.parametrize(("head", "dim"), [(128, 64), (256, 256), (40, 6)])
def test_positions_and_places(device: str, dtype: torch.dtype, head: int, dim: int) -> None:
    """By positions from tables, unknown ones too, and in place within a larger matrix."""
    cos, sin = case("normal", (50, 2 * dim), dtype, device, 7).chunk(2, -1)
    at = torch.tensor([[3, 49, 0], [50, -1, 7]], device=device)
    packed = case("normal", (2, 3, 7, head), dtype, device)
    q, k = packed[..., :4, :], packed[..., 4:6, :]
    w, v = (case("normal", (head,), dtype, device, seed) for seed in (1, 2))
    options: dict[str, Any] = {"rotary_dim": dim, "positions": at}
    want = apart(q, k, w, v, cos, sin, **options)
    mine = packed.clone()
    out = mine[..., :4, :], mine[..., 4:6, :]
    assert norm_rotary(*out, w, v, cos, sin, out=out, **options) is out
    room = torch.full((2, 3, 7, head + 1), torch.nan, dtype=dtype, device=device)
    other = room[..., :4, 1:], room[..., 4:6, 1:]
    norm_rotary(q, k, w, v, cos, sin, out=other, **options)
    for found in (norm_rotary(q, k, w, v, cos, sin, **options), out, other):
        for a, b in zip(found, want, strict=True):
            assert_same_bits(a.contiguous(), b)
    assert_same_bits(mine[..., 6:, :], packed[..., 6:, :])
    rows = norm_rotary(q[1:, 2:], k[1:, 2:], w, v, cos, sin, **options | {"positions": at[1:, 2:]})
    for a, b in zip(rows, want, strict=True):
        assert_same_bits(a, b[1:, 2:])


@on_devices
def test_nan_of_weights_gradients(device: str) -> None:
    """Of positions that tables do not have: it is canonical."""
    q, k = (case("normal", (2, heads, 16), BF16, device).requires_grad_() for heads in (2, 1))
    weights = [torch.ones(16, dtype=BF16, device=device, requires_grad=True) for _ in range(2)]
    cos, sin = (case("normal", (5, 8), BF16, device, seed) for seed in (1, 2))
    at = torch.tensor([3, 5], device=device)
    turned = norm_rotary(q, k, *weights, cos, sin, positions=at, **FORMS["once"])
    for of in torch.autograd.grad(turned, weights, [torch.ones_like(t) for t in turned]):
        assert (of.view(torch.int16) == 0x7FFF).all()


def attention(family: str) -> tuple[nn.Module, Callable[..., Any]]:
    """A norm of heads, and the function that turns them."""
    module: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = {"qwen3": "Qwen3RMSNorm", "gemma3": "Gemma3RMSNorm", "qwen3_next": "Qwen3NextRMSNorm"}[family]
    return getattr(module, norm), module.apply_rotary_pos_emb


@on_devices
@in_dtypes
@pytest.mark.parametrize(
    ("family", "head", "dim"), [("qwen3", 128, 128), ("gemma3", 256, 256), ("qwen3_next", 256, 64)]
)
def test_bits_of_transformers(device: str, dtype: torch.dtype, family: str, head: int, dim: int) -> None:
    pytest.importorskip("transformers")
    make, turn = attention(family)
    options: dict[str, Any] = FORMS["twice" if family == "qwen3" else "offset"] | {"rotary_dim": dim}
    norms = [make(head, eps=1e-6).to(device, dtype) for _ in range(2)]
    for i, norm in enumerate(norms):
        norm.weight = nn.Parameter(case("normal", (head,), dtype, device, i))
    q, k = (case("normal", (2, 7, heads, head), dtype, device, heads).requires_grad_() for heads in (4, 2))
    grads = [case("normal", tuple(t.shape), dtype, device, 5) for t in (q, k)]
    cos, sin = (case("normal", (2, 7, dim), dtype, device, seed) for seed in (8, 9))
    weights = [norm.weight for norm in norms]
    leaves = [q, k, *weights]
    with samebits.batch_invariant("error"):
        want = turn(*(norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True)), cos, sin)
        wanted = torch.autograd.grad(want, leaves, [g.transpose(1, 2) for g in grads])
    got = norm_rotary(q, k, *weights, cos, sin, **options)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.transpose(1, 2).contiguous(), b.contiguous(), family)
    for a, b in zip(torch.autograd.grad(got, leaves, grads), wanted, strict=True):
        assert_same_bits(a, b.contiguous(), f"gradients of {family}")


Q, W, C = torch.ones(2, 3, 8), torch.ones(8), torch.ones(2, 4)
call = norm_rotary
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: call(Q.double(), None, W, None, C, C), TypeError, "q: expected bfloat16"),
    (lambda: call(Q, Q[:1], W, W, C, C), ValueError, r"k: expected \(2, heads, 8\)"),
    (lambda: call(Q, None, W[:4], None, C, C), ValueError, r"q_weight: expected shape \(8,\)"),
    (lambda: call(Q, None, W, W, C, C), ValueError, "k_weight: expected None without k"),
    (lambda: call(Q, None, W.half(), None, C, C), TypeError, "q_weight: expected torch.float32 like q"),
    (lambda: call(Q, None, W, None, C, C, rounding="never"), ValueError, "rounding: expected"),
    (lambda: call(Q, None, W, None, C, C, offset=1.0), ValueError, "offset: expected 0"),
    (lambda: call(Q, None, W, None, C, C, layout="neox"), ValueError, "layout: expected one of"),
    (lambda: call(Q, None, W, None, C, C.half()), TypeError, "sin: expected torch.float32 like cos"),
    (lambda: call(Q, None, W, None, C, C, out=Q), TypeError, "out: expected a tuple of two"),
    (lambda: call(Q, None, W, None, C.clone().requires_grad_(), C), NotImplementedError, "cos: gradients"),
    (
        lambda: call(Q, None, W.clone().requires_grad_(), None, C, C, out=(Q.clone(), None)),
        NotImplementedError,
        "q_weight: gradients",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    wrong, kind, message = REFUSED[number]
    with pytest.raises(kind, match=rf"samebits\.norm_rotary: .*{message}"):
        wrong()
    assert (Q == 1).all()


def test_operators_are_what_they_say() -> None:
    q, k, w = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(8)
    cos, sin, at = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 3, 1])
    options = 1e-6, 0.0, False, 4, "halves"
    ops = torch.ops.samebits
    for keys, v in ((k, torch.randn(8)), (None, None)):
        tensors = q, keys, w, v
        leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
        torch.library.opcheck(ops.norm_rotary, (*leaves, cos, sin, at, *options, "rounded"))
        torch.library.opcheck(
            ops.norm_rotary_backward,
            (q, keys, *tensors, cos, sin, at, *options, "rounded", True, keys is None),
        )
    out = torch.empty_like(q), torch.empty_like(k)
    torch.library.opcheck(ops.norm_rotary_into, (q, k, w, w, cos, sin, at, *out, *options))


def test_compiles() -> None:
    q, k, w = (torch.randn(s, requires_grad=True) for s in ((3, 2, 8), (3, 1, 8), (8,)))
    cos, sin = torch.randn(3, 4), torch.randn(3, 4)
    layer = torch.compile(lambda *t: norm_rotary(*t), backend="aot_eager", fullgraph=True)
    got, want = (torch.cat(f(q, k, w, w, cos, sin), -2) for f in (layer, norm_rotary))
    assert_same_bits(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), [q, k, w]) for y in (got, want)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    forms: list[Any] = [(BF16, BF16, BF16, "halves", True, 8), (F16, F16, F32, "pairs", True, 16)]
    forms += [(F32, F32, F32, "halves", False, 16), (BF16, F32, F32, "pairs", False, 8)]
    forms += [(F32, BF16, BF16, "pairs", False, 8)]
    at = compiler.ARCHITECTURES.index(arch)
    for form in (forms[at % 5], forms[(at + 2) % 5]):
        for entry, gradients in (
            ("norm_rotary", "none"),
            ("norm_rotary_backward", ("rounded", "wide")[at % 2]),
        ):
            cubin = resources(host.kernel_spec(entry, *form, gradients), arch)
            assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0), (entry, form)
