"""Grouped products against the naive implementation of docs/contract.md, and against `linear`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE, Contract
from samebits.testing import KINDS, assert_same_bits, values
from tests.contract.test_conformance import CONTRACTS, NAMES, cases
from tests.support import naive_grouped
from tests.support.devices import DEVICES

OFFS = [0, 3, 3, 22, 23]  # of 26 rows: empty groups, a long one, rows of none
SEQUENCES = [5, 5, 1, *[1] * 5, *[2] * 9, *[1] * 5, 1, 9, 9, 9]
IN_16 = [torch.bfloat16, torch.float16]


def as_tensor(found: Any, dtype: torch.dtype) -> Tensor:
    width = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.tensor(found, dtype=torch.int64).to(width).view(dtype)


def name(contract: Contract) -> str:
    return contract.mma.name if contract.mma else "FMA"


def rows_by_hand(
    a: Tensor, b: Tensor, contract: Contract, out: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    out = out or a.dtype
    given = a.double().tolist(), b.double().tolist(), OFFS, name(contract), NAMES[a.dtype], NAMES[out]
    by_hand = None if bias is None else bias.double().tolist()
    return as_tensor(naive_grouped.rows(*given, by_hand, contract.segments), out)


def terms_by_hand(
    a: Tensor,
    b: Tensor,
    sequences: list[int] | None,
    contract: Contract,
    out: torch.dtype | None = None,
    start: Tensor | None = None,
) -> Tensor:
    out = out or a.dtype
    given = a.double().tolist(), b.double().tolist(), OFFS, sequences, name(contract), NAMES[a.dtype]
    from_ = None if start is None else start.double().tolist()
    return as_tensor(naive_grouped.terms(*given, NAMES[out], from_), out)


def ints(of: list[int] | None, device: str) -> Tensor | None:
    return None if of is None else torch.tensor(of, dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
class TestGroups:
    @pytest.mark.sampled(3)
    def test_of_rows(self, contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
        k = 19 * contract.segments
        a, b, bias = cases(kind, (26, k), (5, k, 3), (5, 3), dtype=dtype, device=device)
        offs = ints(OFFS, device)
        for out in {dtype, torch.float32}:
            actual = samebits.grouped_mm(a, b, offs, bias=bias, out_dtype=out, contract=contract)
            assert_same_bits(actual, rows_by_hand(a, b, contract, out, bias))
        turned = samebits.grouped_mm(b.mT, a.mT, offs, contract=contract)
        assert_same_bits(turned.mT, rows_by_hand(a, b, contract))

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("sequences", [None, SEQUENCES], ids=["", "sequences"])
    def test_of_terms(
        self, contract: Contract, dtype: torch.dtype, device: str, kind: str, sequences: list[int] | None
    ) -> None:
        a, b = cases(kind, (3, 26), (26, 4), dtype=dtype, device=device)
        for out in {dtype, torch.float32}:
            actual = samebits.grouped_mm(
                a,
                b,
                ints(OFFS, device),
                sequences=ints(sequences, device),
                out_dtype=out,
                contract=contract,
            )
            assert_same_bits(actual, terms_by_hand(a, b, sequences, contract, out))

    @pytest.mark.sampled(2)
    def test_backward(self, contract: Contract, dtype: torch.dtype, device: str, kind: str) -> None:
        n = 3 if contract.segments == 1 else contract.segments
        a, b, bias, grad = cases(kind, (26, 4), (5, 4, n), (5, n), (26, n), dtype=dtype, device=device)
        leaves = [t.requires_grad_() for t in (a, b, bias)]
        options = {"sequences": ints(SEQUENCES, device), "contract": contract}
        offs = ints(OFFS, device)
        out = samebits.grouped_mm(a, b, offs, bias=bias, **options)
        of_a, of_b, of_bias = torch.autograd.grad(out, leaves, grad)
        a, b = a.detach(), b.detach()
        assert_same_bits(of_a, rows_by_hand(grad, b.mT, contract), "a")
        assert_same_bits(of_b, terms_by_hand(a.mT, grad, SEQUENCES, contract), "b")
        ones = torch.ones(1, 26, dtype=dtype)
        assert_same_bits(of_bias[:, None], terms_by_hand(ones, grad, SEQUENCES, contract), "bias")

        acc = values(kind, (5, 4, n), torch.float32, 7).to(device)
        want = terms_by_hand(a.mT, grad, SEQUENCES, contract, torch.float32, acc)
        leaf = b.mT.contiguous().requires_grad_()  # as a weight [G, out_features, in_features]
        samebits.grouped_mm(a, leaf.mT, offs, main_grad=acc, **options).backward(grad)
        assert leaf.grad is None
        assert_same_bits(acc, want, "main_grad")


@pytest.mark.parametrize(("contract", "dtype", "device"), CONTRACTS)
def test_second_derivatives(contract: Contract, dtype: torch.dtype, device: str) -> None:
    n = 3 if contract.segments == 1 else contract.segments
    shapes = (26, 4), (5, 4, n), (26, n), (26, 4), (5, 4, n)
    a, b, grad, of_a, of_b = cases("normal", *shapes, dtype=dtype, device=device)
    leaves = [t.requires_grad_() for t in (a, b, grad)]
    options = {"sequences": ints(SEQUENCES, device), "contract": contract}
    out = samebits.grouped_mm(a, b, ints(OFFS, device), **options)
    firsts = torch.autograd.grad(out, (a, b), grad, create_graph=True)
    # Each first derivative by itself: where they meet, autograd adds.
    found = torch.autograd.grad(firsts[0], (b, grad), of_a, retain_graph=True)
    a, b, grad = (t.detach() for t in leaves)
    # of_a = rows(grad, b.mT): its gradients are those of groups of rows.
    assert_same_bits(found[0], terms_by_hand(grad.mT, of_a, SEQUENCES, contract).mT, "b")
    assert_same_bits(found[1], rows_by_hand(of_a, b, contract), "grad")
    # of_b = terms(a.mT, grad)
    found = torch.autograd.grad(firsts[1], (leaves[0], leaves[2]), of_b)
    assert_same_bits(found[0], rows_by_hand(grad, of_b.mT, contract), "a")
    assert_same_bits(found[1], rows_by_hand(a, of_b, contract), "grad")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_linear(device: str, dtype: torch.dtype) -> None:
    x, weight, bias, grad = cases(
        "wide", (40, 70), (3, 33, 70), (3, 33), (40, 33), dtype=dtype, device=device
    )
    for t in (x, weight, bias):
        t.requires_grad_()
    ends = [17, 17, 39]
    offs, numbers = ints(ends, device), [0] * 5 + [1] * 35
    y = samebits.grouped_mm(x, weight.mT, offs, bias=bias, sequences=ints(numbers, device))
    grads = torch.autograd.grad(y, (x, weight, bias), grad)
    for g, (start, stop) in enumerate(((0, 17), (17, 17), (17, 39))):
        here = slice(start, stop)
        leaves = [t.detach().requires_grad_() for t in (x[here], weight[g], bias[g])]
        cut = 5 if g == 0 else 0
        cu_seqlens = torch.tensor([0, cut, stop - start], device=device)
        one = samebits.linear(*leaves, cu_seqlens=cu_seqlens)
        wanted = torch.autograd.grad(one, leaves, grad[here])
        assert_same_bits(y[here], one, f"out {g}")
        assert_same_bits(grads[0][here], wanted[0], f"x {g}")
        assert_same_bits(grads[1][g], wanted[1], f"weight {g}")
        assert_same_bits(grads[2][g], wanted[2], f"bias {g}")
    assert_same_bits(y[39:], torch.zeros_like(y[39:]))
    assert_same_bits(grads[0][39:], torch.zeros_like(x[39:]))


@pytest.mark.parametrize("device", DEVICES)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=7),
    k=st.integers(0, 90),
    n=st.integers(1, 70),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_rows_in_every_company(
    device: str,
    dtype: torch.dtype,
    kind: str,
    counts: list[int],
    k: int,
    n: int,
    seed: int,
    data: st.DataObject,
) -> None:
    groups, rows = len(counts), sum(counts) + 1
    x = values(kind, (rows, k), dtype, seed, device)
    weight = values(kind, (groups, n, k), dtype, seed + 1, device)
    bias = values("normal", (groups, n), dtype, seed + 2, device)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    full = samebits.grouped_mm(x, weight.mT, ends, bias=bias)
    assert_same_bits(full[-1], torch.zeros_like(full[-1]), "a row of no group")

    row = data.draw(st.integers(0, rows - 1), "row")
    g = int((ends <= row).sum())
    if g == groups:
        return
    alone = samebits.linear(x[row], weight[g], bias[g])
    assert_same_bits(full[row], alone, "linear")

    company = values("special", (data.draw(st.integers(1, 50), "company"), k), dtype, seed + 3, device)
    at = data.draw(st.integers(0, len(company) - 1), "position")
    company[at] = x[row]
    start = data.draw(st.integers(0, at), "start")
    end = data.draw(st.integers(at + 1, len(company)), "end")
    offs = torch.tensor([start] * g + [end, end, end], dtype=torch.int32, device=device)

    def among(one: Tensor) -> Tensor:
        return torch.stack(
            [torch.full_like(one, torch.nan)] * g + [one] + [torch.full_like(one, torch.nan)] * 2
        )

    others = among(weight[g]).transpose(1, 2).contiguous()
    got = samebits.grouped_mm(company, others, offs, bias=among(bias[g]))
    assert_same_bits(got[at], alone, "beside NaN and inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("contract", [TENSOR_CORE, FMA], ids=str)
def test_a_layer_of_experts_packed_padded_and_in_micro_batches(device: str, contract: Contract) -> None:
    """The float32 gradient of the experts' weights, of one batch in three forms."""
    experts, top_k, lengths, size, width = 4, 2, [5, 33, 1, 20], 24, 17
    tokens = sum(lengths)
    dtype = torch.bfloat16
    x, grad = cases("normal", (tokens, size), (tokens, top_k, width), dtype=dtype, device=device)
    weight = values("normal", (experts, width, size), dtype, 9).to(device).requires_grad_()
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.manual_seed(t))[:top_k] for t in range(tokens)]
    )
    chosen = chosen.to(device)

    def accumulate(acc: Tensor, x: Tensor, chosen: Tensor, grad: Tensor, of_token: Tensor) -> None:
        order = torch.sort(chosen.flatten(), stable=True).indices
        count = torch.stack([(chosen == e).sum() for e in range(experts)])
        offs, numbers = count.cumsum(0).int(), of_token.int()[order // top_k]
        y = samebits.grouped_mm(
            x[order // top_k], weight.mT, offs, sequences=numbers, main_grad=acc.mT, contract=contract
        )
        y.backward(grad.flatten(0, 1)[order])

    def zeros() -> Tensor:
        return torch.zeros(experts, width, size, device=device)

    packed, padded, cut = zeros(), zeros(), zeros()
    of_token = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).to(device)
    accumulate(packed, x, chosen, grad, of_token)

    longest = max(lengths) + 3
    places = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(lengths)]).to(device)

    def padding(t: Tensor, fill: Any) -> Tensor:
        whole = torch.full((4 * longest, *t.shape[1:]), fill, dtype=t.dtype, device=device)
        whole[places] = t
        return whole

    everywhere = torch.arange(4, device=device).repeat_interleave(longest)
    accumulate(padded, padding(x, 3.0), padding(chosen, 1), padding(grad, 0.0), everywhere)

    start = 0
    for n in lengths:
        here = slice(start, start + n)
        accumulate(cut, x[here], chosen[here], grad[here], of_token[here])
        start += n
    assert_same_bits(padded, packed, "padded")
    assert_same_bits(cut, packed, "micro-batches")
