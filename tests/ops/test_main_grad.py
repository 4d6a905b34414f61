"""A backward that fails has written all of main_grad, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import samebits
from samebits.backends.cuda import matmul, runtime, tensor_maps
from samebits.backends.cuda.plans import Plans
from samebits.ops import linear_logp
from samebits.testing import assert_same_bits, values
from tests.support.devices import DEVICES

TOKENS, FEATURES, VOCABULARY = 48, 40, 600


class _OutOfMemoryError(RuntimeError):
    """What the n-th allocation raises."""


ALLOCATING: list[tuple[Any, str]] = [
    *((torch, name) for name in ("empty", "empty_like", "zeros", "ones", "arange", "tensor", "where")),
    *((Tensor, "new_" + name) for name in ("empty", "ones", "zeros")),
    *((Tensor, name) for name in ("reshape", "contiguous", "to", "clone")),
    *((np, name) for name in ("empty", "zeros", "array")),
    # Planning and compilation: of a kernel, and of what the copy engine is told of a tensor.
    (runtime, "load"),
    (runtime, "empty"),
    (tensor_maps, "tensor_map"),
]


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, n: int) -> Iterator[None]:
    """The n-th call that may allocate, plan or compile raises."""
    calls = itertools.count(1)

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == n:
                raise _OutOfMemoryError
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ALLOCATING:
            patch.setattr(owner, name, fails(getattr(owner, name)))
        yield


def logp(device: str, dtype: torch.dtype, packed: bool) -> tuple[Tensor, list[Tensor]]:
    """A loss whose backward goes over three parts of the vocabulary, and where it accumulates."""
    x = values("normal", (TOKENS, FEATURES), dtype, 0).to(device).requires_grad_()
    weight = values("normal", (VOCABULARY, FEATURES), dtype, 1).to(device).requires_grad_()
    bias = values("normal", (VOCABULARY,), dtype, 2).to(device).requires_grad_()
    target = (torch.arange(TOKENS, device=device) * 7) % VOCABULARY
    main_grad = values("normal", (VOCABULARY, FEATURES), torch.float32, 3).to(device)
    ends = torch.tensor([0, 19, TOKENS], device=device) if packed else None
    out = samebits.linear_logp(x, weight, target, bias, main_grad=main_grad, cu_seqlens=ends)
    return out.sum(), [main_grad]


def linear(device: str, dtype: torch.dtype, packed: bool) -> tuple[Tensor, list[Tensor]]:
    layer = samebits.nn.Linear(FEATURES, 24, device=device, dtype=dtype)
    accumulators = []
    for i, p in enumerate((layer.weight, layer.bias)):
        with torch.no_grad():
            p.copy_(values("normal", tuple(p.shape), dtype, i))
        p.main_grad = values("normal", tuple(p.shape), torch.float32, 2 + i).to(device)
        accumulators.append(p.main_grad)
    # Sequences of 3 tokens: their bounds are made for the kernel.
    shape = (TOKENS, FEATURES) if packed else (TOKENS // 3, 3, FEATURES)
    x = values("normal", shape, dtype, 4).to(device).requires_grad_()
    ends = torch.tensor([0, 19, TOKENS], device=device) if packed else None
    return layer(x, ends).square().sum(), accumulators


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("made", [logp, linear], ids=lambda f: f.__name__)
def test_all_or_nothing(
    made: Callable[..., tuple[Tensor, list[Tensor]]],
    dtype: torch.dtype,
    packed: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_logp, "_GRAD_LOGITS", TOKENS * 256)
    loss, accumulators = made(device, dtype, packed)
    before = [t.clone() for t in accumulators]
    loss.backward()
    after = [t.clone() for t in accumulators]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for n in itertools.count(1):
        loss, accumulators = made(device, dtype, packed)
        monkeypatch.setattr(matmul, "_plans", Plans())  # plan anew
        try:
            with failing_at(monkeypatch, n):
                loss.backward()
        except _OutOfMemoryError:
            written = not torch.equal(accumulators[0], before[0])
        else:
            break
        for got, want in zip(accumulators, after if written else before, strict=True):
            assert_same_bits(got, want, f"call {n} failed")
    assert n > 5
    for got, want in zip(accumulators, after, strict=True):
        assert_same_bits(got, want)
