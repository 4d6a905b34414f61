"""What a run tries, and what it has compiled before."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from samebits.contract import TENSOR_CORE
from samebits.verify.case import TINY_BATCHES, Case, cases
from samebits.verify.kernel import Kernel, kernels
from samebits.verify.operands import make_operands, make_room, unfilled
from samebits.verify.reductions import calls, on_cuda, on_triton, reductions

Runs = list[tuple[Kernel, Any]]
"""Kernels, each with a schedule."""


class Plan:
    """The products and reductions that are held to the CPU reference on a GPU.

    Attributes:
        offered: the kernels of products.
        products: cases, with what runs each.
        reduced: other cases.
        reducers: the backends that run these, CUDA's first.
    """

    def __init__(self, index: int, thorough: bool) -> None:
        from samebits.backends.cuda import runtime
        from samebits.backends.cuda.matmul import family
        from samebits.backends.triton import runtime as triton

        self._device = torch.device("cuda", index)
        todo = cases(thorough)
        self.offered = kernels(index)
        self.products = list(zip(todo, runs(todo, self.offered, thorough), strict=True))
        self.reducers = [on_cuda(fused=runtime.device_info(index).capability == (9, 0))]
        if triton.status().available:
            self.reducers.append(on_triton(TENSOR_CORE.on(family(index)), self._device))
        self.reduced = list(
            reductions(thorough, fused=any(on.schedules("statistics") for on in self.reducers))
        )

    def cuda(self) -> Iterator[Callable[[], object]]:
        """What loads every CUDA kernel."""
        for case, pairs in self.products:
            for _, call in self._launches(case, [pair for pair in pairs if pair[0].ahead]):
                yield call
        yield from calls(self.reduced, self.reducers[0], self._device)

    def triton(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """What has Triton compile every kernel, each with a key: calls that need the same mostly share it."""
        for case, pairs in self.products:
            if case.what != "large":  # sizes do not enter what Triton compiles
                launches = self._launches(case, [pair for pair in pairs if not pair[0].ahead])
                for (kernel, schedule), call in launches:
                    yield (kernel.name, schedule, case.variant), call
        for on, case in itertools.product(self.reducers[1:], self.reduced):
            of = case.kernel, case.dtype, case.other
            for schedule, call in zip(on.tried(case), calls([case], on, self._device), strict=True):
                yield (*of, schedule), call

    def _launches(self, case: Case, pairs: Runs) -> Iterator[tuple[tuple[Kernel, Any], Callable[[], object]]]:
        if not pairs:
            return
        operands = make_operands(case, self._device, unfilled)
        out = make_room(case, operands).out
        for kernel, schedule in pairs:
            if kernel.takes(operands, out, schedule):
                yield (kernel, schedule), partial(kernel.run, operands, out, schedule)


@contextmanager
def compiling_by_triton(index: int, thorough: bool, seconds: float = 300) -> Iterator[None]:
    """Meanwhile, have Triton compile what it will launch, into its on-disk cache.

    By processes, since most of its compiler runs one thread at a time.
    """
    from samebits.backends.cuda import ahead
    from samebits.backends.triton import runtime as triton

    parts = min(8, os.cpu_count() or 1) if triton.status().available else 0
    helpers = [
        ahead.processes().Process(target=_launch_part, args=(index, thorough, part, parts), daemon=True)
        for part in range(parts)
    ]
    for helper in helpers:
        helper.start()
    try:
        yield
        deadline = time.monotonic() + seconds
        for helper in helpers:
            helper.join(max(0, deadline - time.monotonic()))
    finally:
        for helper in helpers:
            helper.kill()


def _launch_part(index: int, thorough: bool, part: int, parts: int) -> None:
    # What goes wrong here shows when it is verified; or else only this process was not allowed on the GPU.
    with suppress(Exception), torch.cuda.device(index), torch.no_grad():
        of: dict[object, int] = {}
        for key, call in Plan(index, thorough).triton():
            if of.setdefault(key, len(of)) % parts == part:
                call()


def runs(todo: Sequence[Case], offered: Sequence[Kernel], thorough: bool) -> list[list[tuple[Kernel, Any]]]:
    """For each case, the schedules to try: the first, and of many, others for each variant, in turn.

    Those of a CUDA kernel, many of which are made for one layout, run in a third of the variants of each, or,
    unless `thorough`, in some two of them; those of Triton in a third of the variants of each kind of case.
    Tiny batches are mostly left to the kernel that is made for them, unless `thorough`.
    """
    turns: dict[object, dict[object, int]] = {}

    def alike(case: Case, ahead: bool) -> dict[object, int]:
        of = (case.what == TINY_BATCHES, case.layout) if ahead else case.what
        return turns.setdefault((ahead, case.step, of), {})

    for case, ahead in itertools.product(todo, (True, False)):
        alike(case, ahead).setdefault(case.variant, len(alike(case, ahead)))

    def tried(kernel: Kernel, case: Case, j: int) -> bool:
        variants = alike(case, kernel.ahead)
        if case.what == TINY_BATCHES and kernel.name != "bmm_tiny" and not thorough:
            return j == variants[case.variant] % 4 == 0
        if kernel.ahead and (j == 0 or len(kernel.schedules) < (20 if thorough else 8)):
            return True
        every = 3 if thorough or not kernel.ahead else max(1, len(variants) // 2)
        return (j + variants[case.variant]) % every == 0

    return [
        [
            (kernel, schedule)
            for kernel in offered
            for j, schedule in enumerate(kernel.schedules)
            if kernel.step == case.step and tried(kernel, case, j)
        ]
        for case in todo
    ]
