"""Every operation under every contract against the naive implementation of docs/contract.md, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import samebits
from samebits import AMPERE, FMA, HOPPER, TENSOR_CORE, Contract
from samebits.testing import KINDS, assert_same_bits, bits, values
from tests.support import naive
from tests.support.devices import DEVICES, FAMILY
from tests.support.recorded import RECORDED

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CONTRACTS = [
    pytest.param(
        contract,
        dtype,
        device,
        id=f"{contract.mma.name if contract.mma else contract.name}-{contract.segments}-{name}-{device}",
        marks=[pytest.mark.gpu] if device == "cuda" else [],
    )
    for contract, device in (
        (TENSOR_CORE.on(HOPPER), "cpu"),
        (TENSOR_CORE.on(AMPERE), "cpu"),
        (FMA, "cpu"),
        (TENSOR_CORE.on(HOPPER).segmented(4), "cpu"),
        (TENSOR_CORE.on(AMPERE).segmented(2), "cpu"),
        (FMA.segmented(4), "cpu"),
        (TENSOR_CORE.on(FAMILY), "cuda"),
        (FMA, "cuda"),
        (TENSOR_CORE.on(FAMILY).segmented(4), "cuda"),
        (FMA.segmented(4), "cuda"),
    )
    for dtype, name in NAMES.items()
    if dtype in contract.input_dtypes
]
Spans = list[tuple[int, int]]


def expected(
    a: Tensor,
    b: Tensor,
    contract: Contract,
    *,
    out: torch.dtype | None = None,
    bias: Tensor | None = None,
    acc: Tensor | None = None,
    sequences: Spans | None = None,
) -> Tensor:
    """``a[M, K] @ b[K, N]`` by tests/support/naive.py; with `sequences` as spans of K, else plain.

    Only plain sums are cut into the contract's segments.
    """
    out = out or a.dtype
    name = contract.mma.name if contract.mma else "FMA"
    rows, columns = a.double().tolist(), b.double().mT.tolist()
    start = acc.double().tolist() if acc is not None else None
    result = torch.empty(len(rows), len(columns), dtype=torch.int64)
    for m, row in enumerate(rows):
        for n, column in enumerate(columns):
            terms = list(zip(row, column, strict=True))
            if sequences is None:
                value = naive.segmented(terms, name, NAMES[a.dtype], contract.segments)
            else:
                value = naive.chain(
                    [terms[i:j] for i, j in sequences],
                    name,
                    NAMES[a.dtype],
                    acc=start[m][n] if start else 0.0,
                    plain=False,
                )
            result[m, n] = naive.finish(value, NAMES[out], bias[n].item() if bias is not None else None)
    width = torch.int32 if out == torch.float32 else torch.int16
    return result.to(width).view(out)


def cases(kind: str, *shapes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [values(kind, shape, dtype, seed).to(device) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
class TestOperations:
    """The operations and their gradients, on every kind of values."""

    @pytest.mark.parametrize("k", [1, 2, 16, 37])
    def test_matmul(self, contract: Contract, dtype: torch.dtype, device: str, kind: str, k: int) -> None:
        k *= contract.segments
        a, b = cases(kind, (3, k), (k, 5), dtype=dtype, device=device)
        for out in {dtype, torch.float32}:
            actual = samebits.matmul(a, b, out_dtype=out, contract=contract)
            assert_same_bits(actual, expected(a, b, contract, out=out))

    def test_addmm_(self, contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
        a, b = cases(kind, (3, 21), (21, 4), dtype=dtype, device=device)
        acc = values(kind, (3, 4), torch.float32, 7).to(device)
        want = expected(a, b, contract, out=torch.float32, acc=acc, sequences=[(0, 21)])
        samebits.addmm_(acc, a, b, contract=contract)
        assert_same_bits(acc, want)

    def test_linear(self, contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
        k = 19 * contract.segments
        x, weight, bias = cases(kind, (2, 3, k), (4, k), (4,), dtype=dtype, device=device)
        actual = samebits.linear(x, weight, bias, contract=contract)
        assert_same_bits(actual.view(6, 4), expected(x.view(6, k), weight.mT, contract, bias=bias))

    @pytest.mark.sampled(2)
    def test_linear_backward(self, contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
        k, n = (3, 5) if contract.segments == 1 else (contract.segments, 5 * contract.segments)
        x, weight, bias, grad = cases(kind, (2, 19, k), (n, k), (n,), (2, 19, n), dtype=dtype, device=device)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        grads = torch.autograd.grad(samebits.linear(x, weight, bias, contract=contract), leaves, grad)
        rows = [(0, 19), (19, 38)]
        dy, x2 = grad.view(38, n), x.detach().view(38, k)
        assert_same_bits(grads[0].view(38, k), expected(dy, weight, contract), "x")
        assert_same_bits(grads[1], expected(dy.mT, x2, contract, sequences=rows), "weight")
        ones = torch.ones(38, 1, dtype=dtype)
        assert_same_bits(grads[2][:, None], expected(dy.mT, ones, contract, sequences=rows), "bias")

    def test_linear_backward_packed(
        self, contract: Contract, dtype: torch.dtype, device: str, kind: str
    ) -> None:
        k = 3 if contract.segments == 1 else contract.segments
        x, weight, grad = cases(kind, (41, k), (2, k), (41, 2), dtype=dtype, device=device)
        ends = [0, 5, 5, 22, 38, 41]
        weight.requires_grad_()
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        y = samebits.linear(x, weight, cu_seqlens=offsets, contract=contract)
        (actual,) = torch.autograd.grad(y, weight, grad)
        spans = list(itertools.pairwise(ends))
        assert_same_bits(actual, expected(grad.mT, x, contract, sequences=spans))

    def test_bmm_backward_of_a_broadcast_operand(
        self, contract: Contract, dtype: torch.dtype, device: str, kind: str
    ) -> None:
        k = 5 if contract.segments == 1 else contract.segments
        a, b, grad = cases(kind, (3, k), (4, k, 2), (4, 3, 2), dtype=dtype, device=device)
        leaves = [t.requires_grad_() for t in (a, b)]
        out = samebits.bmm(a, b, contract=contract)
        grad_a, grad_b = torch.autograd.grad(out, leaves, grad)
        for i in range(4):
            assert_same_bits(out[i].detach(), expected(a, b[i], contract), f"out {i}")
            assert_same_bits(grad_b[i], expected(a.mT, grad[i], contract, sequences=[(0, 3)]), f"b {i}")
        over = [(2 * i, 2 * i + 2) for i in range(4)]
        left, right = grad.permute(1, 0, 2).reshape(3, 8), b.detach().mT.reshape(8, k)
        assert_same_bits(grad_a, expected(left, right, contract, sequences=over), "a")


@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
def test_matmul_broadcast_both_ways(contract: Contract, dtype: torch.dtype, device: str) -> None:
    k = 5 if contract.segments == 1 else contract.segments
    a, b, grad = cases("normal", (3, 1, 2, k), (4, k, 3), (3, 4, 2, 3), dtype=dtype, device=device)
    leaves = [t.requires_grad_() for t in (a, b)]
    out = samebits.matmul(a, b, contract=contract)
    grad_a, grad_b = torch.autograd.grad(out, leaves, grad)
    for i in range(3):
        left = grad[i].permute(1, 0, 2).reshape(2, 12)
        over = [(3 * j, 3 * j + 3) for j in range(4)]
        right = b.detach().mT.reshape(12, k)
        assert_same_bits(grad_a[i, 0], expected(left, right, contract, sequences=over), f"a {i}")
    for j in range(4):
        left = a.detach()[:, 0].reshape(6, k).mT
        over = [(2 * i, 2 * i + 2) for i in range(3)]
        right = grad[:, j].reshape(6, 3)
        assert_same_bits(grad_b[j], expected(left, right, contract, sequences=over), f"b {j}")
        for i in range(3):
            assert_same_bits(out[i, j].detach(), expected(a[i, 0], b[j], contract), f"out {i}, {j}")


@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
def test_f32_output_takes_an_f32_gradient(contract: Contract, dtype: torch.dtype, device: str) -> None:
    a, b = cases("normal", (3, 8), (8, 4), dtype=dtype, device=device)
    grad = values("normal", (3, 4), torch.float32, 9).to(device)
    a.requires_grad_()
    out = samebits.matmul(a, b, out_dtype=torch.float32, contract=contract)
    (actual,) = torch.autograd.grad(out, a, grad)
    if contract.step == "mma":
        want = expected(grad.to(dtype), b.mT, contract)
    else:
        want = expected(grad, b.mT.float(), contract, out=dtype)
    assert_same_bits(actual, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_to_the_output(contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
    """One term (for each segment) and a bias: every rounding of `finish`, ties and overflow included."""
    a, b = cases(kind, (64, contract.segments), (contract.segments, 8), dtype=dtype, device=device)
    bias = values(kind, (8,), dtype, 5).to(device)
    actual = samebits.linear(a, b.mT, bias, contract=contract)
    assert_same_bits(actual, expected(a, b, contract, bias=bias))


@pytest.mark.parametrize("contract", [TENSOR_CORE, FMA], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_rounding_of_every_f32_exponent(contract: Contract, dtype: torch.dtype, device: str) -> None:
    """f32 -> 16 bits over all exponents, at ties and next to them: torch's own rounding is the witness."""
    top = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000, 0x2FFF])
    patterns = (top[:, None] + low).flatten()
    acc = torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)
    key = contract.on(FAMILY).key if contract.step == "mma" else contract.key
    empty = (torch.empty(s, dtype=dtype, device=device) for s in ((1, 1, acc.numel(), 0), (1, 1, 0, 1)))
    actual = torch.ops.samebits.addbmm(acc.view(1, -1, 1).to(device), *empty, None, dtype, key).view(-1)
    want = acc.to(dtype)
    want = torch.where(want.isnan(), torch.tensor(0x7FFF, dtype=torch.int16).view(dtype), want)
    assert_same_bits(actual, want)


