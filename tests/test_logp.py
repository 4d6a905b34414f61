"""Log-probabilities: exp and log, the reference against tests/naive.py, rows, gradients, accuracy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from samebits import functions
from samebits.backends.reference import logp as reference
from samebits.backends.reference import logp_kernels as kernels
from samebits.testing import assert_same_bits
from tests import naive
from tests.ulps import RANGES, worst

ROOT = Path(__file__).parent.parent


def test_constants_are_the_same_everywhere() -> None:
    header = (ROOT / "samebits/backends/cuda/kernels/include/functions.cuh").read_text()
    in_header = {
        name: float.fromhex(value)
        for name, value in re.findall(r"constexpr float (\w+) = (-?0x[\w.+-]+)f;", header)
    }
    assert in_header == functions.CONSTANTS
    for name in ("VOCAB_BLOCK", "CHAINS"):
        assert f"constexpr int {name} = {getattr(functions, name)};" in header
    page = (ROOT / "docs/contract.md").read_text()
    in_page = {
        name: float.fromhex(value)
        for names, value in re.findall(r"\| ([A-Z][A-Z0-9_, ]*) \| `(-?0x[^`]+)`", page)
        for name in names.split(", ")
    }
    assert in_page == functions.CONSTANTS
    for value in functions.CONSTANTS.values():
        assert float(np.float32(value)) == value


def patterns(first: float, last: float, step: int) -> np.ndarray:
    """Every `step`-th f32 from `first` to `last`."""
    low, high = (int(np.float32(x).view(np.uint32)) for x in (first, last))
    return np.arange(low, high, step, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("name", RANGES)
def test_exp_and_log_are_within_one_ulp(name: str) -> None:
    """On a stride; ``python -m tests.ulps`` takes every f32."""
    assert 0.5 < worst(name, 509) < 1


def test_exp_and_log_at_their_ends() -> None:
    for x, y in ((0.0, 1.0), (-0.0, 1.0), (-87.7, 0.0), (-88.0, 0.0), (-1e30, 0.0), (-np.inf, 0.0)):
        assert float(kernels.exp(np.float32(x))) == y
        assert not np.signbit(kernels.exp(np.float32(x)))
    assert np.isnan(kernels.exp(np.float32(np.nan)))
    assert kernels.log(np.float32(1)) == 0
    assert kernels.log(np.float32(0)) == -np.inf
    assert np.isnan(kernels.log(np.float32(np.nan)))
    x = np.concatenate([patterns(-1e-9, -90, 3_000_017), patterns(1, 2**31, 800_011)])
    for v in x:
        assert kernels.exp(-abs(v)) == naive.exp32(-abs(v))
        assert kernels.log(abs(v)) == naive.log32(abs(v))


KINDS = ["normal", "wide", "one-hot", "uniform", "masked", "infinite", "nan", "nothing"]


def rows(kind: str, tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Logits ``[tokens, vocabulary]``, f32."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, vocabulary, generator=generator)
    at = torch.randint(vocabulary, (tokens, 1), generator=generator)
    if kind == "wide":
        return z * 2000
    if kind == "one-hot":
        return z.scatter(1, at, 300.0)
    if kind == "uniform":
        return torch.full_like(z, 3.7)
    if kind == "masked":
        return z.masked_fill(torch.rand(z.shape, generator=generator) < 0.8, -torch.inf)
    if kind == "nothing":
        return torch.full_like(z, -torch.inf)
    special = {"infinite": torch.inf, "nan": torch.nan}
    if kind in special:
        return z.scatter(1, at, special[kind])
    return z


@pytest.mark.parametrize("vocabulary", [1, 3, 128, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_naive_one(kind: str, vocabulary: int) -> None:
    z = rows(kind, 3, vocabulary)
    target = torch.tensor([0, vocabulary // 2, vocabulary - 1])
    for temperature in (1.0, 0.7):
        want = [naive.logp(row, t, temperature) for row, t in zip(z.tolist(), target.tolist(), strict=True)]
        statistics = reference.Statistics.empty(3, vocabulary, entropy=True)
        scale = float(np.float32(1 / temperature))
        reference.add_statistics(statistics, z, 0, target, scale=scale, entropy=True)
        logp, entropies, _, _ = reference.combine(statistics, entropy=True)
        nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        for got, index in ((logp, 0), (entropies, 1)):
            expected = torch.tensor(np.array([w[index] for w in want]))
            assert_same_bits(got, torch.where(expected.isnan(), nan, expected))
