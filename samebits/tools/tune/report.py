"""What a run of ``samebits tune`` has found, for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samebits.backends.cuda.tuned import Entry
from samebits.tools.text import plural
from samebits.tools.tune.measure import Outcome

_SHOWN = 12


def gain(e: Entry) -> float:
    """How many times as fast as the cost model's choice."""
    return e.model_us / e.us


def show(found: Outcome) -> RenderableType:
    """The largest gains, and how many shapes have one."""
    won = {shape: e for shape, e in found.entries.items() if e.schedule is not None}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("shape", "cost model, µs", "tuned, µs", "gain"):
        table.add_column(name, justify="left" if name == "shape" else "right")
    for shape, e in sorted(won.items(), key=lambda item: -gain(item[1]))[:_SHOWN]:
        table.add_row(str(shape), f"{e.model_us:.1f}", f"{e.us:.1f}", f"{gain(e) - 1:.1%}")
    text = Text(f"{plural(len(found.entries), 'shape')} measured; {said(found.entries.values())}")
    if found.alone:
        text.append(f"; {plural(len(found.alone), 'shape')} with one schedule only")
    if found.left:
        text.append(f"; {plural(len(found.left), 'shape')} left: the budget is spent", "yellow")
    return Group(table, text) if won else text


def said(entries: Iterable[Entry]) -> str:
    """How many are faster, and by how much."""
    every = list(entries)
    gains = [gain(e) for e in every if e.schedule is not None]
    if not gains:
        return "the cost model's choice is the fastest of each"
    won, over_all = (statistics.geometric_mean(some) - 1 for some in (gains, map(gain, every)))
    schedules = plural(len(gains), "schedule")
    return f"{schedules} faster than the cost model's by {won:.1%} in the mean, {over_all:.1%} over all"
