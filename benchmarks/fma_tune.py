"""Times of every schedule of ``matmul_fma`` and ``matmul_fma_sm90`` beside torch.mm, which choices rest on:

python -m benchmarks.fma_tune [--seconds N] [--rows 512,2048] [--shapes 4096x4096] [--work dX,dW] [--out FILE]
python -m benchmarks.fma_tune --show FILE

Products are taken in a random order, the same each time. What a schedule computes is compared with another's,
bit for bit, before it is timed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.tune import summarise, sweep
from samebits.backends.cuda import ahead, matmul_fma, matmul_fma_sm90
from samebits.tools.bench.cases import F32, F32_SHAPES, BenchCase, make_operands
from samebits.tools.bench.clock import Race
from samebits.testing import assert_same_bits

Schedule = matmul_fma.Schedule | matmul_fma_sm90.Schedule
SCHEDULES: tuple[Schedule, ...] = (*matmul_fma.SCHEDULES, *matmul_fma_sm90.SCHEDULES)


def cases() -> list[BenchCase]:
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
    found = [BenchCase("forward", m, k, n, F32) for k, n in F32_SHAPES for m in rows]
    found += [
        BenchCase(work, m, k, n, F32) for work in ("dX", "dW") for k, n in F32_SHAPES for m in (512, 2048)
    ]
    random.Random(1).shuffle(found)
    return found


def operands(case: BenchCase, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """a and b of the product, from what the case's work is given."""
    return first.mT if case.work == "dW" else first, second.mT if case.work == "forward" else second


def product(case: BenchCase, schedule: Schedule | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The product by `schedule`, or by torch."""

    def run(first: Tensor, second: Tensor) -> Tensor:
        a, b = operands(case, first, second)
        if schedule is None:
            return torch.mm(a, b)
        return matmul_fma.matmul(a, b, out=a.new_empty(a.shape[0], b.shape[1]), schedule=schedule)

    return run


def size(case: BenchCase) -> tuple[int, int, int]:
    """Rows, columns and terms of the product."""
    m, k, n = case.m, case.k, case.n
    return {"forward": (m, n, k), "dX": (m, k, n), "dW": (n, k, m)}[case.work]


def suits(s: Schedule, case: BenchCase) -> bool:
    """Whether it is worth a try."""
    rows, columns, _ = size(case)
    tiles = math.ceil(rows / s.tile_m) * math.ceil(columns / s.tile_n)
    return (
        s.tile_m < 4 * rows
        and s.tile_n < 4 * columns
        and tiles * s.tile_m * s.tile_n < 4 * rows * columns
        and tiles < 20_000
    )


def name(s: Schedule) -> str:
    if isinstance(s, matmul_fma_sm90.Schedule):
        kind = f"few {s.lines}" if isinstance(s, matmul_fma_sm90.Few) else "many"
        kind += f" {s.unroll}" if isinstance(s, matmul_fma_sm90.Many) else ""
        thread, warps = f"{s.thread_m}x{s.thread_n}x{s.depth}", f"{s.warps_m}x{s.warps_n}+{s.helpers}"
        return f"sm90 {kind} {s.tile_m}x{s.tile_n} {thread} {warps} {s.min_blocks}"
    threads = f"{s.warps_m}x{s.warps_n}+{s.helpers}"
    return f"{s.tile_m}x{s.tile_n}x{s.tile_k} {s.thread_m}x{s.thread_n}x{s.step} {threads} {s.stages}"


def usable(device: torch.device) -> tuple[Schedule, ...]:
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return SCHEDULES if hopper else matmul_fma.SCHEDULES


def measure(case: BenchCase, device: torch.device) -> dict[str, Any]:
    count = max(1, min(32, math.ceil(225e6 / case.bytes)))  # more than the L2 cache holds
    sets = [make_operands(case, device, torch.randn) for _ in range(count)]
    guess = max(case.flop / 50e12, case.bytes / 3.5e12, 3e-6)
    race = Race(max(2, min(100, math.ceil(1e-3 / guess))))
    race.add("torch", product(case, None), sets)
    want = None
    for schedule in usable(device):
        if suits(schedule, case):
            run = product(case, schedule)
            got = run(*sets[0])
            want = got if want is None else want
            assert_same_bits(got, want, f"{case}, {schedule}")
            race.add(name(schedule), run, sets)
    return case.record() | {"us": race.run(4)}


def chosen(case: dict[str, Any], sms: int) -> float:
    """Speed relative to torch of the schedule that the estimate chooses."""
    given = BenchCase(case["work"], case["m"], case["k"], case["n"], F32)
    rows, columns, _ = size(given)
    first, second, *_ = make_operands(given, torch.device("meta"), torch.empty)
    a, b = operands(given, first, second)
    among = (*matmul_fma.SCHEDULES, matmul_fma_sm90.choose_schedule(a, b, sms))
    best = min((s for s in among if name(s) in case["us"]), key=lambda s: s.time(rows, columns, 1, sms))
    return float(case["us"]["torch"] / case["us"][name(best)])


def compile_all(device: torch.device) -> None:
    """By a process for each CPU."""
    small = [BenchCase(work, 512, 512, 512, F32) for work in ("forward", "dX", "dW")]
    operands = {case: make_operands(case, device, torch.randn) for case in small}
    ahead.compile_for(partial(product(case, s), *operands[case]) for case in small for s in usable(device))


def table(case: dict[str, Any], pick: Callable[[dict[str, Any]], float]) -> str:
    """Torch's time, the fastest of each kernel, and the speed beside torch of these and of the chosen one."""
    us = case["us"]
    parts = [f"{case['work']:7} {case['m']:5} {case['k']:5} {case['n']:5}  torch {us['torch']:8.1f}"]
    for kernel, mine in (("universal", False), ("sm90", True)):
        times = [(t, who) for who, t in us.items() if who != "torch" and who.startswith("sm90") == mine]
        if times:
            best, who = min(times)
            parts.append(f"{kernel} {best:8.1f} {us['torch'] / best:.3f} {who.removeprefix('sm90 '):30}")
    return "  ".join(parts) + f"  chosen {pick(case):.3f}"


def main() -> None:
    data = sweep(__doc__, "fma_tune", cases(), measure, compile_all)
    pick = partial(chosen, sms=data["environment"]["multiprocessors"])
    for case in sorted(data["cases"], key=lambda c: (c["work"], c["m"], c["k"], c["n"])):
        print(table(case, pick))
    for least, most in ((1, 1), (2, 8), (16, 32), (64, 128), (256, 256), (512, 4096)):
        for work in ("forward", "dX", "dW"):
            some = [c for c in data["cases"] if least <= c["m"] <= most and c["work"] == work]
            summarise(f"{work}, M {least} to {most}", some, pick)


if __name__ == "__main__":
    main()
