"""Verification of grouped products in FP8: every schedule, with memory around the results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samebits.contract import FP8, SCALE_BLOCK
from samebits.testing import values
from samebits.tools.verify.case import F32
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import Surrounded
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report
from samebits.tools.verify.scaled import EPILOGUES, SCALES, finite_bytes

if TYPE_CHECKING:
    from samebits.backends.cuda.products.scaled_grouped_sm90 import ScaledGrouped

_ENDS = (((0, 3, 3, 40, 41, 100), 103), ((64,), 64), ((128, 128, 384), 384), ((0, 0), 9))
_COUNTS = (((0, 3, 17, 1), 17), ((64, 5), 70), ((130, 0, 131), 131))
_SIZES = ((136, 200), (264, 656), (33, 16))
_MANY = ((tuple(range(1, 71)), 75), ((1, 17, 300, 300, 317, 700), 700))
"""Ends of groups, and rows; numbers of rows, and those that a group has; n and k. And larger ones."""


@dataclass(frozen=True, slots=True)
class ScaledGroupedCase:
    """A grouped product ``a[t, k] @ b[g, n, k].T``.

    Attributes:
        offs: ends of groups, or numbers of their rows.
        rows: of all groups; if `masked`, of each.
        b_rows: rows of b that share a scale: 1 or 128.
        whole: whether a row has one scale for all of k.
    """

    offs: tuple[int, ...]
    rows: int
    masked: bool
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    b_rows: int
    whole: bool
    out: torch.dtype
    bias: torch.dtype | None

    def operands(self) -> list[Tensor]:
        """a, b, their scales, offsets, and the bias if there is one. Rows of no group are NaN."""
        groups = len(self.offs)
        shape = (groups, self.rows) if self.masked else (self.rows,)
        blocks = 1 if self.whole else -(-self.k // SCALE_BLOCK)
        a = finite_bytes((*shape, self.k), self.a, 1)
        b = finite_bytes((groups, self.n, self.k), self.b, 2)
        of_a = torch.exp2(4 * values("normal", (*shape, blocks), F32, 3))
        of_b = torch.exp2(4 * values("normal", (groups, -(-self.n // self.b_rows), blocks), F32, 4))
        for t, nan in ((a.view(torch.uint8), 0x7F), (of_a, math.nan)):
            if self.masked:
                for g, count in enumerate(self.offs):
                    t[g, count:] = nan
            else:
                t[self.offs[-1] :] = nan
        found = [a, b, of_a, of_b, torch.tensor(self.offs, dtype=torch.int32)]
        return found if self.bias is None else [*found, values("normal", (groups, self.n), self.bias, 5)]


def scaled_grouped_cases(thorough: bool) -> list[ScaledGroupedCase]:
    """Every form, pair of formats, kind of scales, output and bias, in turn."""
    formats = itertools.cycle(itertools.product(FP8.input_dtypes, repeat=2))
    epilogues, scales = itertools.cycle(EPILOGUES), itertools.cycle(SCALES)
    groups = [(*of, False) for of in _ENDS + (_MANY if thorough else ())] + [(*of, True) for of in _COUNTS]
    found = []
    for (offs, rows, masked), (n, k) in itertools.product(groups, _SIZES):
        (a, b), (out, bias), (b_rows, whole) = next(formats), next(epilogues), next(scales)
        found.append(ScaledGroupedCase(offs, rows, masked, n, k, a, b, b_rows, whole, out, bias))
    return found


def _problem(case: ScaledGroupedCase, index: int) -> ScaledGrouped:
    from samebits.backends.cuda.products.scaled_grouped_sm90 import ScaledGrouped
    from samebits.backends.cuda.products.scaled_sm90 import Scaled

    groups, k = len(case.offs), -(-case.k // 16) * 16
    of_scales = 1 if case.whole else -(-case.k // SCALE_BLOCK), 1
    b_rows = case.b_rows == 1 or case.n == 1
    rows = groups * case.rows if case.masked else case.rows
    p = Scaled(
        *(index, rows, case.n, k, case.a, case.b, k, k, of_scales, of_scales),
        *(b_rows, case.out, case.n, 0, case.bias),
    )
    return ScaledGrouped(p, groups, case.masked, case.n * k, of_scales[0])


def loads(cases: Sequence[ScaledGroupedCase], device: torch.device) -> Iterator[Callable[[], object]]:
    """Calls that load every kernel."""
    from samebits.backends.cuda import runtime
    from samebits.backends.cuda.products.scaled_grouped_sm90 import SCALED_GROUPED_SM90, spec

    specs = {
        spec(p, s)
        for p in (_problem(case, device.index) for case in cases)
        for s in SCALED_GROUPED_SM90.all(p)
    }
    for kernel in specs:
        yield partial(runtime.load, kernel, device.index)


def launches(
    case: ScaledGroupedCase, x: Sequence[Tensor], index: int
) -> Iterator[tuple[object, Callable[[], Tensor]]]:
    """Every schedule that takes a case, and a call of the kernel."""
    from samebits.backends.cuda import scaled
    from samebits.backends.cuda.products.scaled_grouped_sm90 import SCALED_GROUPED_SM90

    a, b, of_a, of_b, offs, *biases = x
    bias = biases[0] if biases else None
    for s in SCALED_GROUPED_SM90.all(_problem(case, index)):
        yield s, partial(scaled.scaled_grouped_mm, a, b, of_a, of_b, offs, bias, case.out, schedule=s)


def verify_scaled_grouped(report: Report, cases: Sequence[ScaledGroupedCase], device: torch.device) -> None:
    """Compare products under every schedule with the CPU reference, and the memory around them with NaN."""
    from samebits.backends.reference import scaled as reference

    name = "scaled_grouped_sm90"
    for case in cases:
        x = case.operands()
        bias = None if case.bias is None else x[5]
        want = reference.scaled_grouped_mm(
            x[0], x[1], x[2], x[3], x[4], bias=bias, out_dtype=case.out, contract=FP8.key
        ).to(device)
        for schedule, call in launches(case, [t.to(device) for t in x], device.index or 0):
            with running(f"{name}, {case}, {schedule}"), Surrounded() as room:
                got = call()
                finish(f"{name}, {case}, {schedule}")
            report.compare(name, "grouped products in FP8", REFERENCE, got, want, case, schedule)
            for margins in room.margins:
                nan = torch.full_like(margins, math.nan)
                report.compare(name, "memory around them", "NaN", margins, nan, case, schedule)
