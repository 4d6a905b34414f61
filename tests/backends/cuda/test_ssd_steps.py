"""Steps of Mamba 2: kernels have the reference's bits, on a GPU and compiled for a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends.cuda import ssd_steps as kernels
from samebits.backends.reference import ssd_steps as reference
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels
from tests.support.cubins import resources

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FORMS = [
    # dt, bias, D, columns of D, softplus, limits
    (F32, F32, F32, False, True, (0.0, math.inf)),
    (BF16, BF16, F32, True, True, (0.01, 0.7)),
    (F16, None, BF16, False, False, (-1.0, 1.0)),
    (BF16, F32, None, False, False, (0.0, math.inf)),
]


def operands(form: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    dt, bias, d, columns, softplus, limits = form
    heads, size = 5, 7
    steps = values(kind, (67, 2 * heads), dt, 1)[:, ::2]
    of_bias = None if bias is None else values("normal", (heads,), bias, 2)
    of_d = None if d is None else values("normal", (heads, size) if columns else (heads,), d, 3)
    return steps, of_bias, values("normal", (heads,), F32, 4), of_d, size, softplus, *limits


def assert_same(run: Any, given: tuple[Any, ...], device: str) -> None:
    moved = [t.to(device) if isinstance(t, Tensor) else t for t in given]
    for got, want in zip(run(*moved), reference.ssd_steps(*given), strict=True):
        assert_same_bits(got.cpu() + 0, want + 0)  # the sign of zeros apart


@host_kernels.needs_compiler
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_on_a_cpu(form: tuple[Any, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.use(monkeypatch, kernels)
    assert_same(kernels.ssd_steps, operands(form, kind), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "wide", "special"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_on_a_gpu(form: tuple[Any, ...], kind: str) -> None:
    assert_same(kernels.ssd_steps, operands(form, kind), "cuda")


def test_it_compiles() -> None:
    assert resources(kernels.kernel_spec(BF16, BF16, F32, True), "sm_90a").spill_bytes == 0
