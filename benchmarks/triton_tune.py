"""Times of every schedule of Triton's tile kernel beside torch.mm, which its schedules are chosen from:

python -m benchmarks.triton_tune [--seconds N] [--out FILE]

Products are taken in a random order, the same each time. What a schedule computes is compared with the
general kernel, bit for bit, before it is timed.
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
from samebits.backends.product import Operands
from samebits.backends.triton.products import (
    MMA_SCHEDULES,
    TENSOR_CORE,
    TENSOR_CORE_TILES,
    TILE_SCHEDULES,
    TritonKernel,
)
from samebits.backends.triton.tiles import TileSchedule, TritonSchedule
from samebits.tools.bench.cases import SHAPES, BenchCase, make_operands
from samebits.tools.bench.clock import Race
from samebits.testing import assert_same_bits


def cases() -> list[BenchCase]:
    forward = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    found = [BenchCase("forward", m, k, n) for k, n in SHAPES for m in forward]
    found += [BenchCase(w, m, k, n) for w in ("dX", "dW") for k, n in SHAPES for m in (512, 1024, 2048, 8192)]
    random.Random(1).shuffle(found)
    return [case for case in found if case.flop < 6e11]


def product(
    case: BenchCase, kernel: TritonKernel[Any] | None, schedule: TritonSchedule | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The product by `kernel` under `schedule`, or by torch."""

    def run(first: Tensor, second: Tensor) -> Tensor:
        a = first.mT if case.work == "dW" else first
        b = second.mT if case.work == "forward" else second
        if kernel is None:
            return torch.mm(a, b)
        out = a.new_empty(a.shape[0], b.shape[1])
        kernel.run(Operands(a, b, out), schedule)
        return out

    return run


def measure(case: BenchCase, device: torch.device) -> dict[str, Any]:
    count = max(1, min(32, math.ceil(225e6 / case.bytes)))  # more than the L2 cache holds
    sets = [make_operands(case, device, torch.randn) for _ in range(count)]
    guess = max(case.flop / 600e12, case.bytes / 3.5e12, 3e-6)
    race = Race(max(2, min(100, math.ceil(1e-3 / guess))))
    race.add("torch", product(case, None), sets)
    want = product(case, TENSOR_CORE, MMA_SCHEDULES[0])(*sets[0])
    rows = {"forward": case.m, "dX": case.m, "dW": case.n}[case.work]
    for schedule in TILE_SCHEDULES:
        if schedule.block_m <= 2 * max(rows, 8):
            run = product(case, TENSOR_CORE_TILES, schedule)
            assert_same_bits(run(*sets[0]), want, f"{case}, {schedule}")
            race.add(name(schedule), run, sets)
    return case.record() | {"us": race.run(4)}


def name(s: TritonSchedule) -> str:
    return f"{s.block_m}x{s.block_n}x{s.block_k}"


def chosen(case: dict[str, Any], sms: int) -> float:
    """Speed relative to torch of the schedule that the estimate chooses."""
    m, n = {"forward": ("m", "n"), "dX": ("m", "k"), "dW": ("n", "k")}[case["work"]]

    def estimate(s: TileSchedule) -> float:
        tiles = math.ceil(case[m] / s.block_m) * math.ceil(case[n] / s.block_n)
        return float(math.ceil(tiles / sms) * s.us)

    best = min((s for s in TILE_SCHEDULES if name(s) in case["us"]), key=estimate)
    return float(case["us"]["torch"] / case["us"][name(best)])


def main() -> None:
    data = sweep(__doc__, "triton_tune", cases(), measure)
    pick = partial(chosen, sms=data["environment"]["multiprocessors"])
    for least, most in ((1, 128), (256, 1024), (2048, 8192)):
        some = [c for c in data["cases"] if least <= c["m"] <= most]
        summarise(f"M {least} to {most}", some, pick)


if __name__ == "__main__":
    main()
