"""samebits.batch_invariant: calls in all forms that PyTorch takes, and results that behave as PyTorch's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.mode import batch_invariant, overrides
from samebits.ops import _operator
from samebits.ops.expand import sum_over_broadcast
from samebits.ops.reduce import sum
from samebits.ops.softmax import log_softmax
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within
from tests.mode.test_mode import COVERED, X


@pytest.mark.parametrize("name", COVERED)
def test_results_made_without_gradients_change_in_place_with_some(name: str, within: Within) -> None:
    scale = torch.ones((), requires_grad=True)
    w, b = values("normal", (40, 40), torch.float32, 1), values("normal", (40,), torch.float32, 2)
    for mode in (nullcontext(), within()):
        with mode, torch.no_grad():
            y = COVERED[name](X, w, b)
        if isinstance(mode, nullcontext) and y._is_view():
            return  # PyTorch's own may not be changed either
        assert y.mul_(scale).requires_grad


@pytest.mark.parametrize("name", COVERED)
def test_nothing_waits_for_the_garbage_collector(name: str, within: Within) -> None:
    """What a call held is free when its results are: no cycles keep tensors alive."""
    w, b = values("normal", (40, 40), torch.float32, 1), values("normal", (40,), torch.float32, 2)
    x = X.clone().requires_grad_()

    def call() -> None:
        y = COVERED[name](x, w, b)
        if y.requires_grad:
            torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)

    with within():
        call()
        gc.disable()
        gc.freeze()  # what is there already does not count, and takes no time; it stays so
        try:
            call()
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_in_place_functions_return_what_they_changed(within: Within) -> None:
    x = torch.rand(3, 4)
    with within("error"), torch.no_grad():
        assert x.exp_() is x
        assert x[:2].mul_(2)._base is x
        assert torch.add(x[0], x[1], out=(row := x[2])) is row


COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "abs": lambda a, b: a.abs(),
    "angle": lambda a, b: a.angle(),
    "square": lambda a, b: a.square(),
    "sgn": lambda a, b: a.sgn(),
    "reciprocal": lambda a, b: a.reciprocal(),
    "softsign": lambda a, b: F.softsign(a),
    "rotary": lambda a, b: torch.view_as_real(torch.view_as_complex(torch.view_as_real(a)) * b).flatten(1),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_alone_and_in_batches(name: str, within: Within) -> None:
    a, b = (torch.complex(*values("normal", (2, 61, 7), torch.float32, i)) for i in (0, 1))

    def run(part: slice) -> tuple[Tensor, Tensor]:
        leaf = a[part].clone().requires_grad_()
        with within("error"):
            y = COMPLEX[name](leaf, b[part])
        return y.detach(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

    def bits(t: Tensor) -> Tensor:
        return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t

    whole = run(slice(None))
    for row in range(61):
        for got, want in zip(run(slice(row, row + 1)), whole, strict=True):
            assert_same_bits(bits(got), bits(want[row : row + 1]), f"row {row}")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", ["*", "alpha", "where"])
def test_what_a_complex_or_scaled_operand_is_broadcast_with_has_a_gradient_in_token_order(
    form: str, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any device: meta tensors stand for those of a GPU. Wherever the backward runs."""
    z = torch.randn(8, 4, dtype=torch.complex64 if form == "*" else torch.float32, device="meta")
    w = torch.randn(4, device="meta", requires_grad=True)
    seen: list[tuple[int, ...]] = []

    def ours(x: Tensor, shape: list[int]) -> Tensor:
        seen.append(tuple(shape))
        return sum_over_broadcast(x, shape)

    monkeypatch.setattr(overrides, "sum_over_broadcast", ours)
    with batch_invariant("error"):
        y = z * w if form == "*" else torch.add(z, w, alpha=2)
        y = torch.where(z > 0, w, z) if form == "where" else y
    with batch_invariant("error") if inside else nullcontext():
        torch.autograd.grad(y, w, torch.ones_like(y))
    assert seen == [(1, 4)]


