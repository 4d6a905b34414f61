"""Hopper's block-scaled FP8 products: all schedules compile, and have the bits of a second implementation."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from samebits.backends.cuda import devices, scaled
from samebits.backends.cuda.products import scaled_sm90
from samebits.backends.cuda.products.scaled_sm90 import SCHEDULES, Scaled, ScaledSchedule
from samebits.testing import assert_same_bits
from tests.support import scaled as naive
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Scaled(0, 4096, 4096, 7168, E4M3, E4M3, 7168, 7168, (56, 1), (56, 1), False, BF16, 4096)
SMEM = 227 << 10
BLOCKS, ROWS, WHOLE = "128x128", "1x128", "rows"
"""How b is scaled: in blocks; in groups of 128 terms of a row; or by one number a row, like a."""


def name(s: ScaledSchedule) -> str:
    tile = s.tile
    return f"{tile.block_m}x{tile.block_n}-{s.chains}-{tile.cluster}{'-swap' * tile.swap}"


def scales(kind: str, rows: int, k: int, *, of_b: bool, device: str) -> Tensor:
    """Positive scales of unlike sizes."""
    lines = -(-rows // 128) if of_b and kind == BLOCKS else rows
    return torch.exp2(torch.randn(lines, 1 if kind == WHOLE else -(-k // 128), device=device) * 3)


def spread(scale: Tensor, rows: int, k: int) -> Tensor:
    """The same scales, for every row and block of k."""
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(128, 0)[:rows]
    return scale.expand(rows, -(-k // 128))


def operand(rows: int, k: int, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(rows, k, device=device) * torch.exp2(torch.randint(-3, 4, (rows, k), device=device))
    return x.to(dtype)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("s", SCHEDULES, ids=name)
def test_schedules_compile_without_spills(s: ScaledSchedule) -> None:
    mixed = replace(PLAIN, b_dtype=E5M2, out_dtype=F16, bias_dtype=F32)
    for p in (PLAIN, replace(PLAIN, b_rows=True), replace(PLAIN, out_dtype=F32), mixed):
        p = replace(p, m=min(p.m, s.tile.block_n)) if s.parts > 1 else p
        if s not in scaled_sm90.SCALED_SM90.all(p):
            continue
        spec = scaled_sm90.spec(p, s)
        assert spec.smem <= SMEM
        assert s.tile.stages > s.chains
        cubin = resources(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


@pytest.mark.parametrize("rows", [False, True])
def test_few_tokens_of_any_k_have_a_schedule(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share a tile have room for so many terms. Beyond, one block computes a tile."""
    monkeypatch.setattr(devices, "device_info", lambda index: SimpleNamespace(sm_count=132))
    shared = []
    for k in (16, 4080, 4096, 7168, *range(8192, 65536, 128), 1 << 20):
        p = replace(PLAIN, device=9, m=8, n=2112, k=k, a_stride=k, b_stride=k, b_rows=rows)
        s = scaled_sm90.SCALED_SM90.choose(p)
        assert s in SCHEDULES
        assert s in scaled_sm90.SCALED_SM90.all(p)
        if s.parts > 1:
            shared.append(k)
    assert shared[0] == 4096
    assert 10_240 <= shared[-1] < 65_536


def test_a_schedule_that_cannot_compute_a_product_is_refused() -> None:
    (few,) = (s for s in SCHEDULES if s.parts > 1)
    for p in (replace(PLAIN, m=few.tile.block_n + 1), replace(PLAIN, m=1, k=1 << 20)):
        with pytest.raises(ValueError, match="schedule: expected"):
            scaled_sm90.SCALED_SM90.plan(p, few)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BLOCKS, ROWS, WHOLE])
