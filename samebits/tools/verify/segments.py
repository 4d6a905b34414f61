"""Verification of sums in segments: every kernel and schedule that computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends.kernel import Kernel
from samebits.backends.product import Operands, Product
from samebits.contract import FMA, Contract
from samebits.testing import KINDS, values
from samebits.tools.verify.case import BF16, F16, F32, LAYOUTS
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import laid, unfilled
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report
from samebits.tools.verify.turns import shared_out

WHAT, AROUND = "sums in segments", "memory around sums in segments"


@dataclass(frozen=True, slots=True)
class SegmentedCase:
    """One product in segments: of two matrices, or of `batch` pairs."""

    m: int
    n: int
    k: int
    segments: int
    layout: str = "NT"
    dtype: torch.dtype = BF16
    out: torch.dtype = BF16
    bias: bool = False
    kind: str = "normal"
    place: str = "plain"
    batch: int = 0

    @property
    def step(self) -> Any:
        return "fma" if self.dtype == F32 else "mma"


# Tiles of all sizes, moved back and cut; segments shorter than a step, of whole blocks, and with rests.
SHAPES = ((1, 136, 8), (7, 264, 16), (48, 520, 72), (100, 200, 136), (136, 328, 200), (300, 520, 64),
          (512, 1032, 264), (1000, 776, 128))  # fmt: skip
"""m, n, and terms of a segment."""
TURNS = (SegmentedCase(2184, 2056, 64, 8), SegmentedCase(2056, 2183, 64, 8))
"""Blocks take several tiles: a sum soon waits where the tile before was stored from, by TMA or without."""


def segmented_cases(thorough: bool) -> list[SegmentedCase]:
    """All cases."""
    kinds, places = itertools.cycle(KINDS), itertools.cycle(("plain", "pitched", "plain", "odd", "spread"))
    counts, outs = itertools.cycle((8, 2, 8, 4, 16, 8, 64)), itertools.cycle((BF16, F32))
    found = []
    for (m, n, k), layout in itertools.product(SHAPES, LAYOUTS):
        of = partial(SegmentedCase, m, n)
        segments = next(counts)
        found.append(of(k * segments, segments, layout, BF16, next(outs), kind=next(kinds)))
        found.append(of(k * 8, 8, layout, F16, F16, bias=True, kind=next(kinds), place=next(places)))
        found.append(of(k * 4, 4, layout, F32, F32, bias=True, kind=next(kinds), place=next(places)))
    for segments in (2, 4, 8, 16, 32, 64):
        found.append(SegmentedCase(33, 70, 5 * segments, segments, kind=next(kinds), bias=True))
        found.append(SegmentedCase(9, 21, 3 * segments, segments, "TN", F32, F32, kind="brink"))
        found.append(SegmentedCase(17, 40, 8 * segments, segments, batch=3, bias=True))
    return [*(found if thorough else found[::2]), *TURNS]


def make(
    case: SegmentedCase, device: torch.device, fill: Callable[..., Tensor] = values
) -> tuple[Tensor, Tensor, Tensor | None]:
    """a, b and bias of a case."""
    lead = (case.batch,) if case.batch else ()
    a = fill(case.kind, (*lead, case.m, case.k), case.dtype, 1, device)
    b = fill(case.kind, (*lead, case.k, case.n), case.dtype, 2, device)
    bias = fill(case.kind, (case.n,), case.dtype, 3, device) if case.bias else None
    return laid(a, case.layout[0], case.place), laid(b, case.layout[1], case.place), bias


def room(case: SegmentedCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """An output within memory full of NaN, and that memory."""
    height, margin = case.m * max(1, case.batch), 8
    memory = torch.full((height + 2 * margin, case.n), torch.nan, dtype=case.out, device=device)
    out = memory[margin : margin + height]
    return out.view(case.batch, case.m, case.n) if case.batch else out, memory


class _UnsupportedError(Exception):
    pass


def _by(kernel: Kernel[Product, Any], p: Product) -> Any:
    if not kernel.supports(p):
        raise _UnsupportedError
    return kernel.plan(p)


def unfilled_product(case: SegmentedCase, device: torch.device) -> Product:
    """The product of a case, whose operands hold no values."""
    a, b, bias = make(case, device, unfilled)
    return Product.of(Operands(a, b, room(case, device)[0], bias), case.step)


def tried(cases: Sequence[SegmentedCase], products: Sequence[Product], thorough: bool) -> list[Sequence[Any]]:
    """The schedules of Hopper's kernel for each case: all, or those that cases of a layout share out.

    For TURNS, all whose sums wait in shared memory.
    """
    from samebits.backends.cuda.products import segmented_sm90

    def of(case: SegmentedCase, p: Product) -> Sequence[Any]:
        if not segmented_sm90.supports(p, case.segments):
            return ()
        found = segmented_sm90.schedules(p)
        return [s for s in found if segmented_sm90.in_shared(s, case.segments)] if case in TURNS else found

    every = [of(case, p) for case, p in zip(cases, products, strict=True)]
    if thorough:
        return every
    layouts = (case if case in TURNS else case.layout for case in cases)
    return [*shared_out([*zip(layouts, every, strict=True)], 1)]


def ways(
    case: SegmentedCase, p: Product, schedules: Sequence[Any]
) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Kernels' names, schedules, and functions that make their plans for `p`."""
    from samebits.backends.cuda.matmul import PRODUCTS
    from samebits.backends.cuda.products import segmented_sm90
    from samebits.backends.cuda.products.segmented import segmented_plan

    if segmented_sm90.supports(p, case.segments):
        for s in (None, *schedules):
            yield "tensor_core_sm90, segments", s, partial(segmented_sm90.plan, p, case.segments, s)
    for kernel in PRODUCTS:
        if kernel.step == case.step:
            yield (
                f"{kernel.name}, tree",
                None,
                partial(segmented_plan, p, case.segments, partial(_by, kernel)),
            )


def loads(
    cases: Sequence[SegmentedCase], device: torch.device, thorough: bool
) -> Iterator[Callable[[], object]]:
    """Calls that load the kernels of `cases`."""
    products = [unfilled_product(case, device) for case in cases]
    for case, p, schedules in zip(cases, products, tried(cases, products, thorough), strict=True):
        for _, _, plan in ways(case, p, schedules):
            yield partial(_load, plan)


def _load(plan: Callable[[], Any]) -> None:
    try:
        plan()
    except _UnsupportedError:
        return


def verify_segments(
    report: Report, cases: Sequence[SegmentedCase], contract: Contract, device: torch.device, thorough: bool
) -> None:
    """Compare every kernel under its schedules with the CPU reference."""
    from samebits.backends.reference import matmul as reference

    products = [unfilled_product(case, device) for case in cases]
    for case, p, schedules in zip(cases, products, tried(cases, products, thorough), strict=True):
        a, b, bias = make(case, device)
        key = (FMA if case.step == "fma" else contract).segmented(case.segments).key
        on_cpu = None if bias is None else bias.cpu()
        want = reference.matmul(a.cpu(), b.cpu(), bias=on_cpu, out_dtype=case.out, contract=key)
        expected, memory_expected = room(case, device)
        expected.copy_(want)
        for name, schedule, plan in ways(case, p, schedules):
            out, memory = room(case, device)
            doing = f"{name}, {case}, {schedule}"
            with running(doing):
                try:
                    plan().run(Operands(a, b, out, bias))
                except _UnsupportedError:
                    continue
                finish(doing)
            report.compare(name, WHAT, REFERENCE, out, expected, case, schedule)
            report.compare(name, AROUND, "NaN", memory, memory_expected, case, schedule)
