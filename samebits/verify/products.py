"""One case by every kernel and schedule; a small one is held to the CPU reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from samebits.contract import Contract
from samebits.verify.case import Case
from samebits.verify.failures import finish, running
from samebits.verify.kernel import Kernel
from samebits.verify.operands import Operands, make_operands, make_room
from samebits.verify.reference import REFERENCE, on_cpu
from samebits.verify.report import Report

_LARGE = 1 << 29
"""Multiplications from which on the CPU is too slow."""


AROUND = "memory around outputs"


def verify_case(
    report: Report,
    case: Case,
    universal: Kernel,
    pairs: Iterable[tuple[Kernel, Any]],
    contract: Contract,
    device: torch.device,
) -> None:
    operands = make_operands(case, device)
    against = REFERENCE
    if case.work <= _LARGE:
        want = on_cpu(case, operands, contract)
    else:
        against = universal.name
        want = make_room(case, operands).out
        with running(f"{universal.name}, {case}"):
            universal.run(operands, want, None)
            finish(f"{universal.name}, {case}")
        rows = sorted({r * (case.m - 1) // 3 for r in range(4)})
        some = dataclasses.replace(case, m=len(rows))
        columns = torch.arange(0, case.n, max(1, case.n * len(rows) * case.k // (_LARGE // 8)), device=device)
        few = dataclasses.replace(some, n=len(columns))
        sampled = on_cpu(few, Operands(operands.a[rows], operands.b[:, columns]), contract)
        report.compare(universal.name, "large, sampled", REFERENCE, want[rows][:, columns], sampled, case)
    expected = make_room(case, operands)
    expected.out.copy_(want)
    for kernel, schedule in pairs:
        room = make_room(case, operands)
        if not kernel.takes(operands, room.out, schedule):
            continue
        doing = f"{kernel.name}, {case.what}, {case}, {schedule}"
        with running(doing):
            kernel.run(operands, room.out, schedule)
            finish(doing)
        report.compare(kernel.name, case.what, against, room.rows, expected.rows, case, schedule)
        report.compare(kernel.name, AROUND, "NaN", room.margins, expected.margins, case, schedule)
