"""Verification of products in FP8, also of groups, where the CPU passes for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from samebits.backends.reference import scaled as reference
from samebits.contract import FP8
from samebits.tools.verify import scaled, scaled_grouped
from samebits.tools.verify.report import Report
from samebits.tools.verify.scaled import Operands, ScaledCase
from samebits.tools.verify.scaled_grouped import ScaledGroupedCase


def by_reference(
    case: ScaledCase, x: Operands, index: int, wrong: bool = False
) -> Iterator[tuple[object, Callable[[], Tensor]]]:
    """Two schedules that compute by the reference, the second one maybe wrongly."""

    def run(off: float) -> Tensor:
        out = reference.scaled_mm(*x[:4], bias=x.bias, out_dtype=case.out, contract=FP8.key)
        return out + off if off else out

    yield 1, lambda: run(0.0)
    yield 2, lambda: run(float(wrong))


def groups_by_reference(
    case: ScaledGroupedCase, x: Sequence[Tensor], index: int, wrong: bool = False
) -> Iterator[tuple[object, Callable[[], Tensor]]]:
    """The same of groups."""

    def run(off: float) -> Tensor:
        bias = None if case.bias is None else x[5]
        out = reference.scaled_grouped_mm(*x[:5], bias=bias, out_dtype=case.out, contract=FP8.key)
        return out + off if off else out

    yield 1, lambda: run(0.0)
    yield 2, lambda: run(float(wrong))


@pytest.fixture(autouse=True)
def _one_kind_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is compared with itself here. ``tests/contract`` has all kinds, and another witness."""
    monkeypatch.setattr(scaled, "KINDS", ("special",))
    monkeypatch.setattr(scaled, "finish", lambda doing: None)
    monkeypatch.setattr(scaled_grouped, "finish", lambda doing: None)


def report() -> Report:
    return Report(None, "", "", "", {}, False)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_schedule_is_found(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "launches", partial(by_reference, wrong=wrong))
    found = report()
    cases = [c for c in scaled.scaled_cases(False) if not c.special and c.m < 20]
    scaled.verify_scaled(found, cases, torch.device("cpu"))
    assert {line.kernel for line in found.lines} == {"scaled_sm90", "quantize", "silu_mul_quantize"}
    assert found.compared > 0
    assert (found.differing > 0) == wrong
    assert not wrong or (found.first is not None and found.first.schedule == "2")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_schedule_of_groups_is_found(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_grouped, "launches", partial(groups_by_reference, wrong=wrong))
    found = report()
    cases = [c for c in scaled_grouped.scaled_grouped_cases(False) if c.rows < 100]
    assert {c.masked for c in cases} == {False, True}
    scaled_grouped.verify_scaled_grouped(found, cases, torch.device("cpu"))
    assert found.compared > 0
    assert (found.differing > 0) == wrong
    assert not wrong or (found.first is not None and found.first.schedule == "2")


def test_cases_have_every_kind() -> None:
    cases = scaled.scaled_cases(False)
    assert {(c.a, c.b) for c in cases} == {(a, b) for a in FP8.input_dtypes for b in FP8.input_dtypes}
    assert {(c.rows, c.whole, c.special) for c in cases} == {
        (rows, whole, special)
        for rows, whole in ((1, False), (1, True), (128, False))
        for special in (False, True)
    }
    assert len(scaled.scaled_cases(True)) > len(cases)
