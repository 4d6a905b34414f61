"""Verification of dependent products that are launched back to back.

A kernel may begin before the previous one has ended. It must not yet read what the previous one writes, nor
overwrite what the previous one reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from samebits.backends.kernel import Kernel
from samebits.backends.product import Product
from samebits.testing import values
from samebits.tools.verify.case import ProductCase
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.kernel import takes
from samebits.tools.verify.operands import Inputs
from samebits.tools.verify.report import Report

_STEPS = 12


def verify_chain(
    report: Report,
    case: ProductCase,
    universal: Kernel[Product, Any],
    pairs: Iterable[tuple[Kernel[Product, Any], Any]],
    device: torch.device,
) -> None:
    """Compare chains of square products with the universal kernel's, which waits after each product."""

    def square(seed: int) -> Tensor:
        return values(case.kind, (case.m, case.m), case.dtype, seed, device).div_(case.m**0.5)

    weight = square(0)

    def run(kernel: Kernel[Product, Any], schedule: Any, wait: bool) -> Tensor | None:
        """The result of the last product; None if the kernel does not take these products."""
        acc = torch.zeros((case.m, case.m), device=device) if case.accumulate else None
        matrices = [square(1), square(2)]
        for step in range(_STEPS):
            # Each step reads the previous one's output, as A and as B in turn, and overwrites what that step
            # read. Every step reads and writes an accumulator.
            before, after = matrices if step % 2 == 0 else matrices[::-1]
            out = after if acc is None else acc
            a, b = (before, weight) if step % 4 < 2 else (weight, before)
            a, b = (x if side == "N" else x.mT for x, side in zip((a, b), case.layout, strict=True))
            operands = Inputs(a, b, acc=acc).into(out)
            if not takes(kernel, Product.of(operands, case.step), schedule):
                return None
            kernel.run(operands, schedule)
            if wait:
                finish(f"{kernel.name}, {case}")
        return out

    with running(f"{universal.name}, {case}"):
        want = run(universal, None, wait=True)
    assert want is not None
    for kernel, schedule in pairs:
        doing = f"{kernel.name}, {case.what}, {case}, {schedule}"
        with running(doing):
            got = run(kernel, schedule, wait=False)
            finish(doing)
        if got is not None:
            report.compare(kernel.name, case.what, "one at a time", got, want, case, schedule)
