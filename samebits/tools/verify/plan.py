"""The plan of a run of ``samebits verify``: cases, schedules, and kernels to compile first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from samebits.backends.kernel import Kernel
from samebits.backends.product import Product
from samebits.contract import TENSOR_CORE, Contract
from samebits.tools.verify import fused, scaled, scaled_grouped, segments
from samebits.tools.verify.attention import AttentionCase, attentions, build
from samebits.tools.verify.case import SIZES, TINY_BATCHES, ProductCase, cases
from samebits.tools.verify.exp2 import exp2_models
from samebits.tools.verify.grouped import grouped_cases, loads
from samebits.tools.verify.kernel import kernels, takes
from samebits.tools.verify.operands import make_inputs, make_room, unfilled
from samebits.tools.verify.reductions import calls, on_cuda, on_triton, reductions
from samebits.tools.verify.segments import segmented_cases

Pair = tuple[Kernel[Product, Any], Any]
Runs = list[Pair]
"""Pairs of a kernel and a schedule."""


PARTS = {
    "products": ("products",),
    "rows": ("reduced",),
    "attention": ("attended",),
    "groups": ("grouped", "segmented"),
    "layers": ("fused",),
    "fp8": ("scaled", "scaled_grouped"),
    "functions": (),
}
"""What can be verified alone, and the cases of each."""


class VerifyPlan:
    """What is compared with the CPU reference on a GPU.

    Attributes:
        device: the GPU.
        contract: that of its tensor cores.
        offered: the product kernels.
        products: cases of products, each with its kernels and schedules.
        reduced: cases of reductions.
        reducers: the backends that run `reduced`.
        attended: cases of attention, which only the CUDA backend computes.
        grouped: cases of grouped products, likewise.
        segmented: cases of sums in segments, likewise.
        fused: cases of fused layers, which only the CUDA backend computes.
        scaled, scaled_grouped: cases of products in FP8, which only Hopper computes.
        functions: whether the public functions are verified, too.
    """

    def __init__(self, index: int, thorough: bool, backends: Sequence[str], only: Sequence[str] = ()) -> None:
        from samebits.backends.cuda import devices
        from samebits.backends.cuda.matmul import family

        self.device, self.contract = torch.device("cuda", index), TENSOR_CORE.on(family(index))
        todo = cases(thorough)
        self.offered = kernels(index, backends)
        self.products = list(zip(todo, runs(todo, self.offered, thorough), strict=True))
        self._on_cuda, self._on_triton = [], []
        info = devices.device_info(index)
        arch = info.arch
        fp8 = "cuda" in backends and arch.fp8 is not None
        if "cuda" in backends:
            self._on_cuda = [on_cuda(fused=arch.runs("statistics_sm90"))]
        if "triton" in backends:
            self._on_triton = [on_triton(self.contract, index)]
        self.reducers = [*self._on_cuda, *self._on_triton]
        self.attended = attentions(thorough, info.max_smem) if "cuda" in backends else []
        self.thorough, self.grouped = thorough, grouped_cases(thorough) if "cuda" in backends else []
        self.segmented = segmented_cases(thorough) if "cuda" in backends else []
        self.fused = fused.fused_cases(thorough) if "cuda" in backends else []
        self.scaled = scaled.scaled_cases(thorough) if fp8 else []
        self.scaled_grouped = scaled_grouped.scaled_grouped_cases(thorough) if fp8 else []
        self.reduced = list(
            reductions(thorough, fused=any(on.schedules("statistics") for on in self.reducers))
        )
        for part in (name for name in PARTS if only and name not in only):
            for of in PARTS[part]:
                setattr(self, of, [])
        self.functions = not only or "functions" in only

    def cuda(self) -> Iterator[Callable[[], object]]:
        """Calls that load every CUDA kernel."""
        for case, pairs in self.products:
            for _, call in self._launches(case, [pair for pair in pairs if pair[0].can_precompile]):
                yield call
        for on in self._on_cuda:
            yield from calls(self.reduced, on, self.device)
        yield from attention_kernels(self.attended, self.contract, self.device)
        yield from loads(self.grouped, self.device, self.thorough)
        yield from segments.loads(self.segmented, self.device, self.thorough)
        yield from fused.loads(self.fused, self.device)
        yield from scaled.loads(self.scaled, self.device)
        yield from scaled_grouped.loads(self.scaled_grouped, self.device)

    def triton(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """Calls that make Triton compile every kernel, with keys. Calls of one kernel mostly share a key."""
        for case, pairs in self.products:
            if case.what != "large":  # Triton's kernels do not depend on sizes
                launches = self._launches(case, [pair for pair in pairs if not pair[0].can_precompile])
                for (kernel, schedule), call in launches:
                    yield (kernel.name, schedule, case.variant), call
        for on, case in itertools.product(self._on_triton, self.reduced):
            of = case.kernel, case.dtype, case.other
            for schedule, call in zip(on.tried(case), calls([case], on, self.device), strict=True):
                yield (*of, schedule), call

    def _launches(self, case: ProductCase, pairs: Runs) -> Iterator[tuple[Pair, Callable[[], object]]]:
        if not pairs:
            return
        inputs = make_inputs(case, self.device, unfilled)
        operands = inputs.into(make_room(case, inputs).out)
        p = Product.of(operands, case.step)
        for kernel, schedule in pairs:
            if takes(kernel, p, schedule):
                yield (kernel, schedule), partial(kernel.run, operands, schedule)


def attention_kernels(
    cases: Sequence[AttentionCase], contract: Contract, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Calls that load the kernels of `cases`."""
    from samebits.backends.cuda import exp2, runtime
    from samebits.backends.cuda.attention import catalogue

    specs: set[object] = set()
    for case in cases:
        x, _ = build(case, contract, device)
        for spec in catalogue.specs(x, grad_mask=case.grad_mask):
            if spec not in specs:
                specs.add(spec)
                yield partial(runtime.load, spec, device.index)
    for model in exp2_models(contract) if cases else ():
        yield partial(runtime.load, exp2.spec(model), device.index)


