"""Kernels of elements and of rows, compiled for a CPU, beside the reference at the edges of their formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends.cuda import embeddings, gated, norm_rotary
from samebits.backends.reference import fused as reference
from samebits.backends.reference import rows as reference_rows
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels

pytestmark = host_kernels.needs_compiler
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NO_LIMIT = float("inf")


@pytest.mark.parametrize(
    ("activation", "dtype", "kind", "n"),
    [
        ("gelu", BF16, "brink", 64),
        ("relu", BF16, "brink", 64),
        ("silu", F16, "tiny", 37),
        ("sigmoid", F16, "wide", 64),
        ("gpt_oss", F16, "wide", 64),
        ("gelu_tanh", F16, "special", 64),
        ("relu2", BF16, "special", 37),
        ("silu", F32, "brink", 64),
    ],
)
def test_gradients_of_gated(
    monkeypatch: pytest.MonkeyPatch, activation: str, dtype: torch.dtype, kind: str, n: int
) -> None:
    """Also of products that are rounded to zero."""
    host_kernels.use(monkeypatch, gated)
    packed = values(kind, (23, 2 * n), dtype, 1)
    grad = packed[:, n:]
    limit = 2.5 if activation == "gpt_oss" else NO_LIMIT
    for interleaved in (False, True):
        turned = torch.stack(packed.chunk(2, -1), -1).flatten(-2) if interleaved else packed
        args = grad, turned, None, activation, limit, 1.702, interleaved, True, True
        got, want = (f(*args)[0] for f in (gated.gated_backward, reference.gated_backward))
        assert_same_bits(got, want, f"{interleaved=}")


@pytest.mark.parametrize(
    ("dtype", "trig", "kind", "layout", "gradients", "full", "head", "pairs"),
    [
        (BF16, BF16, "special", "halves", "wide", True, 200, 32),
        (F16, F16, "tiny", "pairs", "rounded", False, 64, 32),
        (BF16, F32, "brink", "halves", "split", False, 128, 64),
    ],
)
def test_norm_rotary(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    trig: torch.dtype,
    kind: str,
    layout: str,
    gradients: str,
    full: bool,
    head: int,
    pairs: int,
) -> None:
    """With gradients, by positions, unknown ones too."""
    host_kernels.use(monkeypatch, norm_rotary)
    heads = values(kind, (2, 3, 5, head), dtype, 1)
    q, k = heads[..., :3, :], heads[..., 3:, :]
    grads = values(kind, (2, 3, 3, head), dtype, 2), values("normal", (2, 3, 2, head), dtype, 3)
    weights = [values("normal", (head,), dtype, seed) for seed in (4, 5)]
    cos, sin = (values("normal", (50, 2 * pairs if full else pairs), trig, seed) for seed in (6, 7))
    at = torch.tensor([[3, 49, 0], [50, -1, 7]])

    def run(module: Any, offset: float, once: bool) -> list[Tensor]:
        operands = q, k, *weights, cos, sin, at, 1e-6, offset, once, pairs, layout
        return [
            *module.norm_rotary(*operands),
            *module.norm_rotary_backward(*grads, *operands, gradients, True, True),
        ]

    for offset, once in ((0.0, False), (1.0, True)):
        for got, want in zip(run(norm_rotary, offset, once), run(reference, offset, once), strict=True):
            assert_same_bits(got, want, f"{offset} {once}")


@pytest.mark.parametrize("unsorted", [0, 512])
@pytest.mark.parametrize(("dtype", "n"), [(BF16, 264), (F32, 35)])
def test_embeddings(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int, unsorted: int) -> None:
    """Ids that no other token has, that many have, and of padding."""
    host_kernels.use(monkeypatch, embeddings)
    monkeypatch.setattr(embeddings, "_UNSORTED", unsorted)
    grad = values("special", (70, n), dtype, 1)
    ids = torch.randint(9, (70,), generator=torch.Generator().manual_seed(1))
    ids[[0, 33, 69]], ids[1::2] = torch.tensor([11, 12, 11]), 5
    for padding in (-1, 3):
        got = torch.full((14, n), torch.nan, dtype=dtype)
        embeddings.sums_by_id(grad, ids, got, padding)
        assert_same_bits(got, reference_rows.embedding_backward(grad, ids, 14, padding))
