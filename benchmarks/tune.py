"""Times of a product kernel's schedules and of torch. The kernel's choices are based on these times.

``samebits tune`` finds the fastest schedule of a shape. This shows all of them, beside their estimated costs.

python -m benchmarks tune tensor_core_sm90 --rows 512,2048 --shapes 4096x4096 --work forward,dW

It times the schedules that the kernel might choose, and whose estimated cost is plausible, in the same way as
``samebits bench``. Before that, it compares each with the universal kernel, bit for bit, in memory full of
NaN. The order of products is random, and the same in every run.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.record import environment, save, slug
from samebits.backends.cuda import devices, precompile
from samebits.backends.kernel import Kernel as KernelOf
from samebits.backends.product import Operands, Product
from samebits.testing import assert_same_bits, bits
from samebits.tools.bench.cases import CASES, F32, BenchCase, make_operands
from samebits.tools.bench.clock import medians
from samebits.tools.tune.contest import few
from samebits.tools.tune.measure import label
from samebits.tools.verify import Inputs, ProductCase, kernels
from samebits.tools.verify.failures import finish, running
from samebits.tools.verify.operands import Room, make_room

Kernel = KernelOf[Product, Any]


def cases(kernel: Kernel) -> list[BenchCase]:
    """The products of ``samebits bench`` under the kernel's contract, in a random order."""
    work = ("forward", "dX", "dW", "bmm")
    found = [c for c in CASES if c.work in work and (c.dtype == F32) == (kernel.step == "fma")]
    random.Random(1).shuffle(found)
    return found


