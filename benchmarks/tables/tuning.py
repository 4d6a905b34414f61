"""The tables of tuned schedules that come with samebits."""

from __future__ import annotations

import statistics

from benchmarks.tables.text import table
from samebits.backends.cuda import tuned
from samebits.tools.tune.report import gain


def tuned_tables() -> str:
    """How many shapes each has, and what it gains there."""
    rows = []
    for path in sorted(tuned.SHIPPED.glob("*.json")):
        found = tuned.read(path)
        entries = found.entries.values()
        gains = [gain(e) for e in entries if e.schedule is not None]
        mean = statistics.geometric_mean(map(gain, entries)) if entries else 1.0
        rows.append(
            [
                found.gpu,
                str(len(entries)),
                str(len(gains)),
                f"{mean - 1:.1%}",
                f"{max(gains, default=1) - 1:.1%}",
            ]
        )
    head = ["GPU", "shapes", "with a faster schedule", "gain over all shapes", "largest gain"]
    return table(head, rows) if rows else "None yet."
