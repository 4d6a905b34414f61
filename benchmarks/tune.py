"""Times of a product kernel's schedules beside torch, which its choices rest on.

python -m benchmarks.tune tensor_core_sm90 --rows 512,2048 --shapes 4096x4096 --work forward,dW

Every schedule that is plausible by the kernel's own cost is held to the universal kernel, bit for bit, into
poisoned outputs, before it is timed. Products are taken in a random order, the same each time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.record import RESULTS, environment, results_file, slug, write
from samebits.backends.product import Operands, Product, ProductKernel
from samebits.bench import CASES, F32, Case, _operands, _Race
from samebits.testing import assert_same_bits
from samebits.verify import kernels, takes

PLAUSIBLE = 1.6
"""Schedules whose estimated cost is up to so many times the least are timed."""

Kernel = ProductKernel[Any]


def cases(kernel: Kernel) -> list[Case]:
    """The products of ``samebits bench`` that a kernel may be asked for, in a random order."""
    work = ("bmm",) if kernel.name == "tiny" else ("forward", "dX", "dW")
    found = [c for c in CASES if c.work in work and (c.dtype == F32) == (kernel.step == "fma")]
    random.Random(1).shuffle(found)
    return found


def operands(case: Case, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of the product, from what the case's work is given."""
    return first.mT if case.work == "dW" else first, second.mT if case.work == "forward" else second


def product(case: Case, kernel: Kernel | None, schedule: Any = None) -> Callable[[Tensor, Tensor], Tensor]:
    """The product by a kernel under a schedule, or by torch."""

    def run(first: Tensor, second: Tensor) -> Tensor:
        a, b = operands(case, first, second)
        if kernel is None:
            return torch.matmul(a, b)
        out = torch.full((*a.shape[:-1], b.shape[-1]), torch.nan, dtype=a.dtype, device=a.device)
        kernel.run(Operands(a, b, out), schedule)
        return out

    return run


def label(s: Any) -> str:
    """A name of its own for every schedule of a kernel: its fields, without what was measured of it."""
    fields = {name: value for name, value in asdict(s).items() if name not in ("alone", "busy", "us")}
    kind = type(s).__name__.removesuffix("Schedule")
    return f"{kind} " + " ".join(f"{name} {value}" for name, value in fields.items())


def plausible(kernel: Kernel, p: Product) -> list[Any]:
    """The schedules worth timing: the choice first, then those that should not be much slower."""
    chosen = kernel.choose(p)
    found = {s: kernel.cost(p, s) for s in (chosen, *kernel.schedules(p)) if takes(kernel, p, None)}
    least = min(found.values(), default=0.0)
    return [s for s, cost in found.items() if s == chosen or cost <= PLAUSIBLE * least]


def measure(kernel: Kernel, universal: Kernel, case: Case, device: torch.device) -> dict[str, Any] | None:
    """Microseconds by torch and by each plausible schedule; None if the kernel does not take the product."""
    count = max(1, min(32, math.ceil(225e6 / case.bytes)))  # more than the L2 cache holds
    sets = [_operands(case, device, torch.randn) for _ in range(count)]
    a, b = operands(case, *sets[0][:2])
    p = Product.of(Operands(a, b, a.new_empty(*a.shape[:-1], b.shape[-1])), kernel.step)
    if not kernel.supports(p):
        return None
    guess = max(case.flop / (50e12 if kernel.step == "fma" else 600e12), case.bytes / 3.5e12, 3e-6)
    race = _Race(max(2, min(100, math.ceil(1e-3 / guess))))
    race.add("torch", product(case, None), sets)
    want = product(case, universal)(*sets[0])
    costs = {}
    for schedule in plausible(kernel, p):
        run = product(case, kernel, schedule)
        assert_same_bits(run(*sets[0]), want, f"{case}, {schedule}")
        race.add(label(schedule), run, sets)
        costs[label(schedule)] = kernel.cost(p, schedule)
    return case.record() | {"us": race.run(4), "cost": costs, "chosen": label(kernel.choose(p))}


def speeds(case: dict[str, Any]) -> tuple[float, float]:
    """Speed beside torch of the chosen schedule, and of the fastest."""
    ours = {by: t for by, t in case["us"].items() if by != "torch"}
    return case["us"]["torch"] / ours[case["chosen"]], case["us"]["torch"] / min(ours.values())


def report(measured: Iterable[dict[str, Any]]) -> Iterator[Table]:
    """A line for each product, then one for each kind of work."""
    lines = Table("work", "M", "K", "N", "torch, us", "chosen", "fastest", "which", box=None)
    by_work: dict[str, list[tuple[float, float]]] = {}
    for case in sorted(measured, key=lambda c: (c["work"], c["k"], c["n"], c["m"])):
        chosen, fastest = speeds(case)
        by_work.setdefault(case["work"], []).append((chosen, fastest))
        best = min((t, by) for by, t in case["us"].items() if by != "torch")[1]
        sizes = (str(case[size]) for size in "mkn")
        times = f"{case['us']['torch']:.1f}", f"{chosen:.3f}", f"{fastest:.3f}"
        lines.add_row(case["work"], *sizes, *times, "" if best == case["chosen"] else best)
    yield lines
    means = Table("work", "products", "chosen", "worst", "fastest", "worst", box=None)
    for work, found in by_work.items():
        chosen_speeds, fastest_speeds = zip(*found, strict=True)
        parts = [
            f"{f(s):.3f}" for s in (chosen_speeds, fastest_speeds) for f in (statistics.geometric_mean, min)
        ]
        means.add_row(work, str(len(found)), *parts)
    yield means


def main(
    kernel: Annotated[str, typer.Argument(help="its name, such as tensor_core_sm90 or fma")],
    rows: Annotated[str, typer.Option(help="only products of so many rows, as in 512,2048")] = "",
    shapes: Annotated[str, typer.Option(help="only of such k x n, as in 4096x4096,7168x256")] = "",
    work: Annotated[str, typer.Option(help="only of such work, as in forward,dX")] = "",
    seconds: Annotated[float, typer.Option(help="stop after so many")] = 120,
    out: Annotated[Path | None, typer.Option(help="not into benchmarks/results")] = None,
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    offered = [k for k in kernels(device.index, ("cuda", "triton")) if k.name == kernel]
    if not offered:
        names = sorted({k.name for k in kernels(device.index)})
        raise typer.BadParameter(f"expected one of {', '.join(names)}, got {kernel}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    data: dict[str, Any] = {"environment": environment() | {"multiprocessors": sms}, "cases": []}
    start = time.monotonic()
    for one in offered:
        universal = next(k for k in kernels(device.index, ()) if k.step == one.step)
        wanted = [
            case
            for case in cases(one)
            if (not rows or str(case.m) in rows.split(","))
            and (not shapes or f"{case.k}x{case.n}" in shapes.split(","))
            and (not work or case.work in work.split(","))
        ]
        for case in track(wanted, f"{one.name}, {one.step}"):
            if time.monotonic() - start < seconds and (found := measure(one, universal, case, device)):
                data["cases"].append(found)
    folder = RESULTS / slug(torch.cuda.get_device_name())
    write(results_file(str(out)) if out else folder / f"tune_{kernel}.json", data)
    console = Console(width=200)
    for table in report(data["cases"]):
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
