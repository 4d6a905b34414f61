"""What ``samebits bench`` measured, as a figure and as a page."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.tools import page
from samebits.tools.bench.report import ratio, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _beside_torch(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The products that both sides computed, in order of work, shape and rows."""
    found = [c for c in data["cases"] if c["work"] in ("forward", "dX", "dW") and "torch" in c["us"]]
    return sorted(found, key=lambda c: (c["work"], c["dtype"], c["k"], c["n"], c["m"]))


def speed_figure(data: dict[str, Any]) -> Figure:
    """Speed of products relative to PyTorch over rows: a dot for each, a line for the geometric means."""
    cases = _beside_torch(data)
    figure = page.figure()
    axes = figure.subplots()
    lines = list(dict.fromkeys((c["work"], c["dtype"]) for c in cases))
    for i, line in enumerate(lines):
        some = [c for c in cases if (c["work"], c["dtype"]) == line]
        rows = sorted({c["m"] for c in some})
        means = [statistics.geometric_mean(ratio(c) for c in some if c["m"] == m) for m in rows]
        axes.plot([c["m"] for c in some], [ratio(c) for c in some], ".", color=f"C{i}", ms=4, alpha=0.5)
        axes.plot(rows, means, color=f"C{i}", label=", ".join(line))
    axes.axhline(1, color=page.THEIRS, lw=1, label="PyTorch")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows M")
    axes.set_ylabel("speed, PyTorch = 1")
    axes.legend(frameon=False, ncols=2, fontsize=9)
    return figure


def write_page(data: dict[str, Any], path: Path) -> None:
    """Write the figure, the means and every shape."""
    cases, e = _beside_torch(data), data["environment"]
    means = (
        [band, dtype, str(s.cases), f"{s.mean:.3f}", f"{s.worst:.3f}"]
        for (dtype, band), s in summary(data["cases"]).items()
    )
    every = (
        [c["work"], c["dtype"], f"{c['m']:,}", f"{c['k']:,}, {c['n']:,}"]
        + [f"{c['us'][who]:.1f}" for who in ("samebits", "torch")]
        + [f"{ratio(c):.2f}"]
        for c in cases
    )
    tables = (
        page.Table("Means", ["work", "dtype", "cases", "geometric mean", "worst"], means),
        page.Table(
            "Every shape", ["work", "dtype", "M", "K, N", "samebits, µs", "PyTorch, µs", "speed"], every
        ),
    )
    lead = (
        f"Products of samebits beside PyTorch's, both measured in this run. Other bits: {len(data['red'])}."
    )
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items())
    page.write(path, f"Speed on {e['gpu']}", lead, speed_figure(data), tables, f"{versions}.")