@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_tensor_core(case: str, transposed: bool, device: str) -> None:
    """What an H200 computed, through the public operations; transposed: C^T = B A^T has the same bits."""
    if device == "cuda" and FAMILY is not HOPPER:
        pytest.skip("recorded on sm_90")
    a, b, start, want = (t if t is None else t.to(device) for t in RECORDED[case])
    acc = torch.zeros_like(want) if start is None else start
    if transposed:
        a, b, acc, want = b, a, acc.mT, want.mT
    if start is None:
        assert_same_bits(samebits.matmul(a, b.mT, out_dtype=torch.float32), want, "matmul")
    assert_same_bits(samebits.addmm_(acc.clone(), a, b.mT), want, "addmm_")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "special"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("model", [AMPERE, HOPPER], ids=lambda m: m.name)
def test_agrees_with_mmasim(model: samebits.MmaModel, dtype: torch.dtype, kind: str) -> None:
    """A simulator by others, on 2^18 random groups of 16 for each of 28 settings: 7 million in all."""
    from mmasim.nv_ptx.sim import MMA  # here, so that a machine without it runs the rest

    arch = model.name.capitalize()
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    step = MMA(arch, f"m16n8k16.f32.{name}.{name}.f32")
    a, b = cases(kind, (512, 16), (16, 512), dtype=dtype)
    acc = values(kind, (512, 512), torch.float32, 3)
    if kind not in ("wide", "brink"):
        acc *= (a.float() @ b.float()).abs().nan_to_num(1.0, 1.0).clamp(2.0**-126, 1e30)
    acc = acc.nan_to_num(0.0, 1.0, -1.0)
    want = step(a, b, acc)
    samebits.addmm_(acc, a, b, contract=TENSOR_CORE.on(model))
    assert_same_bits(acc, want)


