"""``samebits.topk_routing``: the steps of routers one by one, ties, what is no number, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.ops._rows import rounded
from samebits.testing import assert_same_bits, values
from tests.support.routers import CASES, Case, logits_of, steps

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert_same_bits(got[0], want[0])
    assert got[1].dtype == torch.int64
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_it_is_the_steps_one_by_one(case: Case, dtype: torch.dtype) -> None:
    for kind in ("normal", "ties", "special", "equal"):
        x = logits_of(kind, 33, case.experts, dtype)
        with samebits.batch_invariant():
            want = steps(x, case)
        # A CPU's cast makes other bits of NaN.
        same(samebits.topk_routing(x, case.k, **case.options()), (rounded(want[0], case.dtype), want[1]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_has_its_bits_in_any_batch(case: Case) -> None:
    x, options = logits_of("ties", 40, case.experts, BF16), case.options()
    whole = samebits.topk_routing(x, case.k, **options)
    for rows in (slice(0, 0), slice(7, 8), slice(3, 40, 5)):
        same(samebits.topk_routing(x[rows], case.k, **options), (whole[0][rows], whole[1][rows]))
    for other in (x.T.contiguous().T, torch.cat([x.new_zeros(40, 3), x], 1)[:, 3:]):
        same(samebits.topk_routing(other, case.k, **options), whole)


def test_equal_scores_are_taken_from_the_lowest_on() -> None:
    x = torch.zeros(2, 7)
    x[1, [2, 5]] = 1.0
    _, experts = samebits.topk_routing(x, 4)
    assert experts.tolist() == [[0, 1, 2, 3], [2, 5, 0, 1]]
    x[0, 6], x[1, :] = torch.nan, -torch.inf
    weights, experts = samebits.topk_routing(x, 2, score="logits")
    assert experts.tolist() == [[6, 0], [0, 1]]
    assert weights.isnan().all()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_gradients_are_those_of_the_steps(case: Case, dtype: torch.dtype) -> None:
    if case.score == "logits" and dtype != F32:
        pytest.skip("autograd rounds between these steps")
    x = logits_of("normal", 9, case.experts, dtype)
    grad = values("normal", (9, case.k), case.dtype, 4)
    found = []
    for route in (
        lambda t: steps(t, case),
        lambda t: samebits.topk_routing(t, case.k, **case.options()),
    ):
        leaf = x.clone().requires_grad_()
        with samebits.batch_invariant():
            route(leaf)[0].backward(grad)
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert_same_bits(*found)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    (g,) = torch.autograd.grad(samebits.topk_routing(x, 2)[0].sum(), x, retain_graph=True)
    assert g.shape == x.shape
    with pytest.raises(NotImplementedError, match="topk_routing: second derivatives"):
        torch.autograd.grad(samebits.topk_routing(x, 2)[0].sum(), x, create_graph=True)


def test_the_operator() -> None:
    x = values("normal", (5, 16), BF16, 1).requires_grad_()
    bias = values("normal", (16,), F32, 2)
    rest = 3, "sigmoid", 4, 2, True, 1e-20, 2.5, F32
    torch.library.opcheck(torch.ops.samebits.topk_routing, (x, bias, *rest))
    compiled = torch.compile(samebits.topk_routing, fullgraph=True, backend="aot_eager")
    same(compiled(x, 3), samebits.topk_routing(x, 3))


X = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: samebits.topk_routing(X.long(), 2),
            TypeError,
            "logits: expected bfloat16, float16 or float32",
        ),
        (lambda: samebits.topk_routing(X[0], 2), ValueError, r"logits: expected \[tokens, experts\]"),
        (lambda: samebits.topk_routing(torch.zeros(1, 1025), 2), ValueError, "logits: expected up to 1024"),
        (lambda: samebits.topk_routing(X, 0), ValueError, "k: expected 1 to 8 for 8 experts, got 0"),
        (lambda: samebits.topk_routing(X, 9), ValueError, "k: expected 1 to 8 for 8 experts, got 9"),
        (lambda: samebits.topk_routing(torch.zeros(1, 99), 17), ValueError, "k: expected 1 to 16"),
        (lambda: samebits.topk_routing(X, 2, score="tanh"), ValueError, "score: expected 'softmax'"),  # type: ignore[arg-type]
        (
            lambda: samebits.topk_routing(X, 2, groups=3),
            ValueError,
            "groups: expected 1 to 32, a divisor of 8",
        ),
        (lambda: samebits.topk_routing(X, 2, groups=8), ValueError, "groups of at least two experts"),
        (
            lambda: samebits.topk_routing(X, 2, groups=4, top_groups=5),
            ValueError,
            "top_groups: expected 1 to 4",
        ),
        (lambda: samebits.topk_routing(X, 2, bias=X[0].bfloat16()), ValueError, "bias: expected float32"),
        (
            lambda: samebits.topk_routing(X, 2, bias=X[0, 1:]),
            ValueError,
            r"bias: expected float32 of shape \(8,\)",
        ),
        (lambda: samebits.topk_routing(X, 2, eps=-1.0), ValueError, "eps, scale: expected finite"),
        (lambda: samebits.topk_routing(X, 2, eps=1e39), ValueError, "eps, scale: .* of float32"),
        (lambda: samebits.topk_routing(X, 2, scale=-1e39), ValueError, "eps, scale: .* of float32"),
        (lambda: samebits.topk_routing(X, 2, scale=float("nan")), ValueError, "eps, scale: expected finite"),
        (
            lambda: samebits.topk_routing(X, 2, scale=torch.ones(())),
            TypeError,
            "numbers, got float and Tensor",
        ),
        (lambda: samebits.topk_routing(X, 2, eps="1"), TypeError, "numbers, got str and float"),  # type: ignore[arg-type]
        (lambda: samebits.topk_routing(X, 2, dtype=torch.float64), TypeError, "dtype: expected bfloat16"),
        (
            lambda: samebits.topk_routing(X, 2, score="logits", scale=2.0),
            ValueError,
            "score: 'logits' goes without",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
