"""Sums in segments: the tree's order, which sums are cut, and what is refused."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import samebits
from samebits import FMA, HOPPER, TENSOR_CORE, Contract
from samebits.testing import KINDS, assert_same_bits, bits, values
from tests.contract.test_conformance import expected
from tests.support.devices import DEVICES, FAMILY

f32, bf16 = torch.float32, torch.bfloat16


def by_ranks(a: Tensor, b: Tensor, contract: Contract, ranks: int) -> list[Tensor]:
    """The sums that each of a number of GPUs computes from its part of the terms, in f32."""
    alone = contract.segmented(contract.segments // ranks)
    parts = zip(a.chunk(ranks, -1), b.chunk(ranks, -2), strict=True)
    return [samebits.matmul(x, y, out_dtype=f32, contract=alone) for x, y in parts]


def tree(sums: list[Tensor]) -> Tensor:
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("segments", [2, 8, 64])
@pytest.mark.parametrize("contract", [TENSOR_CORE, FMA], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "special"])
def test_every_number_of_ranks_gives_the_same_bits(
    kind: str, contract: Contract, segments: int, device: str
) -> None:
    contract, dtype = contract.segmented(segments), f32 if contract is FMA else bf16
    a, b = (values(kind, s, dtype, 1).to(device) for s in ((5, 24 * segments), (24 * segments, 7)))
    whole = samebits.matmul(a, b, out_dtype=f32, contract=contract)
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        if ranks <= segments:
            found = tree([partial.cpu() for partial in by_ranks(a, b, contract, ranks)])
            found = torch.where(found.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(f32), found)
            assert_same_bits(found, whole.cpu(), f"{ranks} ranks")


def test_the_order_is_that_of_neighbours_in_pairs() -> None:
    big, ones = 2.0**24, torch.ones(4, 1)
    row = torch.tensor([[big, 1.0, 1.0, -big], [big, -big, 1.0, 1.0], [-1.0, big, -big, 2.0]])
    assert samebits.matmul(row, ones, contract=FMA.segmented(4)).flatten().tolist() == [1.0, 2.0, 1.0]
    assert samebits.matmul(row, ones, contract=FMA.segmented(2)).flatten().tolist() == [1.0, 2.0, 1.0]
    assert samebits.matmul(row, ones, contract=FMA).flatten().tolist() == [0.0, 2.0, 1.0]


def test_zeros_and_infinities_of_the_tree() -> None:
    tiny = 2.0**-100
    a = torch.tensor([[-tiny, -tiny], [-tiny, 0.0], [torch.inf, -torch.inf], [torch.inf, torch.nan]])
    b = torch.full((2, 1), tiny)
    want = torch.tensor([-0.0, 0.0, torch.nan, torch.nan])[:, None]
    want[2:] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(f32)
    assert_same_bits(samebits.matmul(a, b, contract=FMA.segmented(2)), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("contract", [TENSOR_CORE.on(HOPPER), FMA], ids=lambda c: c.name)
@pytest.mark.parametrize("vocabulary", [64, 8 * 128, 8 * 300])
def test_linear_logp_cuts_the_gradient_of_hidden_alone(
    contract: Contract, vocabulary: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if contract.mma and device == "cuda":
        contract = TENSOR_CORE.on(FAMILY)
    dtype, module = f32 if contract == FMA else bf16, importlib.import_module("samebits.ops.linear_logp")
    hidden, weight = (values("normal", s, dtype, 2).to(device) for s in ((3, 20), (vocabulary, 20)))
    target = torch.tensor([0, vocabulary - 1, 7], device=device)
    grad = torch.tensor([1.0, -3.0, 0.5], device=device)

    def run(contract: Contract) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        logp = samebits.linear_logp(*leaves, target, contract=contract)
        return logp, *torch.autograd.grad(logp, leaves, grad)

    plain, first = run(contract), run(contract.segmented(8))
    assert_same_bits(first[0], plain[0], "logp")
    assert_same_bits(first[2], plain[2], "weight")
    if dtype == f32:  # rounding to 16 bits hides it
        assert not torch.equal(bits(first[1]), bits(plain[1]))
    for most in (3 * vocabulary // 2, 3 * vocabulary // 8, 3 * 256, 3 * 128):
        monkeypatch.setattr(module, "_GRAD_LOGITS", most)
        for found, want in zip(run(contract.segmented(8)), first, strict=True):
            assert_same_bits(found, want, f"parts of {most} logits")

    # dz by logp of the same logits, and then a plain product
    logits = samebits.matmul(hidden, weight.mT, out_dtype=f32, contract=contract).requires_grad_()
    (dz,) = torch.autograd.grad(samebits.logp(logits, target), logits, grad)
    dz = dz.to(dtype)
    want = samebits.matmul(dz, weight, contract=contract.segmented(8))
    assert_same_bits(first[1], want, "hidden")
    if vocabulary == 64:
        assert_same_bits(want, expected(dz, weight, contract.segmented(8)), "naive")


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda c: samebits.matmul(zeros(2, 12), zeros(12, 8), contract=c),
            "matmul: a, b: K: expected a mul",
        ),
        (lambda c: samebits.matmul(zeros(2, 16), zeros(16, 3), contract=c), "matmul: b: N: expected a mult"),
        (lambda c: samebits.matmul(zeros(1, 2, 16), zeros(4, 16, 12), contract=c, out_dtype=f32), None),
        (
            lambda c: samebits.bmm(zeros(1, 2, 12), zeros(1, 12, 8), contract=c),
            "bmm: a, b: K: expected a mul",
        ),
        (lambda c: samebits.bmm(zeros(1, 2, 16), zeros(1, 16, 12), contract=c), "bmm: b: N: expected a mult"),
        (lambda c: samebits.bmm(zeros(1, 2, 16), zeros(4, 16, 12), contract=c), None),
        (
            lambda c: samebits.linear(zeros(2, 12), zeros(8, 12), contract=c),
            "x, weight: in_features: expected",
        ),
        (lambda c: samebits.linear(zeros(2, 16), zeros(9, 16), contract=c), "weight: out_features: expected"),
        (lambda c: samebits.linear(zeros(2, 16).detach(), zeros(9, 16), contract=c), None),
        (
            lambda c: samebits.linear_logp(zeros(2, 9), zeros(12, 9), torch.tensor([0, 1]), contract=c),
            "linear_logp: weight: V: expected a multiple of 8 for the gradient under contract FMA.seg",
        ),
        (
            lambda c: samebits.addmm_(torch.zeros(2, 3), zeros(2, 5), zeros(5, 3), contract=c),
            "addmm_: b: N: expected a multiple of 8 for the gradient",
        ),
        (
            lambda c: samebits.addmm_(torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(5, 3), contract=c),
            None,
        ),
        (
            lambda c: samebits.grouped_mm(
                zeros(2, 12), zeros(1, 12, 8), torch.tensor([2], dtype=torch.int32), contract=c
            ),
            "grouped_mm: a, b: K: expected a multiple of 8",
        ),
        (
            lambda c: samebits.grouped_mm(
                zeros(1, 12, 8), zeros(8, 2), torch.tensor([2], dtype=torch.int32), contract=c
            ),
            "grouped_mm: a: M: expected a multiple of 8 for the gradient",
        ),
    ],
)
def test_sums_that_segments_do_not_divide_are_refused(
    call: Callable[[Contract], object], match: str | None
) -> None:
    if match is None:
        call(FMA.segmented(8))
        return
    with pytest.raises(ValueError, match=re.escape(match)):
        call(FMA.segmented(8))


def test_a_layer_with_main_grad_is_refused_in_its_forward() -> None:
    layer = samebits.nn.Linear(16, 12, contract=FMA.segmented(8))
    layer.weight.main_grad = torch.zeros(12, 16)
    with pytest.raises(ValueError, match="out_features: expected a multiple of 8 for the gradient"):
        layer(zeros(2, 16))


def test_addmm_continues_one_chain() -> None:
    a, b = values("normal", (3, 40), bf16, 1), values("normal", (40, 5), bf16, 2)
    found = [
        samebits.addmm_(torch.ones(3, 5), a, b, contract=contract)
        for contract in (TENSOR_CORE, TENSOR_CORE.segmented(8))
    ]
    assert_same_bits(found[1], found[0])


def test_under_torch_compile() -> None:
    x, weight = values("normal", (3, 64), f32, 1), values("normal", (8, 64), f32, 2)
    contract = FMA.segmented(8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return samebits.linear(x, weight, contract=contract)

    leaves = [t.requires_grad_() for t in (x, weight)]
    want = samebits.linear(*leaves, contract=contract)
    found = layer(*leaves)
    assert_same_bits(found.detach(), want.detach())
    for one, other in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, want)), strict=True):
        assert_same_bits(one, other)
