"""Verification of grouped products: every kernel and schedule, and the public function beside ``linear``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.kernel import Kernel
from samebits.contract import FMA, Contract
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.linear import linear
from samebits.testing import KINDS, values
from samebits.tools.verify.case import BF16, F16, F32, LAYOUTS
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import laid, unfilled
from samebits.tools.verify.reference import REFERENCE
from samebits.tools.verify.report import Report
from samebits.tools.verify.turns import shared_out

AROUND = "memory around grouped products"


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """One grouped product.

    Attributes:
        ends: ends of the groups.
        rows: rows of all groups, and of none.
        m: rows of every group's result. 0 for groups of rows.
        n, k: other sizes; k counts for groups of rows.
        runs: lengths of the sequences of groups of terms, over all rows.
        layout, dtype, out, kind, place, bias, accumulate, pitch, step: as of a ``ProductCase``.
    """

    ends: tuple[int, ...]
    rows: int
    m: int
    n: int
    k: int
    runs: tuple[int, ...] = ()
    layout: str = "NT"
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    kind: str = "normal"
    place: str = "plain"
    bias: torch.dtype | None = None
    accumulate: bool = False
    pitch: int = 0
    step: Literal["mma", "fma"] = "mma"

    @property
    def what(self) -> str:
        return "groups of terms" if self.m else "groups of rows"

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        changed |= {
            name: f"({len(changed[name])})" for name in ("ends", "runs") if len(changed.get(name, ())) > 9
        }
        return ", ".join(f"{name} {value}" for name, value in changed.items()).replace("torch.", "")


ENDS = (
    ((0, 3, 3, 40, 41, 100), 103),
    ((64,), 64),
    ((128, 128, 384), 384),
    ((0, 0), 9),
    (tuple(range(1, 71)), 75),
    ((1, 17, 300, 300, 317, 700), 700),
)
"""Ends of groups, and rows."""
RUNS = ((1, 1, 30, 16, 200, 900), (16,) * 60, (5, 3) * 120, (1,) * 900)
SIZES = ((72, 136), (264, 200), (17, 33), (1, 64), (130, 8))
"""n and k of groups of rows; n and m of groups of terms."""
STEPPED = ((64, 192), (320, 128))
"""n and m of groups of terms in whole columns of 64, which have a kernel of their own on Hopper."""


def grouped_cases(thorough: bool) -> list[GroupedCase]:
    """All cases. Kernels are compared with the CPU reference."""
    kinds, layouts = itertools.cycle(KINDS), itertools.cycle(LAYOUTS)
    places, runs = itertools.cycle(("plain", "pitched", "odd", "plain", "spread")), itertools.cycle(RUNS)
    types: list[tuple[Any, ...]] = [("mma", BF16), ("mma", F16), ("fma", F32)]
    found = []
    for (ends, rows), (n, k) in itertools.product(ENDS, SIZES):
        for step, dtype in (*types, ("fma", BF16)) if thorough else types:
            of = partial(GroupedCase, ends, rows, dtype=dtype, step=step)
            of_rows, of_terms = partial(of, 0, n, k), partial(of, k, n, 0)
            found += [
                of_rows(kind=next(kinds)),
                of_rows(layout=next(layouts), place=next(places), bias=dtype),
                of_rows(layout="NN", out=F32, bias=dtype, pitch=n + 5),
                of_terms(layout="TN", kind=next(kinds)),
                of_terms(layout="TN", runs=next(runs), out=F32, accumulate=True, pitch=n + 3),
                of_terms(layout=next(layouts), runs=next(runs), place=next(places), kind=next(kinds)),
            ]
            if thorough:
                for kind, layout in itertools.product(KINDS, LAYOUTS):
                    found.append(of_rows(layout=layout, kind=kind))
                    found.append(of_terms(layout=layout, kind=kind, runs=RUNS[2]))
    return [*(found if thorough else found[::5]), *stepped_cases(thorough)]


def stepped_cases(thorough: bool) -> list[GroupedCase]:
    """Sequences whose matrices TMA reads in columns of 64, so that steps of several share a stage."""
    kinds, runs = itertools.cycle(KINDS), itertools.cycle(RUNS)
    found = []
    for (ends, rows), (n, m), dtype in itertools.product(ENDS, STEPPED, (BF16, F16)):
        of = partial(GroupedCase, ends, rows, m, n, 0, layout="TN", dtype=dtype)
        for lengths in RUNS if thorough else (next(runs),):
            found.append(of(runs=lengths, kind=next(kinds)))
            found.append(of(runs=lengths, out=F32, accumulate=True, pitch=n + 4))
    return found


@dataclass(frozen=True, slots=True)
class GroupedInputs:
    """The input tensors of a case."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    acc: Tensor | None
    sequences: Tensor | None


