"""Hopper's kernels of log-probabilities without a GPU: all schedules compile and fit."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from samebits.backends.cuda import linear_logp_sm90
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
BF16, F16 = torch.bfloat16, torch.float16
SMEM = 227 << 10

ENTRIES = ("statistics_sm90", False), ("statistics_sm90", True), ("grad_logits_sm90", False)
LOGP = [(*entry, entropy) for entry, entropy in itertools.product(ENTRIES, (False, True))]


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("entry", "kept", "entropy"), LOGP)
def test_log_probabilities_compile_without_spills(entry: str, kept: bool, entropy: bool) -> None:
    """Each schedule with one of three kinds of operands, in turns."""
    operands = [(BF16, None), (BF16, BF16), (F16, F16)]
    for i, s in enumerate(linear_logp_sm90.schedules(entry), entropy):
        dtype, bias = operands[i % 3]
        spec = linear_logp_sm90.spec(
            entry, s, dtype=dtype, bias=bias, entropy=entropy, folded=s.block_n < 32, kept=kept
        )
        assert spec.smem <= SMEM
        assert s.stages >= 2
        cubin = resources(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "columns"),
    [
        (4096, 25344, 384),
        (4096, 151936, 384),
        (131072, 896, 128),  # 1,152 by pairs
        (256, 25344, 128),
    ],
)
def test_columns_of_dz_that_a_cluster_takes(tokens: int, vocabulary: int, columns: int) -> None:
    chosen = linear_logp_sm90.choose("grad_logits_sm90", tokens, vocabulary)
    assert chosen.block_n * chosen.cluster == columns
