"""Schedules of the Hopper kernel: always there, always within the GPU's limits, compiled without spills."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch

from samebits.backends.cuda import matmul_sm90, runtime
from samebits.backends.cuda.schedule import Product, Schedule, catalogue, choose

SMEM = 227 * 1024
LAYOUTS = list(product((False, True), repeat=2))
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs cuda-core and NVRTC",
)


def fits_gpu(s: Schedule, a_mn: bool, b_mn: bool) -> bool:
    a, b = (b_mn, a_mn) if s.swap else (a_mn, b_mn)
    return s.stages >= 2 and s.smem(s.panel, a, b) <= SMEM // s.blocks and s.fits(a_mn, b_mn)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_any_product_has_a_schedule_that_fits(a_mn: bool, b_mn: bool) -> None:
    sizes = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 1000, 4096, 100_000)
    for m, n, k, sms in product(sizes, sizes, (1, 16, 200, 4096), (114, 132)):
        s = choose(Product(m, n, k, 1, a_mn, b_mn), sms)
        assert fits_gpu(s, a_mn, b_mn), (m, n, k, s)


@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_the_catalogue_fits(a_mn: bool, b_mn: bool) -> None:
    found = catalogue(a_mn, b_mn)
    assert len(found) == len(set(found)) > 20
    for s in found:
        assert fits_gpu(s, a_mn, b_mn), s


@needs_compiler
@pytest.mark.parametrize(("a_mn", "b_mn"), LAYOUTS)
def test_kernels_compile_without_local_memory(a_mn: bool, b_mn: bool) -> None:
    bf16 = torch.bfloat16
    cases = [
        matmul_sm90.Case(bf16, bf16, a_mn, b_mn, folded=True),
        matmul_sm90.Case(bf16, torch.float32, a_mn, b_mn, bias_dtype=bf16),
        matmul_sm90.Case(torch.float16, torch.float32, a_mn, b_mn, accumulate=True, aligned=False),
    ]
    if a_mn and b_mn:
        int64 = torch.int64
        cases.append(matmul_sm90.Case(bf16, torch.float32, True, True, accumulate=True, bounds_dtype=int64))
    schedules = catalogue(a_mn, b_mn)
    for i, case in enumerate(cases):
        for s in schedules[i :: 4 * len(cases)]:
            code = runtime.compile(matmul_sm90.spec(case, s), "sm_90a")
            assert code.local_bytes == code.spill_bytes == 0, (case, s)
