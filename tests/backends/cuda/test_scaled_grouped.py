"""Hopper's grouped FP8 products: all schedules compile, and have the bits of the CPU reference."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from samebits.backends.cuda import scaled
from samebits.backends.cuda.products import scaled_grouped_sm90
from samebits.backends.cuda.products.scaled_grouped_sm90 import SCHEDULES, ScaledGrouped
from samebits.backends.cuda.products.scaled_sm90 import ScaledSchedule
from samebits.tools.verify.report import Report
from samebits.tools.verify.scaled_grouped import scaled_grouped_cases, verify_scaled_grouped
from tests.backends.cuda.test_scaled import E4M3, E5M2, F16, F32, PLAIN, SMEM, name
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)
EXPERTS = ScaledGrouped(PLAIN, 128, False, 4096 * 7168, 32 * 56)


@needs_compiler
@pytest.mark.parametrize("s", SCHEDULES, ids=name)
def test_schedules_compile_without_spills(s: ScaledSchedule) -> None:
    mixed = replace(PLAIN, b_dtype=E5M2, out_dtype=F16, bias_dtype=F32)
    rows = (PLAIN, replace(PLAIN, b_rows=True), replace(PLAIN, out_dtype=F32), mixed)
    for i, of in enumerate(rows):
        p = replace(EXPERTS, rows=of, masked=bool(i % 2), groups=(128, 1024)[i % 2])
        if s not in scaled_grouped_sm90.SCALED_GROUPED_SM90.all(p):
            continue
        spec = scaled_grouped_sm90.spec(p, s)
        assert spec.smem <= SMEM
        assert dict(spec.constants)["STAGES"] > s.chains
        cubin = resources(spec, "sm_90a")
        assert cubin.spill_bytes == cubin.local_bytes == 0, spec
        assert not cubin.advice, spec


def test_choices_are_in_the_catalogue() -> None:
    for m, groups, b_rows, masked in itertools.product(
        (1, 8, 100, 2000, 30000), (1, 8, 256), (False, True), (False, True)
    ):
        p = ScaledGrouped(replace(PLAIN, m=m, b_rows=b_rows), groups, masked, 4096 * 7168, 0)
        assert scaled_grouped_sm90.SCALED_GROUPED_SM90.choose(
            p
        ) in scaled_grouped_sm90.SCALED_GROUPED_SM90.all(p)


@pytest.mark.gpu
def test_schedules_have_the_reference_bits() -> None:
    report = Report("", "", "", "", {}, False)
    verify_scaled_grouped(report, scaled_grouped_cases(False), torch.device("cuda", 0))
    assert report.compared > 0
    assert report.differing == 0, report.first


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3])
def test_panels_have_the_reference_bits(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of several panels of tiles, and of a rest."""
    lower = [replace(s, tile=replace(s.tile, group=group)) for s in SCHEDULES]
    monkeypatch.setattr(scaled_grouped_sm90, "SCHEDULES", lower)
    report = Report("", "", "", "", {}, False)
    cases = [case for case in scaled_grouped_cases(True) if case.rows > 128]
    verify_scaled_grouped(report, cases, torch.device("cuda", 0))
    assert report.compared > 0
    assert report.differing == 0, report.first


@pytest.mark.gpu
def test_a_column_of_all_groups() -> None:
    """One group, one column, no rows: sizes at which a stride or a map means nothing."""
    for groups, n, rows in ((1, 1, 5), (3, 1, 5), (1, 16, 1), (2, 8, 0)):
        a = torch.ones(rows, 32, device="cuda").to(E4M3)
        b = torch.ones(groups, n, 32, device="cuda").to(E4M3)
        offs = torch.full((groups,), rows, dtype=torch.int32, device="cuda")
        scales = torch.ones(rows, 1, device="cuda"), torch.ones(groups, 1, 1, device="cuda")
        out = scaled.scaled_grouped_mm(a, b, *scales, offs)
        assert (out == 32).all()


BAD = """
import torch
from samebits.backends.cuda import scaled

a = torch.ones({shape}, device="cuda").to(torch.float8_e4m3fn)
b = torch.ones(2, 8, 32, device="cuda").to(torch.float8_e4m3fn)
offs = torch.tensor({offs}, dtype=torch.int32, device="cuda")
scales = torch.ones(*a.shape[:-1], 1, device="cuda"), torch.ones(2, 1, 1, device="cuda")
scaled.scaled_grouped_mm(a, b, *scales, offs)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("refused", error)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "offs"),
    [
        ("5, 32", "[3, 2]"),
        ("5, 32", "[3, 6]"),
        ("5, 32", "[-1, 5]"),
        ("2, 5, 32", "[6, 0]"),
        ("2, 5, 32", "[0, -1]"),
    ],
)
def test_bad_offsets_stop_the_gpu(shape: str, offs: str) -> None:
    """In a process of its own, whose context is lost."""
    code = BAD.format(shape=shape, offs=offs)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "refused" in found.stdout, found.stderr
