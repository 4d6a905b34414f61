"""The promise: a row's bits do not depend on its company, nor a gradient's on how tokens are batched."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import samebits
from samebits import AMPERE, FMA, TENSOR_CORE, Contract
from samebits.contract import resolve
from samebits.testing import KINDS, assert_same_bits, values
from tests.support.devices import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)
# Padding multiplies finite inputs by zero, so the token properties leave infinities and NaN out.
finite_kinds = st.sampled_from([k for k in KINDS if k not in ("special", "huge")])
seeds = st.integers(0, 2**16)
sizes = st.integers(1, 70)
on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
@given(
    dtype=dtypes,
    kind=st.sampled_from(KINDS),
    m=sizes,
    k=st.integers(0, 90),
    n=sizes,
    seed=seeds,
    data=st.data(),
)
def test_forward_rows(
    device: str, dtype: torch.dtype, kind: str, m: int, k: int, n: int, seed: int, data: st.DataObject
) -> None:
    x = values(kind, (m, k), dtype, seed, device)
    weight = values(kind, (n, k), dtype, seed + 1, device)
    bias = values("normal", (n,), dtype, seed + 2, device)
    full = samebits.linear(x, weight, bias)
    row = data.draw(st.integers(0, m - 1), "row")

    assert_same_bits(samebits.linear(x[row], weight, bias), full[row], "alone")

    company = values("special", (data.draw(sizes, "company"), k), dtype, seed + 3, device)
    at = data.draw(st.integers(0, len(company) - 1), "position")
    company[at] = x[row]
    assert_same_bits(samebits.linear(company, weight, bias)[at], full[row], "beside NaN and inf")

    cuts = sorted(data.draw(st.lists(st.integers(0, m), max_size=4), "cuts"))
    chunks = [x[i:j] for i, j in itertools.pairwise([0, *cuts, m])]
    assert_same_bits(torch.cat([samebits.linear(c, weight, bias) for c in chunks]), full, "chunks")

    column = data.draw(st.integers(0, n - 1), "column")
    one = samebits.linear(x, weight[column : column + 1], bias[column : column + 1])
    assert_same_bits(one, full[:, column : column + 1], "one column")


def relaid(t: Tensor, layout: str) -> Tensor:
    """The same values at other strides."""
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "gaps":
        room = t.new_full((2 * t.shape[0], 3 * t.shape[1] + 1), torch.nan)
        view = room[::2, 1::3]
        return view.copy_(t)
    if layout == "far":
        room = t.new_full((t.shape[0], 4099), torch.nan)
        view = room[:, 1 : 1 + t.shape[1]]
        return view.copy_(t)
    return t


LAYOUTS = ("plain", "transposed", "gaps", "far")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("a_layout", "b_layout"), list(itertools.product(LAYOUTS, LAYOUTS)))
@on_devices
def test_strides(device: str, dtype: torch.dtype, a_layout: str, b_layout: str) -> None:
    a, b = values("wide", (21, 37), dtype, 0, device), values("wide", (37, 67), dtype, 1, device)
    want = samebits.matmul(a, b)
    assert_same_bits(samebits.matmul(relaid(a, a_layout), relaid(b, b_layout)), want)
    acc = values("normal", (21, 67), torch.float32, 2, device)
    want = samebits.addmm_(acc.clone(), a, b)
    strided = relaid(acc, a_layout)
    samebits.addmm_(strided, relaid(a, b_layout), b)
    assert_same_bits(strided, want)


@on_devices
def test_expanded_operands_and_a_reversed_view(device: str) -> None:
    row = values("normal", (1, 40), torch.bfloat16, 0, device)
    b = values("normal", (40, 9), torch.bfloat16, 1, device)
    want = samebits.matmul(row, b)
    assert_same_bits(samebits.matmul(row.expand(7, 40), b)[5:6], want)
    assert_same_bits(samebits.matmul(row.expand(3, 2, 40), b)[1, 1:], want)
    ones = torch.ones((), dtype=torch.bfloat16, device=device).expand(40, 9)
    assert_same_bits(samebits.matmul(row, ones), samebits.matmul(row, ones.contiguous()))


@on_devices
@given(dtype=dtypes, kind=finite_kinds, batch=st.integers(1, 20), seed=seeds, m=sizes, k=sizes, n=sizes)
def test_bmm_elements(
    device: str, dtype: torch.dtype, kind: str, batch: int, seed: int, m: int, k: int, n: int
) -> None:
    a, b = (
        values(kind, (batch, m, k), dtype, seed, device),
        values(kind, (batch, k, n), dtype, seed + 1, device),
    )
    full = samebits.bmm(a, b)
    i = seed % batch
    assert_same_bits(full[i], samebits.matmul(a[i], b[i]), "alone")
    assert_same_bits(samebits.bmm(a, b[i])[i], full[i], "b broadcast")
    assert_same_bits(samebits.bmm(a[i : i + 1], b)[i], full[i], "a broadcast")


def gradients(
    x: Tensor, weight: Tensor, grad: Tensor, contract: Contract | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, ...]:
    bias = weight.new_zeros(weight.shape[0])
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    return torch.autograd.grad(
        samebits.linear(*leaves, cu_seqlens=cu_seqlens, contract=contract), leaves, grad
    )


@on_devices
@given(
    dtype=dtypes,
    contract=st.sampled_from([None, FMA, TENSOR_CORE.on(AMPERE)]),
    kind=finite_kinds,
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    room=st.integers(0, 20),
    seed=seeds,
    data=st.data(),
)
@example(torch.float32, None, "tiny", [3, 16, 0, 17], 5, 0, None)
@example(torch.bfloat16, FMA, "tiny", [16, 16], 16, 1, None)
def test_weight_gradients_of_padded_packed_and_micro_batched(
    device: str,
    dtype: torch.dtype,
    contract: Contract | None,
    kind: str,
    lengths: list[int],
    room: int,
    seed: int,
    data: st.DataObject | None,
) -> None:
    if contract is not None and dtype not in contract.input_dtypes:
        contract = None
    if device == "cuda" and contract is not FMA:
        contract = None  # the GPU's own family
    weight = values("normal", (5, 7), dtype, 0, device)
    xs = [values(kind, (n, 7), dtype, seed + i, device) for i, n in enumerate(lengths)]
    dys = [values(kind, (n, 5), dtype, seed + 100 + i, device) for i, n in enumerate(lengths)]

    ends = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    dx, dw, db = gradients(torch.cat(xs), weight, torch.cat(dys), contract, ends)

    T = max(lengths) + room
    x = values("normal", (len(xs), T, 7), dtype, seed + 200, device)
    dy = x.new_zeros(len(xs), T, 5)
    for i, n in enumerate(lengths):
        x[i, :n], dy[i, :n] = xs[i], dys[i]
    padded = gradients(x, weight, dy, contract)
    for i, n in enumerate(lengths):
        assert_same_bits(padded[0][i, :n], dx[ends[i] : ends[i + 1]], f"x, padded, sequence {i}")
    assert_same_bits(padded[1], dw, "weight, padded")
    assert_same_bits(padded[2], db, "bias, padded")

    # Rounding to 16 bits can hide a difference, so the chains are compared in f32 too.
    tokens, dtokens = torch.cat(xs), torch.cat(dys)
    packed_chain = chain(dtokens.mT[None], tokens[None], contract, ends)
    assert_same_bits(chain(dy.mT, x, contract), packed_chain, "f32, padded")

    # Micro-batches of whole sequences, and one more cut inside a sequence where the contract allows it.
    cuts = set(ends.tolist())
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if data is not None and lengths[longest]:
        within = data.draw(st.integers(0, lengths[longest]), "cut")
        step = 1 if dtype == torch.float32 or contract is FMA else 16
        cuts.add(int(ends[longest]) + within // step * step)
    ones = torch.ones(len(tokens), 1, dtype=dtype, device=device)
    for factor, name in ((tokens, "weight"), (ones, "bias")):
        main_grad = torch.zeros(5, factor.shape[1], device=device)
        for i, j in itertools.pairwise(sorted(cuts)):
            samebits.addmm_(main_grad, dtokens[i:j].mT, factor[i:j], contract=contract)
        want = chain(dtokens.mT[None], factor[None], contract, ends)
        assert_same_bits(main_grad, want, f"f32, micro-batches, {name}")


def chain(a: Tensor, b: Tensor, contract: Contract | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The f32 chain over sequences that a weight gradient rounds."""
    key = resolve(contract, a.dtype, a.device.type)
    return torch.ops.samebits.addbmm(None, a[None], b[None], cu_seqlens, torch.float32, key)[0]  # type: ignore[no-any-return]