def make(case: GroupedCase, device: torch.device, fill: Callable[..., Tensor] = values) -> GroupedInputs:
    """The inputs of `case`, filled by `fill`. Rows of no group are NaN."""
    groups = len(case.ends)
    a_shape = (case.m, case.rows) if case.m else (case.rows, case.k)
    b_shape = (case.rows, case.n) if case.m else (groups, case.k, case.n)
    a, b = fill(case.kind, a_shape, case.dtype, 1, device), fill(case.kind, b_shape, case.dtype, 2, device)
    last = case.ends[-1]
    if case.m:
        a[:, last:], b[last:] = math.nan, math.nan
    else:
        a[last:] = math.nan
    bias = None if case.bias is None else fill(case.kind, (groups, case.n), case.bias, 3, device)
    acc = fill("normal", (groups, case.m, case.n), F32, 4, device) if case.accumulate else None
    sequences = None
    if case.runs:
        numbers = torch.arange(len(case.runs)) % 7
        sequences = numbers.repeat_interleave(torch.tensor(case.runs))[: case.rows]
        sequences = torch.nn.functional.pad(sequences, (0, case.rows - len(sequences))).int().to(device)
    offs = torch.tensor(case.ends, dtype=torch.int32, device=device)
    place = laid(a, case.layout[0], case.place), laid(b, case.layout[1], case.place)
    return GroupedInputs(*place, offs, bias, acc, sequences)


def into(x: GroupedInputs, out: Tensor) -> GroupedOperands:
    """The operands that write `out`. It already holds what the chains start from."""
    from samebits.backends.cuda.grouped import runs

    of_rows = runs(x.sequences, x.offs)
    return GroupedOperands(x.a, x.b, out, x.offs, x.bias, of_rows, x.acc is not None)


def room(case: GroupedCase, x: GroupedInputs) -> tuple[Tensor, Tensor]:
    """An output within memory full of NaN, and that memory."""
    shape = (len(case.ends), case.m, case.n) if case.m else (case.rows, case.n)
    height, width, margin = math.prod(shape[:-1]), max(case.n, case.pitch), 8
    memory = x.a.new_full((height + 2 * margin, width), math.nan, dtype=case.out or case.dtype)
    out = memory[margin : margin + height].view(*shape[:-1], width)[..., : case.n]
    if x.acc is not None:
        out.copy_(x.acc)
    return out, memory


def on_cpu(case: GroupedCase, x: GroupedInputs, contract: Contract) -> Tensor:
    """The result that the contract specifies."""
    from samebits.backends.reference import grouped as backend

    a, b, offs, bias, acc, sequences = (
        None if t is None else t.cpu() for t in (x.a, x.b, x.offs, x.bias, x.acc, x.sequences)
    )
    options: dict[str, Any] = {"out_dtype": case.out or case.dtype, "contract": contract.key}
    if not case.m:
        return backend.grouped_rows(a, b, offs, bias=bias, **options)  # type: ignore[arg-type]
    if acc is None:
        return backend.grouped_terms(a, b, offs, sequences, **options)  # type: ignore[arg-type]
    acc = acc.clone()
    backend.grouped_terms_later(acc, a, b, offs, sequences, contract=contract.key)()  # type: ignore[arg-type]
    return acc


def grouped_kernels(device: int) -> list[Kernel[GroupedProduct, Any]]:
    """The kernels that run on CUDA device `device`."""
    from samebits.backends.cuda import devices
    from samebits.backends.cuda.grouped import GROUPED

    arch = devices.device_info(device).arch
    return [kernel for kernel in GROUPED if arch.runs(kernel.name)]


def unfilled_product(case: GroupedCase, device: torch.device) -> GroupedProduct:
    """The product of a case, whose operands hold no values."""
    x = make(case, device, unfilled)
    of_rows = x.offs.new_empty(case.rows + 2 * len(case.ends)) if case.runs else None
    out, _ = room(case, x)
    operands = GroupedOperands(x.a, x.b, out, x.offs, x.bias, of_rows, x.acc is not None)
    return GroupedProduct.of(operands, case.step)


def tried(
    kernel: Kernel[GroupedProduct, Any], products: Iterable[GroupedProduct], thorough: bool
) -> list[Sequence[Any]]:
    """For each product that the kernel takes, its own choice and its schedules: all, or some of many.

    Those of many are shared out to cases of a layout, each to six of them.
    """
    found: list[tuple[tuple[bool, ...], Sequence[Any]]] = []
    for p in products:
        layout = p.a.strides[-1] == 1, p.b.strides[-1] == 1, p.of_terms
        found.append((layout, (None, *kernel.all(p)) if kernel.supports(p) else ()))
    every = [schedules for _, schedules in found]
    if thorough or max(map(len, every), default=0) <= 13:
        return every
    shared = shared_out(found, 6)
    return [[*dict.fromkeys((*own[:1], *some))] for own, some in zip(every, shared, strict=True)]