def launch_part(index: int, thorough: bool, part: int, parts: int) -> None:
    """Launch one of `parts` parts of the Triton kernels, to fill Triton's on-disk cache."""
    of: dict[object, int] = {}
    for key, call in VerifyPlan(index, thorough, ("triton",)).triton():
        if of.setdefault(key, len(of)) % parts == part:
            with suppress(Exception):  # verification will report the failure
                call()


def runs(todo: Sequence[ProductCase], offered: Sequence[Kernel[Product, Any]], thorough: bool) -> list[Runs]:
    """The kernels and schedules to try for each case.

    * Every case runs under each kernel's own choice. Kernels with few schedules run under all of them.
    * Every schedule of a CUDA kernel runs on contiguous operands of each layout, for which many schedules are
      made. It also runs in a third of its variants, or without `thorough` in about three of them.
    * Every schedule of a Triton kernel runs in a third of the variants of each kind of case.
    * Without `thorough`, tiny batches mostly run under the kernel that is made for them.
    """
    turns: dict[object, dict[object, int]] = {}

    def alike(case: ProductCase, precompiled: bool) -> dict[object, int]:
        of = (case.what == TINY_BATCHES, case.layout) if precompiled else case.what
        return turns.setdefault((precompiled, case.step, of), {})

    for case, precompiled in itertools.product(todo, (True, False)):
        alike(case, precompiled).setdefault(case.variant, len(alike(case, precompiled)))

    def tried(kernel: Kernel[Product, Any], case: ProductCase, j: int) -> bool:
        variants = alike(case, kernel.can_precompile)
        if case.what == TINY_BATCHES and kernel.name != "tiny" and not thorough:
            return j == variants[case.variant] % 4 == 0
        few = len(kernel.catalogue) < 20 and (thorough or kernel.name != "tiny")
        contiguous = case.what == "layouts" and (case.m, case.n, case.k) == SIZES[0]
        if kernel.can_precompile and (j == 0 or few or contiguous):
            return True
        every = 3 if thorough or not kernel.can_precompile else max(1, len(variants) // 3)
        return (j + variants[case.variant]) % every == 0

    return [
        [
            (kernel, schedule)
            for kernel in offered
            for j, schedule in enumerate((None, *kernel.catalogue))
            if kernel.step == case.step and tried(kernel, case, j)
        ]
        for case in todo
    ]
