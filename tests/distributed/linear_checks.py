"""Checks of split linear layers that run on every rank: ``test_linear.py``."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import samebits
from samebits import FMA, TENSOR_CORE, Contract
from samebits.distributed import column_parallel_linear, exchange, linear, row_parallel_linear
from samebits.testing import assert_same_bits, values
from tests.support.ranks import device, place

CASES = (
    (torch.bfloat16, TENSOR_CORE.segmented(8), (6, 176), 40),  # segments that end within groups of 16
    (torch.bfloat16, TENSOR_CORE.on(samebits.AMPERE).segmented(8), (2, 8, 64), 24),
    (torch.float16, TENSOR_CORE.segmented(16), (17, 32), 48),
    (torch.float32, FMA.segmented(8), (3, 8, 40), 16),
    (torch.float32, None, (8,), 8),
)


def cases() -> list[tuple[torch.dtype, Contract | None, tuple[int, ...], int]]:
    """Those whose family this rank follows: a GPU only its own."""
    if device().type == "cpu":
        return list(CASES)
    return [case for case in CASES if case[1] is None or case[1].mma is not samebits.AMPERE]


def part(t: Tensor, dim: int) -> Tensor:
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()].detach().clone()


def given(
    shape: tuple[int, ...], features: int, dtype: torch.dtype, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, grad = (values(kind, (*shape[:-1], n), dtype, n) for n in (shape[-1], features))
    return x, values(kind, (features, shape[-1]), dtype, 1), values(kind, (features,), dtype, 2), grad


def one_rank(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    contract: Contract | None,
    cu: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The result, and the gradients of x, weight and bias."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, *(() if bias is None else (bias,)))]
    if contract is None:
        contract = (FMA if x.dtype == torch.float32 else TENSOR_CORE).segmented(8)
    y = samebits.linear(*leaves, cu_seqlens=cu, contract=contract)
    y.backward(grad)
    return y, *(t.grad for t in leaves if t.grad is not None)


def leaf(t: Tensor) -> Tensor:
    return place(t.detach()).clone().requires_grad_()


def check_rows() -> None:
    for small, many in ((1 << 20, 256), (0, 256), (0, 1)):
        for i, (dtype, contract, shape, features) in enumerate(cases()):
            x, weight, bias, grad = given(shape, features, dtype, ("normal", "cancel")[i % 2])
            for b in (bias, None):
                want = one_rank(x, weight, b, grad, contract)
                leaves = leaf(part(x, -1)), leaf(part(weight, 1)), *(() if b is None else (leaf(b),))
                with mock.patch.object(exchange, "_SMALL", small), mock.patch.object(linear, "_MANY", many):
                    y = row_parallel_linear(*leaves, contract=contract)
                assert_same_bits(y, want[0], f"{contract}: y")
                y.backward(place(grad))
                cut = part(want[1], -1), part(want[2], 1), *want[3:]
                for t, expected in zip(leaves, cut, strict=True):
                    assert t.grad is not None
                    assert_same_bits(t.grad, expected, f"{contract}: gradient of {tuple(t.shape)}")


def check_columns() -> None:
    for (i, (dtype, contract, shape, features)), many in itertools.product(enumerate(cases()), (256, 1)):
        x, weight, bias, grad = given(shape, features, dtype, ("normal", "cancel")[i % 2])
        for b in (bias, None):
            want = one_rank(x, weight, b, grad, contract)
            leaves = leaf(x), leaf(part(weight, 0)), *(() if b is None else (leaf(part(b, 0)),))
            y = column_parallel_linear(*leaves, contract=contract)
            assert_same_bits(y, part(want[0], -1), f"{contract}: y")
            with mock.patch.object(linear, "_MANY", many):
                y.backward(place(part(grad, -1)))
            for t, expected in zip(leaves, (want[1], *(part(w, 0) for w in want[2:])), strict=True):
                assert t.grad is not None
                assert_same_bits(t.grad, expected, f"{contract}: gradient of {tuple(t.shape)}")


def check_sequences_split_over_ranks() -> None:
    for dtype, shape, dim in ((torch.bfloat16, (2, 16, 32), 1), (torch.float32, (8, 24), 0)):
        x, weight, bias, grad = given(shape, 40, dtype, "cancel")
        want = one_rank(x, weight, bias, grad, None)
        leaves = leaf(part(x, dim)), leaf(part(weight, 0)), leaf(part(bias, 0))
        y = column_parallel_linear(*leaves, sequence_dim=dim - len(shape))
        assert_same_bits(y, part(want[0], -1))
        y.backward(place(part(grad, -1)))
        for t, expected in zip(leaves, (part(want[1], dim), part(want[2], 0), part(want[3], 0)), strict=True):
            assert t.grad is not None
            assert_same_bits(t.grad, expected)
        leaves = leaf(part(x, -1)), leaf(part(weight, 1)), leaf(bias)
        y = row_parallel_linear(*leaves, sequence_dim=dim)
        assert_same_bits(y, part(want[0], dim))
        y.backward(place(part(grad, dim)))
        for t, expected in zip(leaves, (part(want[1], -1), part(want[2], 1), want[3]), strict=True):
            assert t.grad is not None
            assert_same_bits(t.grad, expected)


def check_packed_sequences() -> None:
    cu = torch.tensor([0, 5, 5, 21])
    here = place(cu)
    x, weight, bias, grad = given((21, 32), 16, torch.bfloat16, "normal")
    want = one_rank(x, weight, bias, grad, None, cu)
    y = row_parallel_linear(place(part(x, -1)), w := leaf(part(weight, 1)), b := leaf(bias), cu_seqlens=here)
    y.backward(place(grad))
    assert w.grad is not None
    assert b.grad is not None
    assert_same_bits(w.grad, part(want[2], 1))
    assert_same_bits(b.grad, want[3])
    y = column_parallel_linear(place(x), w := leaf(part(weight, 0)), cu_seqlens=here)
    y.backward(place(part(grad, -1)))
    assert w.grad is not None
    assert_same_bits(w.grad, part(want[2], 0))
    if not here.is_cuda:  # where it ends in a device assert
        with pytest.raises(ValueError, match="run from 0 to 21"):
            row_parallel_linear(part(x, -1), part(weight, 1), cu_seqlens=cu[:-1])


def check_a_block_of_two_layers() -> None:
    """Column, then row: nothing is exchanged between them."""
    x, up, _, _ = given((5, 32), 64, torch.bfloat16, "normal")
    down = values("normal", (32, 64), torch.bfloat16, 5)
    contract = TENSOR_CORE.segmented(8)
    leaves = leaf(x), leaf(up), leaf(down)
    y = samebits.linear(
        samebits.linear(leaves[0], leaves[1], contract=contract).relu(), leaves[2], contract=contract
    )
    y.backward(y.detach())
    mine = leaf(x), leaf(part(up, 0)), leaf(part(down, 1))
    hidden = column_parallel_linear(mine[0], mine[1], contract=contract).relu()
    z = row_parallel_linear(hidden, mine[2], contract=contract)
    z.backward(z.detach())
    assert_same_bits(z, y)
    for t, whole, dim in zip(mine, leaves, (None, 0, 1), strict=True):
        assert t.grad is not None
        assert whole.grad is not None
        assert_same_bits(t.grad, whole.grad if dim is None else part(whole.grad, dim))


def check_traced() -> None:
    if dist.get_world_size() > 2:
        return  # tracing takes each process seconds

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return row_parallel_linear(column_parallel_linear(x, up).relu(), down)

    x, up, _, _ = given((5, 32), 64, torch.bfloat16, "normal")
    down = values("normal", (32, 64), torch.bfloat16, 5)
    results = []
    for run in (block, block._torchdynamo_orig_callable):  # type: ignore[attr-defined]
        mine = leaf(x), leaf(part(up, 0)), leaf(part(down, 1))
        y = run(*mine)
        y.backward(y.detach())
        results.append([y, *(t.grad for t in mine)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def check_refusals() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weight = place(torch.zeros(4, 16)), place(torch.zeros(8, 16))
    with pytest.raises(ValueError, match=r"sequence_dim.*got 1"):
        row_parallel_linear(x, weight, sequence_dim=1)
    with pytest.raises(ValueError, match="in_features must be equal"):
        column_parallel_linear(place(x), weight[:, :8])
    with pytest.raises(ValueError, match=r"in_features: expected a multiple of 8"):
        column_parallel_linear(x[:, :12], weight[:, :12])
    with pytest.raises(ValueError, match=r"out_features: expected a multiple of 8 for the gradient"):
        row_parallel_linear(x.requires_grad_(), weight[:4])
    if ranks > 1:
        for contract in (FMA, FMA.segmented(ranks // 2)):
            with pytest.raises(ValueError, match=f"at least {ranks} segments"):
                row_parallel_linear(x, weight, contract=contract)
        with pytest.raises(ValueError, match=r"ranks .* differ from rank 0"):
            row_parallel_linear(x, weight, contract=FMA.segmented(8 << rank % 2))
        with pytest.raises(ValueError, match=r"ranks .* differ from rank 0"):
            column_parallel_linear(x, place(torch.zeros(8 << rank % 2, 16)))
        with pytest.raises(ValueError, match=r"ranks .* differ from rank 0"):
            (row_parallel_linear if rank % 2 else column_parallel_linear)(x, weight)
    if ranks == 4:
        with pytest.raises(ValueError, match="multiple of 4 ranks"):
            row_parallel_linear(place(torch.zeros(6, 16)), weight, sequence_dim=0)
