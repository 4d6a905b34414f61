"""samebits.ops.triangular: its bits by hand, its gradients, and PyTorch's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebits.mode import batch_invariant
from samebits.ops.triangular import solve_triangular
from samebits.testing import assert_same_bits, values
from tests.support.naive import fma

FORMS = [
    {"upper": upper, "left": left, "unitriangular": unit}
    for upper in (False, True)
    for left in (False, True)
    for unit in (False, True)
]


def system(form: dict[str, Any], batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    a = values("normal", (batch, 6, 6), torch.float32, 0) / 4 + torch.eye(6)
    b = values("normal", (batch, 6, 5) if form["left"] else (batch, 5, 6), torch.float32, 1)
    return (a.triu() if form["upper"] else a.tril()), b


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_beside_pytorch_and_alone(form: dict[str, Any]) -> None:
    a, b = system(form)
    leaves = [t.clone().requires_grad_() for t in (a, b)]
    theirs = [t.clone().requires_grad_() for t in (a, b)]
    with batch_invariant("error"):
        x = torch.linalg.solve_triangular(*leaves, **form)
        (alone,) = torch.linalg.solve_triangular(a[1:2], b[1:2], **form)
    assert_same_bits(alone, x[1].detach())
    want = torch.linalg.solve_triangular(*theirs, **form)
    torch.testing.assert_close(x, want)
    x.square().sum().backward()
    want.square().sum().backward()
    for ours, right in zip(leaves, theirs, strict=True):
        mask = right.grad != 0  # PyTorch's gradient has the zeros of a triangle
        assert ours.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(ours.grad[mask], right.grad[mask])


def test_bits_by_hand() -> None:
    a, b = system(FORMS[3], 1)
    form = {"upper": False, "unitriangular": False}
    x = torch.zeros(6, 5)
    for i in range(6):
        for m in range(5):
            p = torch.tensor(0.0)
            for j in range(i):
                p = torch.tensor(fma(float(a[0, i, j]), float(x[j, m]), float(p)))
            row = b[0, i, m] - p if i else b[0, i, m]
            x[i, m] = row / a[0, i, i]
    a = a.tril()
    assert_same_bits(solve_triangular(a, b, **form)[0], x)  # type: ignore[arg-type]


def test_refused() -> None:
    with pytest.raises(TypeError, match="b: expected float32"):
        solve_triangular(torch.eye(2), torch.eye(2).double(), upper=False)
    with pytest.raises(ValueError, match="a, b: expected"):
        solve_triangular(torch.eye(3), torch.eye(2), upper=False)
