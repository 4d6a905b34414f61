"""Draw docs/assets/*.svg from benchmarks/results; with --check, fail where they are not what would be drawn.

python -m benchmarks.plot [--check]
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.record import RESULTS, ROOT

ASSETS = ROOT / "docs" / "assets"

# The same file for the same results: no date, no random ids, and text as text (no glyph outlines).
STYLE: Any = {
    "svg.hashsalt": "samebits",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
}
OURS, THEIRS, ORACLE = "#00796b", "#c62828", "#7e57c2"


def drift(data: dict[str, Any]) -> Figure:
    sizes = [v for v in data["variations"] if v["kind"] == "batch size"]
    labels = [v["name"].removeprefix("batches of ") for v in sizes]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for side, name, colour, shift in (
        ("torch", "torch.nn.functional.linear", THEIRS, -0.2),
        ("samebits", "samebits.linear", OURS, 0.2),
    ):
        changed = [v[side] for v in sizes]
        bars = axes.bar([i + shift for i in range(len(sizes))], changed, 0.4, color=colour, label=name)
        axes.bar_label(bars, [f"{c:,}" for c in changed], fontsize=9)
    dtype = data["layers"][0]["dtype"]
    rows = sizes[0]["rows"]
    axes.set_xticks(range(len(sizes)), labels)
    axes.set_xlabel("rows in the batch")
    axes.set_ylabel("rows with other bits")
    axes.set_title(
        f"{data['model']}: {len(data['layers'])} linear layers, {rows:,} rows, {dtype}",
        fontsize=11,
        loc="left",
    )
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False)
    return figure


def reference_speed(data: dict[str, Any]) -> Figure:
    cases = data["cases"]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    libraries = (("samebits", OURS), ("mmasim", ORACLE), ("torch.matmul", THEIRS))
    for place, (library, colour) in enumerate(libraries):
        at, speeds = [], []
        for i, case in enumerate(cases):
            for result in case["results"]:
                if result["library"] == library:
                    at.append(i + (place - 1) * 0.27)
                    speeds.append(result["gmac_per_s"])
        bars = axes.bar(at, speeds, 0.27, color=colour, label=library)
        axes.bar_label(bars, [f"{s:.0f}" if s >= 10 else f"{s:.2g}" for s in speeds], fontsize=9)
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(cases)), [f"{case['model'] or case['name']}\n{case['dtype']}" for case in cases]
    )
    axes.set_ylabel("GMAC/s (log scale)")
    threads = data["environment"]["threads"]
    axes.set_title(f"{data['environment']['cpu']}, {threads} threads", fontsize=11, loc="left")
    axes.margins(y=0.15)
    axes.grid(axis="x", visible=False)
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    return figure


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "drift.svg": ("cpu/drift.json", drift),
    "reference-speed.svg": ("cpu/reference.json", reference_speed),
}


def render(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a picture is out of date"
    )
    options = parser.parse_args()
    stale = []
    for name, (results, draw) in PICTURES.items():
        with matplotlib.rc_context(STYLE):
            text = render(draw(json.loads((RESULTS / results).read_text())))
        path = ASSETS / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            ASSETS.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    if options.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.plot")


if __name__ == "__main__":
    main()
