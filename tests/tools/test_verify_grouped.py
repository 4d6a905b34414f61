"""Verification of grouped products, where the CPU passes for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import FMA, HOPPER, TENSOR_CORE
from samebits.backends.cuda import runtime
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.kernel import Kernel
from samebits.backends.reference import grouped as reference
from samebits.tools.verify import grouped
from samebits.tools.verify.report import Report

CPU, HELD_TO = torch.device("cpu"), TENSOR_CORE.on(HOPPER)


class GroupedStandIn(Kernel[GroupedProduct, int]):
    """A kernel that computes by the reference, under two schedules. One of them may be wrong."""

    name = "grouped"

    def __init__(self, step: Any, wrong: bool = False) -> None:
        self.step, self.wrong = step, wrong

    @property
    def catalogue(self) -> Sequence[int]:
        return 1, 2

    def supports(self, p: GroupedProduct) -> bool:
        return p.step == self.step

    def cost(self, p: GroupedProduct, s: int) -> float:
        raise NotImplementedError

    def choose(self, p: GroupedProduct) -> int:
        return 1

    def plan(self, p: GroupedProduct, s: int | None = None) -> Any:
        raise AssertionError

    def run(self, x: GroupedOperands, s: int | None = None) -> None:
        key = (FMA if self.step == "fma" else HELD_TO).key
        if x.out.ndim == 2:
            out = reference.grouped_rows(x.a, x.b, x.offs, bias=x.bias, out_dtype=x.out.dtype, contract=key)
            x.out.copy_(out)
        elif x.accumulate:
            reference.grouped_terms_later(x.out, x.a, x.b, x.offs, None, contract=key)()
        else:
            x.out.copy_(reference.grouped_terms(x.a, x.b, x.offs, None, out_dtype=x.out.dtype, contract=key))
        if self.wrong and s == 2:
            x.out[-1] += 1


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "finish", lambda doing: None)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_schedule_is_found(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [GroupedStandIn("mma", wrong), GroupedStandIn("fma")]
    monkeypatch.setattr(grouped, "grouped_kernels", lambda index: kernels)
    report = Report(None, "", "", "", {}, False)
    cases = [c for c in grouped.grouped_cases(False) if not c.runs and c.rows < 200][:12]
    assert {c.step for c in cases} == {"mma", "fma"}
    assert {c.m == 0 for c in cases} == {True, False}
    grouped.verify_grouped(report, cases, HELD_TO, CPU, False)
    assert report.compared > 0
    assert (report.differing > 0) == wrong
    assert not wrong or (report.first is not None and report.first.schedule == "2")


def test_loading_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels may be loaded already, and bounds of sequences that hold no values lie anywhere."""
    kernel, planned = GroupedStandIn("mma"), []
    monkeypatch.setattr(kernel, "plan", lambda p, s: planned.append(p.runs))
    monkeypatch.setattr(kernel, "run", lambda *_: pytest.fail("this launches"))
    monkeypatch.setattr(grouped, "grouped_kernels", lambda index: [kernel])
    monkeypatch.setattr(runtime, "load", lambda spec, device: planned.append(spec.entry))
    cases = [case for case in grouped.grouped_cases(False) if case.rows < 200]
    for call in grouped.loads(cases, CPU, False):
        call()
    assert {"grouped_runs", True, False} == {*planned}


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_are_compared_with_linear(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped_mm(a: Tensor, b: Tensor, offs: Tensor, **options: Any) -> Tensor:
        return samebits.grouped_mm(a, b, offs, **options) * (1.01 if wrong else 1.0)

    monkeypatch.setattr(grouped, "grouped_mm", grouped_mm)
    monkeypatch.setattr(grouped, "EXPERTS", ((5, 24, 17, 900, 1.0),))
    report = Report(None, "", "", "", {}, False)
    grouped.verify_experts(report, CPU)
    assert {line.what for line in report.lines} == {"rows", "dX", "dW", "db"}
    assert (report.differing > 0) == wrong