def test_a_context_within_an_operator_that_another_context_called() -> None:
    a, b = values("normal", (30, 99), torch.float32, 0), values("normal", (99, 33), torch.float32, 1)

    @torch.library.custom_op("samebits_tests::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        with batch_invariant("error"):
            return torch.mm(a, b)

    with batch_invariant():
        assert_same_bits(product(a, b), samebits.matmul(a, b))


def test_softmax_lies_in_memory_as_pytorchs(within: Within) -> None:
    for x in (X, X.mT, X[:, :, ::2]):
        for dim in range(3):
            for f in (F.softmax, F.log_softmax):
                want = f(x, dim=dim)
                with within("error"):
                    assert f(x, dim=dim).stride() == want.stride()


def test_attention_without_queries_has_a_backward(within: Within) -> None:
    q, k = torch.randn(1, 2, 0, 8, requires_grad=True), torch.randn(1, 2, 5, 8, requires_grad=True)
    with within("error"):
        out = F.scaled_dot_product_attention(q, k, k)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert dq.shape == q.shape
    assert dk.shape == k.shape
    assert not dk.any()


ODD_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a dim of numpy's": lambda x: x.sum(np.int64(1)),
    "a dim in a tensor": lambda x: x.mean(torch.tensor(1)),
    "softmax over a dim of numpy's": lambda x: x.softmax(np.int64(1)),
    "no out": lambda x: torch.mm(x, x.mT, out=None),
    "a bias of rows": lambda x: F.linear(x, x, x @ x.mT),
    "expanded to its own shape": lambda x: (x * 1).expand(3, 40).add_(1),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_calls_that_pytorch_takes(name: str, within: Within) -> None:
    x = X[:3, 0].clone().requires_grad_()
    want = ODD_CALLS[name](x)
    with within("error"):
        got = ODD_CALLS[name](x)
    torch.testing.assert_close(got, want)


WRONG_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm of a batch": lambda x: torch.mm(x, x.mT),
    "mv of a batch": lambda x: torch.mv(x, x[0, 0]),
    "dot of matrices": lambda x: torch.dot(x[0], x[0]),
    "bmm of two batches": lambda x: torch.bmm(x, x.mT[:1]),
    "bmm of a matrix": lambda x: torch.bmm(x, x[0].mT),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_calls_that_pytorch_refuses(name: str, within: Within) -> None:
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        WRONG_CALLS[name](X)
    with within("error"), pytest.raises(type(theirs.value)) as ours:
        WRONG_CALLS[name](X)
    assert str(ours.value) == str(theirs.value)


def test_a_number_in_a_tensor_has_the_gradient_of_its_elements_alone() -> None:
    """Not of those that fill a whole vector, which may be infinite."""
    power = torch.tensor(-200.0, requires_grad=True)
    with batch_invariant("error"):
        (got,) = torch.autograd.grad(torch.pow(torch.tensor([2.0, 3.0]), power).sum(), power)
    assert got == 0


def test_a_backward_goes_around_the_dispatcher(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function mode that is on the stack, but disabled in the backward, is no reason for a slow call."""
    bypass, answers = _operator.bypasses_dispatcher, []

    def asked(tensors: list[Tensor]) -> bool:
        answers.append(bypass(tensors))
        return answers[-1]

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with within():
        y = F.linear(x, w)
        monkeypatch.setattr(_operator, "bypasses_dispatcher", asked)
        torch.autograd.grad(y, (x, w), torch.ones(4, 4))
    assert answers == [True] * len(answers)
    assert len(answers) >= 2


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_has_the_bits_of_its_parts(reduction: str, within: Within) -> None:
    """Of a float32 matrix it stores no log-softmax. Losses, and gradients that are not zero, are the same."""
    x = values("wide", (7, 300), torch.float32, 3)
    x[1, 5], x[2] = -torch.inf, -torch.inf
    x.requires_grad_()
    target = torch.tensor([0, 5, 1, 299, -100, 7, 8])
    losses = F.nll_loss(log_softmax(x, 1), target, reduction="none")
    total = losses if reduction == "none" else sum(losses)
    want = total / 6 if reduction == "mean" else total
    with within("error"):
        got = F.cross_entropy(x, target, reduction=reduction)
    assert_same_bits(got, want)
    seed = torch.tensor([0.5, 1, 1, -2, 3, 4, 1e-30]) if reduction == "none" else torch.tensor(3.0)
    ours, theirs = (torch.autograd.grad(y, x, seed)[0] for y in (got, want))
    assert_same_bits(ours, theirs)


def test_a_row_that_cross_entropy_ignores_may_be_nan(within: Within) -> None:
    x = torch.rand(3, 200)
    x[1] = torch.nan
    x.requires_grad_()
    with within("error"):
        loss = F.cross_entropy(x, torch.tensor([1, -100, 2]))
    assert loss.isfinite()
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("target", [-1, 200])
def test_cross_entropy_refuses_targets_that_are_out_of_range(target: int, within: Within) -> None:
    with within("error"), pytest.raises(IndexError, match="target"):
        F.cross_entropy(torch.rand(2, 200), torch.tensor([1, target]))
