"""Hopper's kernels of attention and log-probabilities without a GPU: all schedules compile and fit."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from samebits.backends.cuda import attention_sm90, compiler, linear_logp_sm90

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMEM = 227 << 10

LOGP = list(itertools.product(("statistics_sm90", "grad_logits_sm90"), (False, True)))


@needs_compiler
@pytest.mark.parametrize(("entry", "entropy"), LOGP)
def test_log_probabilities_compile_without_spills(entry: str, entropy: bool) -> None:
    operands = [(BF16, None), (BF16, BF16), (F16, F16)]
    for s, (dtype, bias) in itertools.product(linear_logp_sm90.schedules(entry), operands):
        spec = linear_logp_sm90.spec(entry, s, dtype=dtype, bias=bias, entropy=entropy, folded=s.block_n < 32)
        assert spec.smem <= SMEM
        assert s.stages >= 2
        cubin = compiler.compile(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


@needs_compiler
@pytest.mark.parametrize(
    ("head", "values", "mask"),
    [(64, 64, None), (128, 128, None), (16, 96, torch.bool), (128, 128, torch.bool), (128, 128, F32)],
    ids=str,
)
def test_attention_compiles_without_spills(head: int, values: int, mask: torch.dtype | None) -> None:
    every = 1 if head == 64 else 2
    for i, s in enumerate(attention_sm90.schedules(head, values)[::every]):
        case = attention_sm90.AttentionVariant((BF16, F16, F16, BF16)[i % 4], head, values, mask)
        spec = attention_sm90.spec(case, s)
        cubin = compiler.compile(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


def test_any_head_has_a_schedule_of_attention_that_fits() -> None:
    for head, values in itertools.product(range(16, 129, 16), repeat=2):
        for s in attention_sm90.schedules(head, values):
            assert s.smem(head, values) <= SMEM
            assert s.stages >= 3
        for rows, blocks in itertools.product((1, 64, 65, 4096), (1, 32, 33, 200, 8192)):
            chosen = attention_sm90.choose(head, values, rows, blocks)
            assert chosen.held >= blocks or chosen.held == 0


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