@pytest.mark.parametrize("model", [AMPERE, HOPPER], ids=lambda m: m.name)
def test_overflow_begins_at_exactly_two_to_the_128(model: samebits.MmaModel) -> None:
    """An infinity stays one, whatever comes after; a finite value of nearly 2**128 comes back down."""
    a = torch.zeros(2, 32, dtype=torch.bfloat16)
    a[:, 0] = 2.0**127  # two terms of 2**127 are 2**128
    a[0, 1] = 2.0**127
    a[1, 1] = 2.0**127 - 2.0**119
    a[:, 16] = -(2.0**127)
    ones = torch.ones(32, 1, dtype=torch.bfloat16)
    out = samebits.matmul(a, ones, out_dtype=torch.float32, contract=TENSOR_CORE.on(model))
    assert out.flatten().tolist() == [torch.inf, 2.0**127 - 2.0**119]
    assert_same_bits(out, expected(a, ones, TENSOR_CORE.on(model), out=torch.float32))


def test_a_sequence_is_a_row_of_the_batch_whatever_else_it_has() -> None:
    x, weight, grad = cases("normal", (2, 3, 7, 5), (4, 5), (2, 3, 7, 4), dtype=torch.bfloat16)
    bits_of = [
        torch.autograd.grad(f(weight.requires_grad_()), weight, grad)[0]
        for f in (
            lambda w: samebits.linear(x, w),
            lambda w: samebits.matmul(x, w.mT),
        )
    ]
    rows = [(0, 21), (21, 42)]
    want = expected(grad.view(42, 4).mT, x.view(42, 5), TENSOR_CORE.on(HOPPER), sequences=rows)
    for actual in bits_of:
        assert_same_bits(actual, want)


def test_bits_of_the_reference_differ_between_families() -> None:
    a, b = cases("normal", (16, 64), (64, 16), dtype=torch.bfloat16)
    hopper, ampere = (
        samebits.matmul(a, b, out_dtype=torch.float32, contract=TENSOR_CORE.on(m)) for m in (HOPPER, AMPERE)
    )
    assert not torch.equal(bits(hopper), bits(ampere))