@pytest.mark.parametrize("s", SCHEDULES, ids=name)
def test_schedules_have_the_bits_of_the_second_implementation(s: ScaledSchedule, kind: str) -> None:
    if s not in scaled_sm90.SCALED_SM90.all(replace(PLAIN, m=1, b_rows=kind != BLOCKS)):
        pytest.skip("not for these scales: too few registers")
    torch.manual_seed(0)
    formats = itertools.cycle(itertools.product((E4M3, E5M2), repeat=2))
    outputs, biases = itertools.cycle((BF16, F32, F16)), itertools.cycle((None, F32, BF16))
    for m, n, k in ((1, 8, 16), (3, 200, 128), (65, 136, 144), (129, 257, 656), (200, 392, 1040)):
        (a_dtype, b_dtype), out_dtype, bias_dtype = next(formats), next(outputs), next(biases)
        if s.parts > 1 and m > s.tile.block_n:
            continue
        a, b = operand(m, k, a_dtype, "cuda"), operand(n, k, b_dtype, "cuda")
        scale_a = scales(WHOLE if kind == WHOLE else ROWS, m, k, of_b=False, device="cuda")
        scale_b = scales(kind, n, k, of_b=True, device="cuda")
        bias = None if bias_dtype is None else torch.randn(n, device="cuda").to(bias_dtype)
        want = naive.scaled(a, b, spread(scale_a, m, k), spread(scale_b, n, k), bias).to(out_dtype)
        got = scaled.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, schedule=s)
        assert_same_bits(got, want)
        by_columns = scale_a.T.contiguous().T
        assert_same_bits(scaled.scaled_mm(a, b, by_columns, scale_b, bias, out_dtype, schedule=s), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BLOCKS, ROWS])
@pytest.mark.parametrize("k", [4096, 7184, 10240, 13120, 52432])
def test_few_tokens_of_long_rows(k: int, kind: str) -> None:
    """Also where blocks that share a tile have no room for so many terms."""
    for m, n in ((1, 136), (8, 65)):
        a, b = operand(m, k, E4M3, "cuda"), operand(n, k, E4M3, "cuda")
        scale_a = scales(ROWS, m, k, of_b=False, device="cuda")
        scale_b = scales(kind, n, k, of_b=True, device="cuda")
        want = naive.scaled(a, b, spread(scale_a, m, k), spread(scale_b, n, k)).to(BF16)
        p = replace(PLAIN, m=m, n=n, k=k, a_stride=k, b_stride=k, b_rows=kind == ROWS)
        for s in (None, *(s for s in scaled_sm90.SCALED_SM90.all(p) if s.tile.swap)):
            assert_same_bits(scaled.scaled_mm(a, b, scale_a, scale_b, schedule=s), want)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 17, 130])
def test_rows_at_any_address(k: int) -> None:
    a, b = operand(33, k, E4M3, "cuda"), operand(40, k, E4M3, "cuda")
    blocks = -(-k // 128)
    scale_a, scale_b = torch.rand(33, blocks, device="cuda"), torch.rand(40, blocks, device="cuda")
    want = naive.scaled(a, b, scale_a, scale_b).to(BF16)
    assert_same_bits(scaled.scaled_mm(a, b, scale_a, scale_b), want)
    assert_same_bits(scaled.scaled_mm(a[1:], b, scale_a[1:], scale_b), want[1:])


@pytest.mark.gpu
def test_what_lies_behind_k_is_not_read() -> None:
    """Where one operand has to be copied, and the other is part of a wider matrix of NaN."""
    for wide_a in (False, True):
        wide = torch.full((48, 144), float("nan"), device="cuda").to(E4M3)
        wide[:, :130].copy_(operand(48, 130, E4M3, "cuda"))
        odd = operand(48, 131, E4M3, "cuda")[:, 1:]
        a, b = (wide[:, :130], odd) if wide_a else (odd, wide[:, :130])
        scale = torch.rand(48, 2, device="cuda")
        assert_same_bits(scaled.scaled_mm(a, b, scale, scale), naive.scaled(a, b, scale, scale).to(BF16))


@pytest.mark.gpu
def test_neighbours_change_nothing() -> None:
    a, b = operand(300, 512, E4M3, "cuda"), operand(384, 512, E4M3, "cuda")
    scale_a, scale_b = torch.rand(300, 4, device="cuda"), torch.rand(3, 4, device="cuda")
    whole = scaled.scaled_mm(a, b, scale_a, scale_b)
    for rows in (slice(7, 8), slice(5, 69), slice(100, 300)):
        assert_same_bits(scaled.scaled_mm(a[rows], b, scale_a[rows], scale_b), whole[rows])
    a[9] = torch.full((512,), float("nan"), device="cuda").to(E4M3)
    scale_a[11] = float("inf")
    changed = scaled.scaled_mm(a, b, scale_a, scale_b)
    others = [i for i in range(300) if i not in (9, 11)]
    assert_same_bits(changed[others], whole[others])
    assert (changed[9].view(torch.int16) == 0x7FFF).all()