@on_devices
def test_sequences_restart_groups(device: str) -> None:
    """What the property above rests on: without the restart, TENSOR_CORE bits do differ."""
    x = values("normal", (1, 40, 70), torch.bfloat16, 1, device)
    dy = values("normal", (1, 50, 40), torch.bfloat16, 2, device)
    one = chain(dy, x, None)
    assert not torch.equal(one, chain(dy, x, None, torch.tensor([0, 3, 6, 9, 25, 40], device=device)))
    assert torch.equal(one, chain(dy, x, None, torch.tensor([0, 16, 32, 40], device=device)))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads: int) -> None:
    a, b = values("normal", (130, 200), torch.bfloat16, 0), values("normal", (200, 300), torch.bfloat16, 1)
    want = samebits.matmul(a, b)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_bits(samebits.matmul(a, b), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0), (1, 1, 1), (1, 300, 1)]
)
@on_devices
def test_edge_shapes(device: str, dtype: torch.dtype, m: int, k: int, n: int) -> None:
    x, weight = values("normal", (m, k), dtype, 0, device), values("normal", (n, k), dtype, 1, device)
    bias = values("normal", (n,), dtype, 2, device)
    y = samebits.linear(x, weight, bias)
    assert y.shape == (m, n)
    if k == 0:
        assert_same_bits(y, bias.expand(m, n).contiguous())
    dx, dw, db = gradients(x, weight, values("normal", (m, n), dtype, 3, device), None)
    assert (dx.shape, dw.shape, db.shape) == (x.shape, weight.shape, bias.shape)
    if m == 0:
        assert_same_bits(dw, torch.zeros_like(weight))
        assert_same_bits(db, torch.zeros_like(bias))
    assert samebits.bmm(x[None].expand(0, m, k), weight.mT).shape == (0, m, n)


@on_devices
def test_an_accumulator_without_terms_keeps_its_bits(device: str) -> None:
    acc = torch.tensor([[-0.0, 1.0], [torch.inf, 0.0]])
    acc.view(torch.int32)[1, 1] = 0x7FC12345  # a NaN with a payload
    before = acc.clone()
    for dtype in DTYPES:
        operands = (torch.empty(s, dtype=dtype, device=device) for s in ((2, 0), (0, 2)))
        assert_same_bits(samebits.addmm_(acc.to(device), *operands), before)
