"""The figures of a benchmark, for the terminal and the documents: speed by shape, and by band of cases."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samebits.tools.bench.cases import BETWEEN, ODD, ROWS


def is_forward(case: dict[str, Any]) -> bool:
    """Whether a result belongs to a forward on rows that the copy engine can read."""
    return bool(case["work"] == "forward" and case["k"] != ODD[0])


BANDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "forward, M <= 128": lambda c: is_forward(c) and c["m"] in ROWS and c["m"] <= 128,
    "forward, M = 256": lambda c: is_forward(c) and c["m"] == 256,
    "forward, M >= 512": lambda c: is_forward(c) and c["m"] >= 512,
    f"forward, M {', '.join(map(str, BETWEEN))}": lambda c: is_forward(c) and c["m"] in BETWEEN,
    f"forward, K {ODD[0]}": lambda c: c["work"] == "forward" and c["k"] == ODD[0],
    "dX, M <= 128": lambda c: c["work"] == "dX" and c["m"] <= 128,
    "dX, M >= 512": lambda c: c["work"] == "dX" and c["m"] >= 512,
    "dW, M >= 512": lambda c: c["work"] == "dW",
    "forward, dX and dW, M >= 512": lambda c: (is_forward(c) or c["work"] in ("dX", "dW")) and c["m"] >= 512,
    "dW ragged / dense": lambda c: c["work"] == "dW ragged",
    "dW main_grad / mm, add_": lambda c: c["work"] == "dW main_grad",
    "tiny bmm": lambda c: c["work"] == "bmm",
    "log-probabilities": lambda c: c["work"] == "logp",
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed relative to the competitor's, over some cases. Above 1 is faster."""

    cases: int
    mean: float
    worst: float
    worst_case: dict[str, Any]


def ratio(case: dict[str, Any], who: str = "samebits") -> float:
    """The speed relative to the competitor's."""
    us = case["us"]
    return float(us.get("torch", us.get("dense")) / us[who])


def summary(cases: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Speed]:
    """Geometric mean and worst of every band, by dtype."""
    found, every = {}, list(cases)
    for dtype, (band, chosen) in itertools.product(("bfloat16", "float16", "float32"), BANDS.items()):
        some = [c for c in every if c["dtype"] == dtype and chosen(c)]
        if some:
            worst = min(some, key=ratio)
            mean = statistics.geometric_mean(map(ratio, some))
            found[dtype, band] = Speed(len(some), mean, ratio(worst), worst)
    return found


def forward(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of a grid of shapes and `ROWS`: forward, bfloat16."""
    return [c for c in data["cases"] if is_forward(c) and c["dtype"] == "bfloat16" and c["m"] in ROWS]


def show(data: dict[str, Any]) -> RenderableType:
    """Forward speed by shape and M, then the summary."""
    cases = forward(data)
    sizes = sorted({c["m"] for c in cases})
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    grid.title = Text("Forward, bf16: speed relative to torch.mm, by K, N and M", style="bold not italic")
    grid.add_column("K, N", no_wrap=True)
    for m in sizes:
        grid.add_column(str(m), justify="right", no_wrap=True)
    for k, n in dict.fromkeys((c["k"], c["n"]) for c in cases):
        by_m = {c["m"]: ratio(c) for c in cases if (c["k"], c["n"]) == (k, n)}
        grid.add_row(f"{k}, {n}", *(_speed(by_m[m]) if m in by_m else Text("") for m in sizes))
    host = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("an eager call costs the host, µs", "M, K, N", "samebits", "torch"):
        host.add_column(name, justify="left" if name[0] in "aM" else "right")
    for line in data["host"]:
        us, shape = line["us"], f"{line['m']}, {line['k']}, {line['n']}"
        host.add_row(line["operation"], shape, f"{us['samebits']:.1f}", f"{us['torch']:.1f}")
    drifting = sum(any(d["changed"]["torch"]) for d in data["drift"])
    ours = sum(any(d["changed"]["samebits"]) for d in data["drift"])
    text = Text(f"Rows change bits with M at {drifting} of {len(data['drift'])} shapes under torch.mm, at ")
    text.append(f"{ours} under samebits", "red bold" if ours else "green bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("speed relative to torch", "dtype", "cases", "geometric mean", "worst", "at M, K, N"):
        table.add_column(name, justify="left" if name[:2] in ("sp", "dt", "at") else "right")
    for (dtype, band), s in summary(data["cases"]).items():
        w = s.worst_case
        at = f"{w['work']} {w['m']}, {w['k']}, {w['n']}" + (f" x {w['batch']}" if w["work"] == "bmm" else "")
        table.add_row(band, dtype, str(s.cases), _speed(s.mean, 3), _speed(s.worst, 3), at)
    e = data["environment"]
    return Group(
        grid,
        "",
        host,
        "",
        text,
        Text(f"{e['gpu']}, driver {e['driver']}, digest {e['digest']}", "dim"),
        table,
    )


def show_own(data: dict[str, Any]) -> RenderableType:
    """A line for each case of a user's shapes, then a mean for each kind of work."""
    lines = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("work", "dtype", "M", "K", "N", "batch", "samebits, µs", "torch, µs", "speed"):
        lines.add_column(name, justify="left" if name in ("work", "dtype") else "right")
    by_work: dict[str, list[float]] = {}
    for c in data["cases"]:
        speed = ratio(c)
        by_work.setdefault(c["work"], []).append(speed)
        us = (f"{c['us'][who]:.1f}" for who in ("samebits", "torch"))
        sizes = (f"{c[name]:,}" for name in ("m", "k", "n", "batch"))
        lines.add_row(c["work"], c["dtype"], *sizes, *us, _speed(speed, 3))
    e = data["environment"]
    means = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("speed relative to torch", "cases", "geometric mean", "worst"):
        means.add_column(name, justify="left" if name[0] == "s" else "right")
    for work, found in by_work.items():
        mean = statistics.geometric_mean(found)
        means.add_row(work, str(len(found)), _speed(mean, 3), _speed(min(found), 3))
    return Group(lines, "", Text(f"{e['gpu']}, driver {e['driver']}, digest {e['digest']}", "dim"), means)


def _speed(x: float, digits: int = 2) -> Text:
    return Text(f"{x:.{digits}f}", style="green" if x >= 1 else "default" if x >= 0.95 else "yellow")
