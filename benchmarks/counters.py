"""Hardware counters of samebits' and PyTorch's products, recorded in results/<gpu>/counters.json.

python -m benchmarks counters [--commit COMMIT] [--out FILE]

It runs each product once under Nsight Compute, which must be on the PATH and allowed to read the counters.
Caches are cold, and everything else is warmed up by earlier launches. Clocks are not changed.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from typing import Any

import torch

from benchmarks.record import arguments, environment, save
from samebits.tools.bench.cases import F32, BenchCase, contestants, make_operands

CASES = (
    *(BenchCase("forward", m, 4096, 4096) for m in (1, 16, 128)),
    BenchCase("forward", 1, 4096, 28672),
    BenchCase("forward", 256, 8192, 8192),
    BenchCase("forward", 2048, 8192, 8192),
    BenchCase("dX", 512, 4096, 6144),
    BenchCase("dX", 1024, 768, 3072),
    BenchCase("dW", 2048, 4096, 4096),
    BenchCase("dW", 16384, 7168, 256),
    BenchCase("forward", 1, 7168, 256, F32),
    BenchCase("forward", 128, 4096, 4096, F32),
    BenchCase("forward", 2048, 4096, 4096, F32),
)

OURS = ("tensor_core", "fma_")
"""Prefixes of the entries of the product kernels."""

METRICS = {
    "seconds": "gpu__time_duration.sum",
    "hertz": "sm__cycles_elapsed.avg.per_second",
    "cycles": "sm__cycles_elapsed.max",
    "blocks": "launch__grid_size",
    "tensor_percent": "sm__pipe_tensor_cycles_active.max.pct_of_peak_sustained_elapsed",
    "fma_percent": "sm__inst_executed_pipe_fma.max.pct_of_peak_sustained_elapsed",
    "into_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "out_of_l2_percent": "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "hbm_bytes": "dram__bytes.sum",
}


def run() -> None:
    """Run all products, samebits' first, with nothing else between the profiler's start and stop."""
    device = torch.device("cuda", 0)
    for case in CASES:
        operands = make_operands(case, device, torch.randn)
        runs = contestants(case, device)
        for _ in range(2):
            for name in ("samebits", "torch"):
                runs[name](*operands)
        torch.cuda.synchronize()
        for name in ("samebits", "torch"):
            torch.cuda.profiler.start()
            runs[name](*operands)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def parse(text: str) -> list[dict[str, list[dict[str, Any]]]]:
    """The kernels of each product, from Nsight Compute's table: one or more of samebits, then of PyTorch."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    head, _, *rows = rows or [[], []]
    found: list[dict[str, list[dict[str, Any]]]] = []
    for row in rows:
        by_name = dict(zip(head, row, strict=True))
        kernel: dict[str, Any] = {"kernel": by_name["Kernel Name"]}
        kernel |= {name: float(by_name[metric].replace(",", "")) for name, metric in METRICS.items()}
        kernel["seconds"] /= 1e9
        ours = kernel["kernel"].startswith(OURS)
        if ours and (not found or found[-1]["torch"]):
            found.append({"samebits": [], "torch": []})
        found[-1]["samebits" if ours else "torch"].append(kernel)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", action="store_true", help="only what is profiled")
    options = parser.parse_args()
    if options.run:
        run()
        return
    profile = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    profile += ["--kernel-name-base", "function", "--print-units", "base"]
    profile += ["--metrics", ",".join(METRICS.values())]
    child = [sys.executable, "-m", "benchmarks", "counters", "--run"]
    done = subprocess.run([*profile, *child], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"ncu: exit {done.returncode}\n{done.stdout[-2000:]}")
    found = parse(done.stdout)
    if len(found) != len(CASES):
        raise SystemExit(f"{len(found)} products of {len(CASES)}\n{done.stdout[-2000:]}")
    record = environment(options.commit)
    cases = [case.record() | kernels for case, kernels in zip(CASES, found, strict=True)]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    data = {"environment": record | {"multiprocessors": multiprocessors}, "cases": cases}
    save(options.out, "counters.json", data)
