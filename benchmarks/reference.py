"""Speed of the CPU reference, mmasim (which computes the same bits) and torch.matmul (which does not).

python -m benchmarks reference
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import samebits
from benchmarks.cases import REFERENCE, Product
from benchmarks.record import RESULTS, environment, results_file, write


def seconds(run: Callable[[], Tensor], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def entry(library: str, m: int, k: int, n: int, times: list[float]) -> dict[str, Any]:
    return {
        "library": library,
        "m": m,
        "k": k,
        "n": n,
        "seconds": [float(f"{t:.4g}") for t in times],
        "gmac_per_s": float(f"{m * k * n / statistics.median(times) / 1e9:.4g}"),
    }


def measure(case: Product, repeats: int, shrink: int) -> dict[str, Any]:
    m, k, n = case.m // shrink, case.k, case.n // shrink
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(case.dtype)
    b = torch.randn(n, k, generator=generator).to(case.dtype).T

    def reference() -> Tensor:
        return samebits.matmul(a, b, out_dtype=torch.float32, contract=case.contract)

    expected = reference()  # also compiles
    results = [entry("samebits", m, k, n, seconds(reference, repeats))]
    torch.matmul(a, b)
    results.append(entry("torch.matmul", m, k, n, seconds(lambda: torch.matmul(a, b), repeats)))
    if case.mmasim is not None:
        from mmasim.nv_ptx import MMA

        model = MMA(*case.mmasim)
        rows, columns = min(m, case.mmasim_m), min(n, case.mmasim_n)
        start = torch.zeros(rows, columns)

        def oracle() -> Tensor:
            out: Tensor = model(a[:rows], b[:, :columns], start)
            return out

        if not torch.equal(oracle().view(torch.int32), expected[:rows, :columns].view(torch.int32)):
            raise SystemExit(f"{case}: mmasim and samebits differ; no speed is reported from wrong bits")
        results.append(entry("mmasim", rows, k, columns, seconds(oracle, 1 + repeats // 3)))
    return {
        "contract": str(case.contract),
        "name": case.contract.name,
        "model": case.contract.mma.name if case.contract.mma else None,
        "digest": case.contract.digest(),
        "dtype": str(case.dtype).removeprefix("torch."),
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=results_file, default=RESULTS / "cpu" / "reference.json")
    parser.add_argument("--smoke", action="store_true", help="small shapes, nothing written: does it run?")
    options = parser.parse_args()
    if options.smoke:
        for case in REFERENCE:
            measure(case, repeats=1, shrink=16)
        print(f"smoke: {len(REFERENCE)} cases ran")
        return
    record = environment()
    cases = []
    for case in REFERENCE:
        cases.append(measure(case, repeats=15, shrink=1))
        speeds = ", ".join(f"{r['library']} {r['gmac_per_s']} GMAC/s" for r in cases[-1]["results"])
        print(f"{case.contract.name} {case.dtype}: {speeds}", flush=True)
    write(options.out, {"environment": record, "cases": cases})
