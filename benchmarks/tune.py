"""What the sweeps over a kernel's schedules share: their command line, their clock, their results."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, environment, results_file, slug, write
from samebits.tools.bench import BenchCase


def sweep(
    description: str | None,
    name: str,
    cases: Iterable[BenchCase],
    measure: Callable[[BenchCase, torch.device], dict[str, Any]],
    before: Callable[[torch.device], object] = lambda device: None,
) -> dict[str, Any]:
    """Results of the cases that fit into the time, written to ``<gpu>/<name>.json``; or those shown."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="stop after so many")
    parser.add_argument("--rows", help="only products of so many, as in 512,2048")
    parser.add_argument("--shapes", help="only of such k x n, as in 4096x4096,7168x256")
    parser.add_argument("--work", help="only of such work, as in forward,dX")
    parser.add_argument("--out", type=results_file, help=f"instead of benchmarks/results/<gpu>/{name}.json")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only summarise these results")
    options = parser.parse_args()
    if options.show:
        shown: dict[str, Any] = json.loads(options.show.read_text())
        return shown
    device = torch.device("cuda", 0)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    data: dict[str, Any] = {"environment": environment() | {"multiprocessors": sms}, "cases": []}
    start = time.monotonic()
    before(device)
    for case in cases:
        wanted = (
            (options.rows, str(case.m)),
            (options.shapes, f"{case.k}x{case.n}"),
            (options.work, case.work),
        )
        if any(asked and given not in asked.split(",") for asked, given in wanted):
            continue
        if time.monotonic() - start < options.seconds:
            data["cases"].append(measure(case, device))
    write(options.out or RESULTS / slug(torch.cuda.get_device_name()) / f"{name}.json", data)
    return data


def summarise(said: str, cases: list[dict[str, Any]], chosen: Callable[[dict[str, Any]], float]) -> None:
    """Print the speed beside torch of the chosen schedules, and of the fastest."""
    if not cases:
        return
    picks = [chosen(c) for c in cases]
    best = [c["us"]["torch"] / min(t for who, t in c["us"].items() if who != "torch") for c in cases]
    mean = statistics.geometric_mean
    print(
        f"{said}: {len(cases)} products, chosen {mean(picks):.3f} (worst {min(picks):.3f}),"
        f" best of all {mean(best):.3f} (worst {min(best):.3f})"
    )
