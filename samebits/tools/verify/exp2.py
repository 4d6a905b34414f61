"""Verification of attention's 2**x: every entry of the instruction's table, and all other ranges of x."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from samebits.contract import INTERPOLATION, POLYNOMIAL, Contract, Exp2Model
from samebits.testing import bits, pattern
from samebits.tools.verify.failures import finish
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report

_PART = 1 << 20
_ENTRIES = 1 << 23
"""Of the table: the significands of 2**(i / 2**23)."""


def arguments() -> Iterator[tuple[str, Tensor]]:
    """What is tried, with names, in parts."""
    for first in range(0, _ENTRIES, _PART):
        i = torch.arange(first, first + _PART, dtype=torch.float64)
        yield "table, x in [-1, 0)", (i / _ENTRIES - 1).float()
        yield "table, x in [0, 1)", (i / _ENTRIES).float()
    g = torch.Generator().manual_seed(0)
    fractions = torch.rand((278, 1 << 12), generator=g, dtype=torch.float64)
    yield "n in [-150, 128)", (torch.arange(-150, 128)[:, None] + fractions).float().flatten()
    patterns = torch.randint(-(1 << 31), 1 << 31, (_PART,), generator=g)
    yield "any bits", patterns.to(torch.int32).view(torch.float32)
    edges = [0.0, math.inf, math.nan, 127.5, 128.0, 126.0, 127.0, 149.0, 150.0, 2.0**-30, 1e-45, 1e30]
    # Beside where results become 1, subnormal, or infinite.
    for x in (2.0**-30, 126.0, 127.0, 127.5, 128.0):
        edges += [float(np.nextafter(np.float32(x), np.float32(to))) for to in (0, 1000)]
    some = torch.tensor([*edges, 2.0**-126, 2.0**-127], dtype=torch.float32)
    yield "edges", torch.cat([some, -some, torch.arange(-160, 130).float()])


def verify_exp2(
    report: Report, contract: Contract, device: torch.device, exp2: Callable[[Tensor, Exp2Model], Tensor]
) -> None:
    """Compare `exp2` on the GPU with the CPU reference: the model of `contract`, and the polynomial.

    The GPU's instruction has one table of significands for all exponents. So all of its entries are compared
    for one exponent with x < 0 and one with x > 0, and some of each other exponent. A first difference is
    named by x.
    """
    for model in exp2_models(contract):
        kernel = "ex2.approx.ftz.f32" if model == INTERPOLATION else "exp2 by polynomial"
        for what, x in arguments():
            found = exp2(x.to(device), model)
            finish(f"{kernel}, {what}")
            # The contract does not specify the NaN.
            got, want = (torch.where(y.isnan(), torch.nan, y) for y in (found.cpu(), on_cpu(x, model)))
            wrong = (bits(got) != bits(want)).nonzero()[:1, 0]
            case = f"x {x[wrong].item()!r} ({pattern(x[wrong])})" if len(wrong) else ""
            report.compare(kernel, what, REFERENCE, got, want, case)


def exp2_models(contract: Contract) -> list[Exp2Model]:
    """The models that attention takes on a GPU: that of its tensor cores, and that of FMA."""
    return list(dict.fromkeys((contract.exp2 or POLYNOMIAL, POLYNOMIAL)))


def on_cpu(x: Tensor, model: Exp2Model) -> Tensor:
    """``2**x`` of a vector by the CPU reference."""
    from samebits.backends.reference.attention_kernels import exp2
    from samebits.backends.reference.logp import over_rows

    out = torch.empty_like(x)
    arrays = x.numpy(), out.numpy(), model == INTERPOLATION
    over_rows(x[:, None], lambda *span: exp2(*arrays, *span))
    return out
