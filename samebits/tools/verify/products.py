"""Verification of one product by every kernel and schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from samebits.backends.kernel import Kernel
from samebits.backends.product import Product
from samebits.contract import Contract
from samebits.tools.verify.case import ProductCase
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.kernel import takes
from samebits.tools.verify.operands import Inputs, make_inputs, make_room
from samebits.tools.verify.reference import REFERENCE, on_cpu
from samebits.tools.verify.report import Report

_LARGE = 1 << 29
"""Multiplications above which the CPU is too slow."""

AROUND = "memory around outputs"


def verify_case(
    report: Report,
    case: ProductCase,
    universal: Kernel[Product, Any],
    pairs: Iterable[tuple[Kernel[Product, Any], Any]],
    contract: Contract,
    device: torch.device,
) -> None:
    """Compare the results of `pairs` of kernels and schedules with the expected one.

    A small case has the CPU reference's result. A large one has the universal kernel's, of which sampled rows
    and columns are compared with the CPU reference.
    """
    inputs = make_inputs(case, device)
    against = REFERENCE
    if case.work <= _LARGE:
        want = on_cpu(case, inputs, contract)
    else:
        against = universal.name
        want = make_room(case, inputs).out
        with running(f"{universal.name}, {case}"):
            universal.run(inputs.into(want))
            finish(f"{universal.name}, {case}")
        rows = sorted({r * (case.m - 1) // 3 for r in range(4)})
        some = dataclasses.replace(case, m=len(rows))
        columns = torch.arange(0, case.n, max(1, case.n * len(rows) * case.k // (_LARGE // 8)), device=device)
        few = dataclasses.replace(some, n=len(columns))
        sampled = on_cpu(few, Inputs(inputs.a[rows], inputs.b[:, columns]), contract)
        report.compare(universal.name, "large, sampled", REFERENCE, want[rows][:, columns], sampled, case)
    expected = make_room(case, inputs)
    expected.out.copy_(want)
    for kernel, schedule in pairs:
        room = make_room(case, inputs)
        operands = inputs.into(room.out)
        if not takes(kernel, Product.of(operands, case.step), schedule):
            continue
        doing = f"{kernel.name}, {case.what}, {case}, {schedule}"
        with running(doing):
            kernel.run(operands, schedule)
            finish(doing)
        report.compare(kernel.name, case.what, against, room.rows, expected.rows, case, schedule)
        report.compare(kernel.name, AROUND, "NaN", room.margins, expected.margins, case, schedule)
