"""Operations under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samebits.testing import assert_same_bits


def assert_compiles(op: Callable[..., Tensor], leaves: list[Tensor], backend: str) -> None:
    """`op` is one graph under `backend`, whose result and gradients have the bits of an eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=backend)
    got, want = compiled(*leaves), op(*leaves)
    assert_same_bits(got, want)
    gradients = (torch.autograd.grad(out, leaves, torch.ones_like(out)) for out in (got, want))
    for x, y in zip(*gradients, strict=True):
        assert_same_bits(x, y)
