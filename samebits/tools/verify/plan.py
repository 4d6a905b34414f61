"""What a run of ``samebits verify`` tries, and what it has compiled before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from samebits.backends.product import Product, ProductKernel
from samebits.contract import TENSOR_CORE
from samebits.tools.verify.case import SIZES, TINY_BATCHES, ProductCase, cases
from samebits.tools.verify.kernel import kernels, takes
from samebits.tools.verify.operands import make_inputs, make_room, unfilled
from samebits.tools.verify.reductions import calls, on_cuda, on_triton, reductions

Pair = tuple[ProductKernel[Any], Any]
Runs = list[Pair]
"""Kernels, each with a schedule."""


class VerifyPlan:
    """The products and reductions that are held to the CPU reference on a GPU.

    Attributes:
        device: the GPU.
        offered: the kernels of products.
        products: cases, with what runs each.
        reduced: other cases.
        reducers: the backends that run these.
    """

    def __init__(self, index: int, thorough: bool, backends: Sequence[str]) -> None:
        from samebits.backends.cuda import devices
        from samebits.backends.cuda.matmul import family

        self.device = torch.device("cuda", index)
        todo = cases(thorough)
        self.offered = kernels(index, backends)
        self.products = list(zip(todo, runs(todo, self.offered, thorough), strict=True))
        self._on_cuda, self._on_triton = [], []
        if "cuda" in backends:
            self._on_cuda = [on_cuda(fused=devices.device_info(index).capability == (9, 0))]
        if "triton" in backends:
            self._on_triton = [on_triton(TENSOR_CORE.on(family(index)), index)]
        self.reducers = [*self._on_cuda, *self._on_triton]
        self.reduced = list(
            reductions(thorough, fused=any(on.schedules("statistics") for on in self.reducers))
        )

    def cuda(self) -> Iterator[Callable[[], object]]:
        """What loads every CUDA kernel."""
        for case, pairs in self.products:
            for _, call in self._launches(case, [pair for pair in pairs if pair[0].compiled_ahead]):
                yield call
        for on in self._on_cuda:
            yield from calls(self.reduced, on, self.device)

    def triton(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """What has Triton compile every kernel, each with a key: calls that need the same mostly share it."""
        for case, pairs in self.products:
            if case.what != "large":  # sizes do not enter what Triton compiles
                launches = self._launches(case, [pair for pair in pairs if not pair[0].compiled_ahead])
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


def launch_part(index: int, thorough: bool, part: int, parts: int) -> None:
    """Launch one part of what Triton will, so that its on-disk cache has the kernels."""
    of: dict[object, int] = {}
    for key, call in VerifyPlan(index, thorough, ("triton",)).triton():
        if of.setdefault(key, len(of)) % parts == part:
            with suppress(Exception):  # it will fail where it is verified, too
                call()


def runs(todo: Sequence[ProductCase], offered: Sequence[ProductKernel[Any]], thorough: bool) -> list[Runs]:
    """For each case, the schedules to try: the first, and of many, others for each variant, in turn.

    Those of a CUDA kernel all run on plain operands of each layout, which many are made for, besides in a
    third of its variants, or, unless `thorough`, in some three of them. Those of Triton run in a third of the
    variants of each kind of case. Tiny batches are mostly left to the kernel that is made for them, unless
    `thorough`.
    """
    turns: dict[object, dict[object, int]] = {}

    def alike(case: ProductCase, ahead: bool) -> dict[object, int]:
        of = (case.what == TINY_BATCHES, case.layout) if ahead else case.what
        return turns.setdefault((ahead, case.step, of), {})

    for case, ahead in itertools.product(todo, (True, False)):
        alike(case, ahead).setdefault(case.variant, len(alike(case, ahead)))

    def tried(kernel: ProductKernel[Any], case: ProductCase, j: int) -> bool:
        variants = alike(case, kernel.compiled_ahead)
        if case.what == TINY_BATCHES and kernel.name != "tiny" and not thorough:
            return j == variants[case.variant] % 4 == 0
        few = len(kernel.catalogue) < 20 and (thorough or kernel.name != "tiny")
        plain = case.what == "layouts" and (case.m, case.n, case.k) == SIZES[0]
        if kernel.compiled_ahead and (j == 0 or few or plain):
            return True
        every = 3 if thorough or not kernel.compiled_ahead else max(1, len(variants) // 3)
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
