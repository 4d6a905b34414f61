"""Norms of orders that are covered: 1 and 2 by this library's sums, 0 and infinite ones exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from samebits.mode import UncoveredError, batch_invariant, set_batch_invariant_mode
from samebits.testing import assert_same_bits

MODES: dict[str, Callable[[], Any]] = {
    "context": lambda: batch_invariant("error"),
    "process": lambda: set_batch_invariant_mode(True, "error"),
}
FORMS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "torch.norm": lambda x, p: torch.norm(x, p, dim=1),
    "torch.linalg.norm": lambda x, p: torch.linalg.norm(x, p, dim=1, keepdim=True),
    "torch.linalg.vector_norm": lambda x, p: torch.linalg.vector_norm(x, p, dim=(-1,)),
    "in float32": lambda x, p: torch.linalg.vector_norm(x, p, dim=-1, dtype=torch.float32),
    "torch._foreach_norm": lambda x, p: torch.stack(torch._foreach_norm(list(x), p)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [0, 1, 2, inf, -inf, 1.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_norm_is_that_of_the_row_alone(form: str, order: float, mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 133, generator=torch.Generator().manual_seed(1)).round(decimals=1).to(dtype)
    x[1, 3] = torch.nan
    expected = FORMS[form](x, order)
    with MODES[mode]():
        whole = FORMS[form](x, order)
        assert_same_bits(whole, torch.cat([FORMS[form](row, order) for row in x.split(1)]))
        if order in (0, inf, -inf):
            assert_same_bits(whole, expected)
    torch.testing.assert_close(whole, expected, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [inf, -inf])
def test_gradients_of_the_largest_are_pytorchs(order: float, mode: str) -> None:
    x = torch.tensor([[1.0, -3.0, 3.0], [0.5, 0.25, 1.0]], requires_grad=True)

    def gradient() -> Tensor:
        (grad,) = torch.autograd.grad(torch.linalg.vector_norm(x, order, dim=1), x, torch.tensor([1.0, 2.0]))
        return grad

    expected = gradient()
    with MODES[mode]():
        assert_same_bits(gradient(), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [0, 1, 1.0, 2.0, inf, -inf])
def test_gradients_are_clipped_by_any_of_them(order: float, foreach: bool | None, mode: str) -> None:
    def clipped(covered: bool) -> list[Tensor]:
        params = [torch.zeros(n, requires_grad=True) for n in (9, 130, 1)]
        for i, p in enumerate(params):
            p.grad = torch.linspace(-1, 2 + i, p.numel())
        with MODES[mode]() if covered else nullcontext():
            total = clip_grad_norm_(params, 0.5, order, foreach=foreach)
        return [total, *(p.grad for p in params if p.grad is not None)]

    for mine, theirs in zip(clipped(True), clipped(False), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_other_orders_are_reported() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    with batch_invariant("error"):
        for order in (3, 0.5, -1):
            with pytest.raises(UncoveredError):
                get_total_norm([x.detach()], order)
        with pytest.raises(UncoveredError):
            torch.linalg.vector_norm(x, 0)  # PyTorch has a gradient of zeros
        with pytest.raises(UncoveredError):
            torch.linalg.norm(x, inf)  # of a matrix
