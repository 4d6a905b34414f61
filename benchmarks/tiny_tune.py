"""Bits and speed of the schedules of ``bmm_tiny``, beside ``torch.bmm`` and a copy of as many bytes.

    python -m benchmarks.tiny_tune --out results.json

Each schedule is held to the CPU reference on some matrices of the batch, with poisoned outputs, before it is
timed; times are taken as ``samebits bench`` takes them. The chosen one is that of
``bmm_tiny.choose_schedule``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import environment, results_file, write
from samebits.backends.cuda import ahead, bmm_tiny, runtime
from samebits.backends.cuda.bmm_tiny import Product, Schedule
from samebits.backends.cuda.matmul import family
from samebits.backends.reference import matmul as reference
from samebits.tools.bench.cases import BF16, F32, TINY, BenchCase, make_operands
from samebits.tools.bench.clock import Race
from samebits.tools.bench.measure import ceilings
from samebits.contract import FMA, TENSOR_CORE
from samebits.testing import bits


def menu(p: Product, batch: int, sms: int) -> list[Schedule]:
    """The chosen schedule first, then all that might be chosen."""
    tiles = (4, 4), (1, 4), (2, 4), (4, 8), (8, 4), (8, 8)
    found = [bmm_tiny.choose_schedule(p, batch, sms)]
    for threads, staged, tile, in_flight in itertools.product(
        (64, 128, 256), (True, False), tiles if p.fused else tiles[:1], (1, 2, 4, 8)
    ):
        s = bmm_tiny.settle(Schedule(threads, tile, 1, staged, in_flight), p, batch, sms)
        if _promises(s, p):
            # What takes no parts would be the same kernel again.
            found += [t for t in (s, replace(s, parts=2)) if p.parts(t, True, (16, 16, 16)) == t.parts]
    return list(dict.fromkeys(found))


def _promises(s: Schedule, p: Product) -> bool:
    """Not wasteful, nor short of registers."""
    if not p.fused:
        return s.in_flight == 1 or (not s.staged and s.in_flight * p.k <= 64)
    rows, columns = s.tile
    busy = p.threads(s)
    registers = rows * columns + 4 * (rows + columns)
    return (
        s.in_flight == 1
        and p.m % rows == p.n % columns == 0
        and (s.threads < 256 or busy == 256)
        and busy <= 256
        and busy >= 8 * (rows * columns > 16)
        and (s.staged or (busy <= 64 and registers <= 100))
    )


def name_of(s: Schedule) -> str:
    threads, (rows, columns), per_block, staged, in_flight, parts = astuple(s)
    return f"{'s' if staged else 'd'}{threads} {rows}x{columns} f{in_flight} b{per_block} p{parts}"


def runner(fused: bool, schedule: Schedule) -> Callable[..., Tensor]:
    def run(a: Tensor, b: Tensor, half: Tensor) -> Tensor:
        out = torch.empty(len(a), a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
        bmm_tiny.bmm(a, b, out, fused=fused, schedule=schedule)
        return out

    return run


def measure(case: BenchCase, schedules: list[Schedule], l2_bytes: int, seconds: float) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    fused = case.dtype is F32
    count = max(1, min(64, math.ceil(4.5 * l2_bytes / case.bytes)))
    sets = [make_operands(case, device, torch.randn) for _ in range(count)]
    a, b, _ = sets[0]
    some = torch.arange(case.batch - 1, -1, -(case.batch // 64 | 1), device=device)
    contract = FMA if fused else TENSOR_CORE.on(family(0))
    want = reference.matmul(
        a[some].cpu(), b[some].cpu(), bias=None, out_dtype=case.dtype, contract=contract.key
    )
    guess = max(case.flop / (30e12 if fused else 600e12), case.bytes / 3e12, 2e-6)
    race = Race(max(2, min(200, math.ceil(seconds / guess))))
    race.add("torch", lambda a, b, half: torch.bmm(a, b), sets)
    race.add("copy", lambda a, b, half: half.clone(), sets)
    wrong = []
    for s in schedules:
        out = torch.full((case.batch, case.m, case.n), math.nan, dtype=case.dtype, device=device)
        bmm_tiny.bmm(a, b, out, fused=fused, schedule=s)
        if not torch.equal(bits(out[some].cpu()), bits(want)):
            wrong.append(name_of(s))
            continue
        race.add(name_of(s), runner(fused, s), sets)
    return {
        "case": [case.batch, case.m, case.k, case.n, str(case.dtype).removeprefix("torch.")],
        "bytes": case.bytes,
        "chosen": name_of(schedules[0]),
        "us": race.run(3),
        "wrong": wrong,
    }


def report(results: list[dict[str, Any]], copy_bytes_per_s: float) -> None:
    """One line a case: speed as torch.bmm's time over ours, and as a share of a large copy's bandwidth."""
    ratios, best_ratios = [], []
    for r in results:
        us = dict(r["us"])
        torch_us, copy_us = us.pop("torch"), us.pop("copy")
        ranked = sorted(us, key=us.__getitem__)
        if not us:
            print(f"{r['case']} WRONG {r['wrong']}")
            continue
        share = r["bytes"] / copy_bytes_per_s * 1e6
        chosen = us.get(r["chosen"], math.inf)
        ratios.append(torch_us / chosen)
        best_ratios.append(torch_us / us[ranked[0]])
        fastest = " | ".join(f"{name} {us[name]:.2f}" for name in ranked[:4])
        shape = "x".join(map(str, r["case"][:4]))
        print(
            f"{shape:16} {r['case'][4][:4]} torch {torch_us:6.2f} copy {copy_us:6.2f} chosen {chosen:6.2f}"
            f" = {ratios[-1]:4.2f}x {share / chosen:4.0%} ({r['chosen']}) | {fastest}"
            + (f" WRONG {r['wrong']}" if r["wrong"] else "")
        )
    print(f"geometric mean: chosen {geometric_mean(ratios):.2f}, fastest {geometric_mean(best_ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=results_file, required=True)
    parser.add_argument("--seconds", type=float, default=1e-3, help="of one contestant's graph")
    args = parser.parse_args()
    start = time.monotonic()
    info = runtime.device_info(0)
    jobs = []
    for (batch, m, k, n), dtype in itertools.product(TINY, (BF16, F32)):
        p = Product(m, n, k, dtype, dtype, dtype, True, False, dtype is F32)
        jobs.append((BenchCase("bmm", m, k, n, dtype, batch), menu(p, batch, info.sm_count)))
    calls: list[Callable[[], object]] = []
    for case, schedules in jobs:
        few = make_operands(replace(case, batch=2), torch.device("cuda", 0), torch.empty)
        calls += [partial(runner(case.dtype is F32, s), *few) for s in schedules]
    kernels = ahead.compile_for(calls).needed
    print(f"{kernels} kernels in {time.monotonic() - start:.0f} s", flush=True)
    copy = ceilings(torch.device("cuda", 0))["copy_bytes_per_s"]
    results = [measure(case, schedules, info.l2_bytes, args.seconds) for case, schedules in jobs]
    write(args.out, {"environment": environment(), "copy_bytes_per_s": copy, "cases": results})
    report(results, copy)
    print(f"{time.monotonic() - start:.0f} s; copy {copy / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
