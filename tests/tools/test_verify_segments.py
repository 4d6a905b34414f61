"""Verification of sums in segments, where the CPU passes for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from samebits.backends.cuda import devices
from samebits.backends.cuda.products import segmented_sm90, tensor_core_sm90
from samebits.backends.product import Operands, Product
from samebits.backends.reference import matmul as reference
from samebits.contract import FMA, HOPPER, TENSOR_CORE
from samebits.tools.verify import segments
from samebits.tools.verify.report import Report
from samebits.tools.verify.segments import SegmentedCase, segmented_cases
from tests.support.fake_gpu import INFO

CPU, HELD_TO = torch.device("cpu"), TENSOR_CORE.on(HOPPER)


class SegmentedStandIn:
    """Computes by the reference, maybe wrongly."""

    def __init__(self, case: SegmentedCase, wrong: bool) -> None:
        self.contract = (FMA if case.step == "fma" else HELD_TO).segmented(case.segments).key
        self.wrong = wrong

    def run(self, x: Operands) -> None:
        x.out.copy_(reference.matmul(x.a, x.b, bias=x.bias, out_dtype=x.out.dtype, contract=self.contract))
        if self.wrong:
            x.out[-1, -1] += 1


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_schedule_is_found(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(
        case: SegmentedCase, p: Product, schedules: Sequence[Any]
    ) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
        yield "kernel", 1, lambda: SegmentedStandIn(case, False)
        yield "kernel", 2, lambda: SegmentedStandIn(case, wrong)

    monkeypatch.setattr(segments, "ways", ways)
    monkeypatch.setattr(segments, "tried", lambda cases, products, thorough: [()] * len(cases))
    monkeypatch.setattr(segments, "finish", lambda doing: None)
    report = Report(None, "", "", "", {}, False)
    cases = [c for c in segmented_cases(True) if c.m * c.n * c.k < 1 << 16]
    assert {c.step for c in cases} == {"mma", "fma"}
    assert {c.segments for c in cases} > {2, 4, 8, 64}
    segments.verify_segments(report, cases, HELD_TO, CPU, False)
    assert report.compared > 0
    assert (report.differing > 0) == wrong
    assert not wrong or (report.first is not None and report.first.schedule == "2")


def test_blocks_take_several_tiles_where_sums_wait_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each way to store them, by TMA and without."""
    monkeypatch.setattr(devices, "device_info", lambda device: INFO)
    products = [segments.unfilled_product(case, CPU) for case in segments.TURNS]
    every = segments.tried(segments.TURNS, products, False)
    for case, p, found in zip(segments.TURNS, products, every, strict=True):
        assert {(s.share, s.cluster) for s in found} == {(1, 1), (2, 1), (2, 2)}
        assert all(-(-p.m // s.block_m) * -(-p.n // s.block_n) > 2 * 132 for s in found)
        assert all(segmented_sm90.in_shared(s, case.segments) for s in found)
    assert [tensor_core_sm90.variant(p).aligned for p in products] == [True, False]
