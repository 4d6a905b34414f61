"""Tuned and untuned schedules beside cuBLAS, on shapes that no fit of the cost model has seen.

python -m benchmarks held_out

Forty shapes are drawn by a seed that changes only when they have taught the cost model a rule: (K, N) of
current models' projections, none of them in ``samebits bench``, and M of three groups. Each is measured
forward, for dX and for dW, in bf16. A product's plausible schedules race, and one wins by the rule of
``samebits tune``. Then the winner, the cost model's choice and cuBLAS run anew, by the clock of ``samebits
bench``: the times are not the lucky ones that decided.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import arguments, environment, lines_of_progress, results, results_file, write
from samebits.backends.cuda import devices, precompile
from samebits.backends.cuda.shapes import ProductShape
from samebits.backends.cuda.tuned import schedule_data
from samebits.tools.bench.clock import median
from samebits.tools.shapes import of_weights
from samebits.tools.tune.contest import Contest
from samebits.tools.tune.families import contest
from samebits.tools.tune.measure import Clock, GraphClock, finalists, label, loaded, operand_sets, winner

SEED = 43

WEIGHTS = (
    *((2048, 3072), (2048, 16384), (8192, 2048)),  # Llama-3.2 1B
    *((3072, 5120), (3072, 16384), (8192, 3072)),  # Llama-3.2 3B
    *((16384, 18432), (16384, 106496), (53248, 16384)),  # Llama-3.1 405B
    *((3584, 4608), (3584, 37888), (18944, 3584)),  # Qwen2.5 7B
    *((2560, 6144), (4096, 2560), (2560, 19456), (9728, 2560)),  # Qwen3 4B
    *((5120, 7168), (5120, 34816), (17408, 5120)),  # Qwen3 14B
    *((5120, 6144), (5120, 65536), (32768, 5120)),  # Mistral Small
    *((3584, 8192), (3584, 28672), (14336, 3584)),  # Gemma 2 9B
    *((5376, 8192), (5376, 43008), (21504, 5376)),  # Gemma 3 27B
    *((5120, 7680), (5120, 35840), (17920, 5120)),  # Phi-4
    *((7168, 2112), (1536, 24576), (16384, 7168), (7168, 36864), (18432, 7168)),  # DeepSeek-V3
    *((2880, 5120), (4096, 2880)),  # gpt-oss
)
"""(K, N) of projections: queries, keys and values as one; output; gate and up as one; down."""

GROUPS: dict[str, tuple[int, int, int]] = {
    "M <= 128": (1, 128, 14),
    "M 129 to 511": (129, 511, 13),
    "M >= 512": (512, 8192, 13),
}
"""The least and the most rows of a group, and how many shapes it has. All magnitudes are as frequent."""


def drawn(seed: int = SEED) -> list[tuple[int, int, int]]:
    """(M, K, N) of the shapes, in an order that mixes the groups."""
    dice = random.Random(seed)
    found: list[tuple[int, int, int]] = []
    for least, most, count in GROUPS.values():
        for k, n in dice.sample(WEIGHTS, count):
            m = round(math.exp(dice.uniform(math.log(least), math.log(most))))
            found.append((m, k, n))
    dice.shuffle(found)
    return found


def products(shapes: Iterable[tuple[int, int, int]]) -> list[tuple[str, ProductShape]]:
    """Forward, dX and dW of each shape, by their names."""
    found = []
    for m, k, n in shapes:
        (forward,) = of_weights([(k, n)], [m], torch.bfloat16, gradients_from=m + 1)
        _, dX, dW = of_weights([(k, n)], [m], torch.bfloat16, gradients_from=m)
        found += [("forward", forward), ("dX", dX), ("dW", dW)]
    return found


def group(m: int) -> str:
    return next(name for name, (least, most, _) in GROUPS.items() if least <= m <= most)


Found = tuple[dict[str, float], int, dict[str, float]]


def measured(clock: Clock) -> Found:
    """Microseconds of torch, of the cost model's choice and of the tuned one, the place of the latter, and
    those of all in their first turns."""
    early = {name: median(t) for name, t in clock.first().items()}
    others = finalists({name: us for name, us in early.items() if name != "torch"})
    tuned = winner(clock.final(["0", *others])) if others else "0"
    us = {name: median(t) for name, t in clock.final([*dict.fromkeys(("torch", "0", tuned))]).items()}
    return {"torch": us["torch"], "untuned": us["0"], "tuned": us[tuned]}, int(tuned), early


def measure(of: Contest, l2_bytes: int) -> Found:
    """The same, on the GPU."""
    sets = operand_sets(of, l2_bytes)
    runs: dict[str, Callable[..., Any]] = {"torch": torch.matmul}
    return measured(GraphClock(of, loaded(of, sets[0]) | runs, sets))


def speeds(cases: Iterable[dict[str, Any]], who: str, beside: str) -> list[float]:
    return [c["us"][beside] / c["us"][who] for c in cases]


def bands(cases: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The cases by group and kind of work, and of all kinds together."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name in GROUPS:
        for work in ("all", "forward", "dX", "dW"):
            some = [c for c in cases if group(c["m"]) == name and work in ("all", c["work"])]
            if some:
                found[name, work] = some
    return found


COMPARED = (("tuned", "torch"), ("untuned", "torch"), ("untuned", "tuned"))


def show(data: dict[str, Any]) -> Table:
    table = Table("rows", "work", "products", box=None)
    for who, beside in COMPARED:
        table.add_column(f"{who} / {beside}", justify="right")
        table.add_column("worst", justify="right")
    for (rows, work), cases in bands(data["cases"]).items():
        cells = []
        for who, beside in COMPARED:
            found = speeds(cases, who, beside)
            cells += [f"{statistics.geometric_mean(found):.3f}", f"{min(found):.3f}"]
        table.add_row(rows, work, str(len(cases)), *cells)
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budget", type=float, default=250, help="begin no product after so many seconds")
    parser.add_argument("--every", type=results_file, help="microseconds of all schedules, to fit costs to")
    options = parser.parse_args()
    start, console, record = time.monotonic(), Console(width=130), environment(options.commit)
    device, say = torch.cuda.current_device(), lines_of_progress(console)
    todo: list[tuple[str, Contest, list[Future[bool]]]] = []
    data: dict[str, Any] = {"environment": record, "seed": SEED, "cases": []}
    every_time: list[dict[str, Any]] = []
    every = products(drawn())
    with torch.no_grad(), precompile.Ahead() as ahead:
        torch.manual_seed(0)
        for work, shape in every:
            of = contest(shape, device, alone=True)
            assert of is not None
            todo.append((work, of, ahead.add(way.plan for way in of.ways)))
        for i, (work, of, compiling) in enumerate(todo):
            say(i / len(todo), f"{work} {of.shape}, {time.monotonic() - start:.0f} s")
            wait(compiling, max(0.0, options.budget - (time.monotonic() - start)))
            if time.monotonic() - start >= options.budget:
                break
            us, place, early = measure(of, devices.device_info(device).l2_bytes)
            m, k, n = sizes(work, of.shape)
            schedules = {who: label(of.ways[at].schedule) for who, at in (("untuned", 0), ("tuned", place))}
            data["cases"].append({"work": work, "m": m, "k": k, "n": n, "us": us, "schedules": schedules})
            every_time.append({"work": work, "m": m, "k": k, "n": n} | all_times(of, early))
    data["left"] = len(every) - len(data["cases"])
    out = results(options.out, "held_out.json")
    console.print(show(data))
    console.print(f"{len(data['cases'])} of {len(every)} products in {time.monotonic() - start:.0f} s")
    write(out, data)
    if options.every:
        options.every.write_text(json.dumps(every_time, separators=(",", ":")).replace("},{", "},\n{") + "\n")


def all_times(of: Contest, early: dict[str, float]) -> dict[str, Any]:
    """Microseconds of each schedule in the first turns, in the order of its fields, and of torch."""
    ways = [[*schedule_data(way.schedule).values()][1:] for way in of.ways]
    return {"torch": early["torch"], "ways": [[*way, early[str(i)]] for i, way in enumerate(ways)]}


def sizes(work: str, s: Any) -> tuple[int, int, int]:
    """M, K and N of the linear layer whose product it is."""
    return {"forward": (s.m, s.k, s.n), "dX": (s.m, s.n, s.k), "dW": (s.k, s.n, s.m)}[work]