def operands(case: BenchCase, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of the product, from the operands of the case's work."""
    return first.mT if case.work == "dW" else first, second.mT if case.work == "forward" else second


def product(case: BenchCase, kernel: Kernel, device: int) -> Product:
    """The Product of the case. Its tensors need not exist."""
    first, second, *_ = make_operands(case, torch.device("meta"), torch.empty)
    a, b = operands(case, first, second)
    return replace(Product.of(Operands(a, b, _out(a, b)), kernel.step), device=device)


def _out(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def plausible(kernel: Kernel, p: Product) -> dict[Any, float]:
    """The schedules to time, each with its cost: the choice, then others that should not be much slower."""
    chosen = kernel.choose(p)
    costs = {s: kernel.cost(p, s) for s in (chosen, *kernel.candidates(p))}
    return {s: costs[s] for s in few(chosen, costs, most=len(costs))}


def prove(
    kernel: Kernel, universal: Kernel, p: Product, schedules: Iterable[Any], a: Tensor, b: Tensor
) -> None:
    """Compare each schedule with the universal kernel: the output, and the memory beside it.

    Raises:
        AssertionError: bits differ.
        KernelError: the kernel did not run, or did not end.
    """
    proof = ProductCase(
        "tuned", p.m, p.n, p.k, dtype=a.dtype, batch=p.batch if a.ndim == 3 else 0, step=p.step
    )
    inputs = Inputs(a, b)

    def written(by: Kernel, schedule: Any) -> Room:
        room, doing = make_room(proof, inputs), f"{by.name}, {proof}, {schedule}"
        with running(doing):
            by.run(inputs.into(room.out), schedule)
            finish(doing)
        return room

    want = written(universal, None)
    for schedule in schedules:
        got = written(kernel, schedule)
        for what, x, y in (("out", got.rows, want.rows), ("around out", got.margins, want.margins)):
            if not torch.equal(bits(x), bits(y)):  # on the GPU; the comparison below finds the place
                assert_same_bits(x, y, f"{kernel.name}, {proof}, {schedule}, {what}")


def measure(kernel: Kernel, universal: Kernel, case: BenchCase, p: Product) -> dict[str, Any]:
    """Microseconds of torch and of each plausible schedule, the estimated costs, and the chosen schedule."""
    costs = plausible(kernel, p)
    precompile.compile_for(partial(kernel.plan, p, s) for s in costs)
    device = torch.device("cuda", p.device)
    count = max(1, min(64, math.ceil(4.5 * devices.device_info(p.device).l2_bytes / case.bytes)))
    sets = [operands(case, *make_operands(case, device, torch.randn)[:2]) for _ in range(count)]
    prove(kernel, universal, p, costs, *sets[0])

    def run(schedule: Any, a: Tensor, b: Tensor) -> Tensor:
        out = _out(a, b)
        kernel.run(Operands(a, b, out), schedule)
        return out

    runs: dict[str, Callable[..., Tensor]] = {label(s): partial(run, s) for s in costs}
    return case.record() | {
        "us": medians(case, {"torch": torch.matmul} | runs, sets),
        "cost": {label(s): float(f"{cost:.5g}") for s, cost in costs.items()},
        "chosen": label(kernel.choose(p)),
    }


def speeds(case: dict[str, Any]) -> tuple[float, float]:
    """Speed relative to torch of the chosen schedule, and of the fastest."""
    ours = {by: t for by, t in case["us"].items() if by != "torch"}
    return case["us"]["torch"] / ours[case["chosen"]], case["us"]["torch"] / min(ours.values())


def report(measured: Iterable[dict[str, Any]]) -> Iterator[Table]:
    """A line for each product, then one for each kind of work.

    A line has microseconds, the kernel's estimate and the speed relative to torch, for the chosen schedule
    and for the fastest. Then it has the difference of the fastest from the chosen one.
    """
    names = ("work", "dtype", "batch", "k", "n", "m")
    each = ("us", "estimate", "speed")
    lines = Table(*names, "torch us", "chosen us", *each[1:], "fastest us", *each[1:], "which", box=None)
    by_work: dict[str, list[tuple[float, float]]] = {}

    def product_of(case: dict[str, Any]) -> list[Any]:
        return [case[name] for name in names]

    for case in sorted(measured, key=product_of):
        us, chosen = case["us"], case["chosen"]
        fastest = min((t, by) for by, t in us.items() if by != "torch")[1]
        by_work.setdefault(case["work"], []).append(speeds(case))
        cells = [str(value) for value in product_of(case)]
        cells.append(f"{us['torch']:.1f}")
        for by, speed in zip((chosen, fastest), speeds(case), strict=True):
            cells += [f"{us[by]:.1f}", f"{case['cost'][by]:.1f}", f"{speed:.3f}"]
        lines.add_row(*cells, " ".join(word for word in fastest.split() if word not in chosen.split()))
    yield lines
    means = Table("work", "products", "chosen", "worst", "fastest", "worst", box=None)
    for work, found in by_work.items():
        chosen_speeds, fastest_speeds = zip(*found, strict=True)
        parts = [
            f"{f(s):.3f}" for s in (chosen_speeds, fastest_speeds) for f in (statistics.geometric_mean, min)
        ]
        means.add_row(work, str(len(found)), *parts)
    yield means


def wanted(found: list[BenchCase], rows: str, shapes: str, work: str) -> list[BenchCase]:
    """The cases with the given rows, shapes and work.

    Raises:
        typer.BadParameter: there is no such case.
    """
    filters: tuple[tuple[str, str, Callable[[BenchCase], str]], ...] = (
        ("rows", rows, lambda c: str(c.m)),
        ("shapes", shapes, lambda c: f"{c.k}x{c.n}"),
        ("work", work, lambda c: c.work),
    )
    for name, asked, of in filters:
        if asked:
            some = asked.split(",")
            if unknown := {*some} - {of(case) for case in found}:
                raise typer.BadParameter(
                    f"--{name}: no product that it supports has {', '.join(sorted(unknown))}"
                )
            found = [case for case in found if of(case) in some]
    return found


def times(
    kernel: Annotated[str, typer.Argument(help="its name, such as tensor_core_sm90 or fma")],
    rows: Annotated[str, typer.Option(help="only products of so many rows, as in 512,2048")] = "",
    shapes: Annotated[str, typer.Option(help="only of such k x n, as in 4096x4096,7168x256")] = "",
    work: Annotated[str, typer.Option(help="only of such work, as in forward,dX")] = "",
    seconds: Annotated[float, typer.Option(help="begin no product after so many")] = 120,
    commit: Annotated[str | None, typer.Option(help="what is measured, where there is no git to ask")] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="instead of benchmarks/results/<gpu>/tune_KERNEL.json")
    ] = None,
) -> None:
    console, start = Console(width=200), time.monotonic()
    record, device = environment(commit), torch.cuda.current_device()
    every = kernels(device)
    todo: list[tuple[Kernel, BenchCase, Product]] = []
    for one in (k for k in every if k.name == kernel):
        some = ((case, product(case, one, device)) for case in cases(one))
        todo += [(one, case, p) for case, p in some if one.supports(p)]
    if not todo:
        names = ", ".join(sorted({k.name for k in every}))
        raise typer.BadParameter(f"expected a kernel with products to time, one of {names}; got {kernel!r}")
    among = wanted([case for _, case, _ in todo], rows, shapes, work)
    todo = [job for job in todo if job[1] in among]
    record["multiprocessors"] = devices.device_info(device).sm_count
    data: dict[str, Any] = {"environment": record, "cases": []}
    universal = {step: next(k for k in every if k.step == step) for step in ("mma", "fma")}
    with torch.no_grad():
        for one, case, p in track(todo, kernel, console=console):
            if time.monotonic() - start < seconds:
                data["cases"].append(measure(one, universal[one.step], case, p))
    save(out, f"tune_{slug(kernel)}.json", data)
    for table in report(data["cases"]):
        console.print(table)
    if left := len(todo) - len(data["cases"]):
        console.print(f"{left} of {len(todo)} products were not begun within {seconds:g} s")


def main() -> None:
    typer.run(times)