def loads(
    cases: Sequence[GroupedCase], device: torch.device, thorough: bool
) -> Iterator[Callable[[], object]]:
    """Calls that load the kernels of `cases`."""
    from samebits.backends.cuda import runtime
    from samebits.backends.cuda.grouped import RUNS

    kernels = grouped_kernels(device.index)
    products = [unfilled_product(case, device) for case in cases]
    if any(case.runs for case in cases):
        yield partial(runtime.load, RUNS, device.index)
    for kernel in kernels:
        for p, schedules in zip(products, tried(kernel, products, thorough), strict=True):
            for schedule in schedules:
                yield partial(kernel.plan, p, schedule)


def verify_grouped(
    report: Report, cases: Sequence[GroupedCase], contract: Contract, device: torch.device, thorough: bool
) -> None:
    """Compare every kernel under its schedules with the CPU reference."""
    kernels = grouped_kernels(device.index)
    products = [unfilled_product(case, device) for case in cases]
    schedules = [tried(kernel, products, thorough) for kernel in kernels]
    for case, *some in zip(cases, *schedules, strict=True):
        x = make(case, device)
        want = on_cpu(case, x, FMA if case.step == "fma" else contract).to(device)
        expected, memory_expected = room(case, x)
        expected.copy_(want)
        for kernel, every in zip(kernels, some, strict=True):
            for schedule in every:
                out, memory = room(case, x)
                doing = f"{kernel.name}, {case.what}, {case}, {schedule}"
                with running(doing):
                    kernel.run(into(x, out), schedule)
                    finish(doing)
                report.compare(kernel.name, case.what, REFERENCE, out, expected, case, schedule)
                report.compare(kernel.name, AROUND, "NaN", memory, memory_expected, case, schedule)


EXPERTS = (
    (128, 2048, 768, 4096, 1.0),
    (8, 512, 1024, 300, 3.0),
    (32, 256, 520, 5000, 6.0),
    (160, 128, 64, 9, 1.0),
    (8, 256, 192, 1500, 1.0),
    (4, 192, 320, 3000, 2.0),
)
"""Experts, sizes, tokens, and how uneven the experts' shares are."""


def verify_experts(report: Report, device: torch.device) -> None:
    """Compare the public function and its gradients with ``linear`` of some experts by themselves.

    Both are this GPU's. Verification of ``linear`` is elsewhere.
    """
    name = "samebits.grouped_mm"
    for (experts, k, n, tokens, skew), dtype in itertools.product(EXPERTS, (BF16, F32)):
        where = f"{experts} experts, {k} to {n}, {tokens} tokens, {dtype}"
        generator = torch.Generator().manual_seed(experts)
        weights = torch.rand(experts, generator=generator).pow(skew)
        chosen = torch.multinomial(weights, tokens, True, generator=generator)
        ends = torch.bincount(chosen, minlength=experts).cumsum(0)
        lengths = torch.randint(1, 700, (tokens,), generator=generator)
        of_token = torch.arange(tokens).repeat_interleave(lengths)[:tokens].int()
        numbers = of_token[torch.sort(chosen, stable=True).indices].to(device)
        x, dy = values("normal", (tokens, k), dtype, 1, device), values("wide", (tokens, n), dtype, 2, device)
        weight = values("normal", (experts, n, k), dtype, 3, device)
        bias = values("normal", (experts, n), dtype, 4, device)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            offs = ends.int().to(device)
            y = grouped_mm(x, weight.mT, offs, bias=bias, sequences=numbers)
            grads = torch.autograd.grad(y, leaves, dy)
            finish(f"{name}, {where}")
            counts = ends.diff(prepend=ends.new_zeros(1))
            some = {int(counts.argmax()), int(counts.argmin()), *range(0, experts, experts // 4)}
            for g in sorted(some):
                stop = int(ends[g])
                start = stop - int(counts[g])
                here = slice(start, stop)
                breaks = (numbers[here].diff() != 0).nonzero().flatten() + 1
                bounds = torch.nn.functional.pad(breaks, (1, 1))
                bounds[-1] = stop - start
                own = [t.detach().requires_grad_() for t in (x[here], weight[g], bias[g])]
                one = linear(*own, cu_seqlens=bounds)
                wanted = torch.autograd.grad(one, own, dy[here])
                for what, got, want in (
                    ("rows", y[here], one),
                    ("dX", grads[0][here], wanted[0]),
                    ("dW", grads[1][g], wanted[1]),
                    ("db", grads[2][g], wanted[2]),
                ):
                    report.compare(name, what, "samebits.linear", got.detach(), want.detach(), where)
