"""Triangular systems under the mode: against a second implementation, alone and beside others."""

from __future__ import annotations

import pytest
import torch

import samebits
from samebits.ops.solve import solve_triangular
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within, within  # noqa: F401 - a fixture
from tests.support.devices import DEVICES
from tests.support.naive import f32

on_devices = pytest.mark.parametrize("device", DEVICES)
on_forms = pytest.mark.parametrize(
    ("upper", "left", "unit"),
    [(u, le, d) for u in (False, True) for le in (True, False) for d in (False, True)],
)


@on_forms
@on_devices
def test_against_a_second_implementation(
    device: str,
    upper: bool,
    left: bool,
    unit: bool,
    within: Within,  # noqa: F811
) -> None:
    n, k = 7, 3
    a = values("normal", (4, n, n), torch.float32, 0).to(device)
    a = a + 3 * torch.eye(n, device=device)
    b = values("normal", (4, n, k) if left else (4, k, n), torch.float32, 1).to(device)
    options = {"upper": upper, "left": left, "unitriangular": unit}
    with within("error"):
        got = torch.linalg.solve_triangular(a, b, **options)
        assert_same_bits(torch.linalg.solve_triangular(a[2:3], b[2:3], **options), got[2:3])
        assert_same_bits(torch.linalg.solve_triangular(a[1], b[1], **options), got[1])
    system, right = (a, b) if left else (a.mT, b.mT)
    order = list(range(n))[:: -1 if upper == left else 1]
    for which in range(4):
        x = [[f32(0)] * k for _ in range(n)]
        for c in range(k):
            for at, i in enumerate(order):
                acc = f32(right[which, i, c].item())
                for j in order[:at]:
                    acc = f32(acc - f32(f32(system[which, i, j].item()) * x[j][c]))
                x[i][c] = acc if unit else f32(acc / f32(system[which, i, i].item()))
        want = torch.tensor([[float(v) for v in row] for row in x])
        assert_same_bits((got[which] if left else got[which].mT).cpu().contiguous(), want)


@on_forms
def test_gradients(upper: bool, left: bool, unit: bool, within: Within) -> None:  # noqa: F811
    a = values("normal", (2, 5, 5), torch.float32, 0) / 4 + torch.eye(5)
    b = values("normal", (3, 2, 5, 4) if left else (3, 2, 4, 5), torch.float32, 1)
    seed = values("normal", tuple(b.shape), torch.float32, 2)
    leaves = [t.requires_grad_() for t in (a, b)]
    options = {"upper": upper, "left": left, "unitriangular": unit}
    want = torch.linalg.solve_triangular(*(t.double() for t in leaves), **options)
    with within("error"):
        got = torch.linalg.solve_triangular(*leaves, **options)
        found = torch.autograd.grad(got, leaves, seed)
        alone = torch.linalg.solve_triangular(a, b[1:2], **options)
        (of_b,) = torch.autograd.grad(alone, b, seed[1:2])
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    for g, w in zip(found, torch.autograd.grad(want, leaves, seed.double()), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert_same_bits(of_b[1], found[1][1])


def test_refusals(within: Within) -> None:  # noqa: F811
    a, b = torch.eye(3), torch.ones(3, 2)
    with within("error"):
        with pytest.raises(RuntimeError):
            torch.linalg.solve_triangular(a[:2], b, upper=True)
        with pytest.raises(samebits.UncoveredError):
            torch.linalg.solve_triangular(a.double(), b.double(), upper=True)
        assert torch.linalg.solve_triangular(a[:0, :0], b[:0], upper=False).shape == (0, 2)
    with pytest.raises(ValueError, match="square"):
        solve_triangular(a[:2], b, upper=True)
    with pytest.raises(TypeError, match="float32"):
        solve_triangular(a.bfloat16(), b.bfloat16(), upper=True)
    x = solve_triangular(a.requires_grad_(), b, upper=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(x.square().sum(), a, create_graph=True)
