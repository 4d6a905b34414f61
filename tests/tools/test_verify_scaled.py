"""Verification of products in FP8, where the CPU passes for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from samebits.backends.reference import scaled as reference
from samebits.contract import FP8
from samebits.tools.verify import scaled
from samebits.tools.verify.report import Report
from samebits.tools.verify.scaled import Operands, ScaledCase


def by_reference(
    case: ScaledCase, x: Operands, index: int, wrong: bool = False
) -> Iterator[tuple[object, Callable[[], Tensor]]]:
    """Two schedules that compute by the reference, the second one maybe wrongly."""

    def run(off: float) -> Tensor:
        out = reference.scaled_mm(*x[:4], bias=x.bias, out_dtype=case.out, contract=FP8.key)
        return out + off if off else out

    yield 1, lambda: run(0.0)
    yield 2, lambda: run(float(wrong))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_schedule_is_found(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "launches", partial(by_reference, wrong=wrong))
    monkeypatch.setattr(scaled, "finish", lambda doing: None)
    report = Report(None, "", "", "", {}, False)
    cases = [c for c in scaled.scaled_cases(False) if not c.special and c.m < 20]
    scaled.verify_scaled(report, cases, torch.device("cpu"))
    assert report.compared > 0
    assert (report.differing > 0) == wrong
    assert not wrong or (report.first is not None and report.first.schedule == "2")


def test_cases_have_every_kind() -> None:
    cases = scaled.scaled_cases(False)
    assert {(c.a, c.b) for c in cases} == {(a, b) for a in FP8.input_dtypes for b in FP8.input_dtypes}
    assert {(c.rows, c.whole, c.special) for c in cases} == {
        (rows, whole, special)
        for rows, whole in ((1, False), (1, True), (128, False))
        for special in (False, True)
    }
    assert len(scaled.scaled_cases(True)) > len(cases)
