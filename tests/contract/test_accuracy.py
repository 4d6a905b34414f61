"""Accuracy: results and gradients err at most a few times as much as torch's own do, both against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.testing import values
from tests.support.devices import DEVICES

Run = Callable[..., Tensor]

# name -> ours, torch's, and the shapes of the operands
OPS: dict[str, tuple[Run, Run, list[tuple[int, ...]]]] = {
    "matmul": (samebits.matmul, torch.matmul, [(96, 640), (640, 72)]),
    "bmm": (samebits.bmm, torch.bmm, [(5, 33, 300), (5, 300, 40)]),
    "bmm, tiny": (samebits.bmm, torch.bmm, [(50, 16, 64), (50, 64, 12)]),
    "linear": (samebits.linear, F.linear, [(3, 200, 520), (88, 520), (88,)]),
}


@pytest.mark.parametrize(
    # One chain over all of K errs more than the sums that torch keeps apart, as sums in f32 do: by the square
    # root of their length. In 16 bits the last rounding outweighs that.
    ("dtype", "times"),
    [(torch.float32, 8.0), (torch.bfloat16, 1.1), (torch.float16, 1.1)],
    ids=str,
)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_errors_beside_torch(device: str, name: str, dtype: torch.dtype, times: float) -> None:
    ours, theirs, shapes = OPS[name]
    operands = [values("normal", s, dtype, i).to(device) for i, s in enumerate(shapes)]

    def results(run: Run, in_dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(in_dtype).requires_grad_() for t in operands]
        out = run(*leaves)
        grad = values("normal", tuple(out.shape), dtype, 9).to(device, in_dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    exact = results(theirs, torch.float64)
    for which, got, other, right in zip(
        ("result", *map(str, range(len(operands)))),
        results(ours, dtype),
        results(theirs, dtype),
        exact,
        strict=True,
    ):
        mine, its = ((t.double() - right).square().mean().sqrt().item() for t in (got, other))
        assert mine <= times * its, f"{name} {dtype} {which}: {mine:.3g}, torch {its:.3g}"
