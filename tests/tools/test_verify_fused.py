"""Verification of fused layers, where the CPU passes for a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from samebits.testing import KINDS, assert_same_bits
from samebits.tools.verify import fused
from samebits.tools.verify.report import Report

CPU = torch.device("cpu")
CASES = fused.fused_cases(False)


@pytest.fixture(autouse=True)
def _one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "finish", lambda doing: None)
    monkeypatch.setattr(fused, "_schedules", lambda case: [None])


def report() -> Report:
    return Report(None, "", "", "", {}, False)


def test_cases_cover_kernels_dtypes_and_kinds_of_values() -> None:
    layers = {"add_rms_norm", "rotary", "norm_rotary", "gated", "gather_logp", "add_adapters"}
    others = {"activation", "rsqrt", "causal_conv1d", "state_space", "delta"}
    assert {c.kernel for c in CASES} == layers | others
    for name in layers:
        text = " ".join(map(str, (c for c in CASES if c.kernel == name)))
        assert all(word in text for word in ("bfloat16", "float16", "float32", *KINDS)), name
    assert {c.row for c in CASES if c.row} >= {(1, torch.bfloat16), (16384, torch.float32)}
    assert len(fused.fused_cases(True)) > len(CASES)


@pytest.mark.parametrize("what", ["shapes", "gradients", "in place"])
def test_a_given_schedule_computes_what_the_public_function_does(what: str) -> None:
    for case in [c for c in CASES if c.row and c.what == what][::7]:
        operands = case.draw()
        for got, want in zip(case.run(*operands, schedule=1), case.run(*operands), strict=True):
            assert_same_bits(got, want)


SOME = list({(case.kernel, case.what): case for case in reversed(CASES)}.values())


@pytest.mark.parametrize("case", SOME, ids=lambda case: f"{case.kernel} {case.what}")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_kernel_is_found(case: fused.FusedCase, wrong: bool) -> None:
    calls = iter((False, wrong))  # the reference, and then the kernel

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        off = next(calls)
        return tuple(torch.where(t.isnan(), t, t + 1) if off else t for t in case.run(*operands))

    found = report()
    fused.verify_fused(found, [dataclasses.replace(case, run=run)], CPU)
    assert found.compared > 0
    assert bool(found.differing) == wrong


def test_every_way_to_share_rows_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_schedules", lambda case: [None, 1] if case.row else [None])
    shared = [case for case in SOME if case.row]
    calls = list(fused.loads(shared[:2], CPU))
    assert len(calls) == 4
    for call in calls:
        call()
