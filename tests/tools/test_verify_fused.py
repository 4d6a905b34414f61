"""Verification of fused layers, where the CPU passes for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.testing import KINDS
from samebits.tools.verify import fused
from samebits.tools.verify.report import Report

CPU = torch.device("cpu")
CASES = fused.fused_cases(False)


@pytest.fixture(autouse=True)
def _one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "finish", lambda doing: None)
    monkeypatch.setattr(fused, "_ways", lambda case: iter([(None, nullcontext())]))


def report() -> Report:
    return Report(None, "", "", "", {}, False)


def test_cases_cover_kernels_dtypes_and_kinds_of_values() -> None:
    assert {c.kernel for c in CASES} == {
        "add_rms_norm",
        "rotary",
        "gated",
        "activation",
        "rsqrt",
        "gather_logp",
    }
    for name in ("add_rms_norm", "rotary", "gated", "gather_logp"):
        text = " ".join(map(str, (c for c in CASES if c.kernel == name)))
        assert all(word in text for word in ("bfloat16", "float16", "float32", *KINDS)), name
    assert {c.row for c in CASES if c.row} >= {(1, torch.bfloat16), (16384, torch.float32)}
    assert len(fused.fused_cases(True)) > len(CASES)


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
    def ways(case: fused.FusedCase) -> Iterator[tuple[Any, Any]]:
        yield from [(None, nullcontext()), (1, nullcontext())]

    monkeypatch.setattr(fused, "_ways", ways)
    calls = list(fused.loads(SOME[:2], CPU))
    assert len(calls) == 4
    for call in calls:
        call()
