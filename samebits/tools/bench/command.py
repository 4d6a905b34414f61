"""``samebits bench``: measure, show the times and write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from samebits.backends import UnavailableError
from samebits.backends.cuda.shapes import Shape
from samebits.tools import page, terminal
from samebits.tools.bench.attention import bench_attention
from samebits.tools.bench.attention_cases import ATTENTION, quick_attention
from samebits.tools.bench.attention_report import show_attention
from samebits.tools.bench.cases import CASES, of_shapes
from samebits.tools.bench.cases import quick as some_cases
from samebits.tools.bench.measure import bench
from samebits.tools.bench.page import speed_figure, write_page
from samebits.tools.bench.report import show, show_own
from samebits.tools.text import ToolError


def main(
    *,
    quick: bool,
    peers: bool,
    backend: str | None,
    json_to: str | None,
    plot: Path | None,
    html: Path | None,
    device: int,
    own: Sequence[Shape] | None = None,
) -> int:
    """Measure on the CUDA device `device`. The arguments are the command's options; `own`: a user's
    shapes, in place of all others.

    Returns:
        The exit code: 1 if some products had other bits than specified, and otherwise 0.

    Raises:
        ToolError: the benchmark cannot run here.
    """
    out = terminal.Console(json_to)
    terminal.check_file("--json", json_to)
    terminal.check_file("--plot", plot)
    terminal.check_file("--html", html)
    if plot is not None:
        page.check(plot)  # fails before the run
    if html is not None:
        page.figure()
    if own is not None and quick:
        raise ToolError("--quick: expected none of --shape, --model and --shapes beside it")
    try:
        with terminal.progress() as say:
            cases = some_cases() if quick else CASES if own is None else of_shapes(own)
            if not cases:
                raise ToolError("no shape here has a competitor")
            attention = own is None and backend != "triton"  # which has none
            part = 0.65 if attention else 1.0
            data = bench(
                cases,
                device=device,
                peers=peers,
                backend=backend,
                progress=lambda done, what: say(part * done, what),
            )
            if attention:
                data["attention"] = bench_attention(
                    quick_attention() if quick else ATTENTION,
                    device=device,
                    progress=lambda done, what: say(part + (1 - part) * done, what),
                )
    except UnavailableError as error:
        raise ToolError(str(error)) from error
    out.print(show(data) if own is None else show_own(data))
    red = [*data["red"]]
    if "attention" in data:
        out.print(show_attention(data["attention"]))
        red += data["attention"]["red"]
    if red:
        print(*(f"samebits bench: {case}" for case in red), sep="\n", file=sys.stderr)
    with terminal.unless(bool(red)):
        if json_to is not None:
            terminal.write_json(json.dumps(data), json_to)
        if plot is not None:
            with terminal.writing("--plot", plot):
                page.save(speed_figure(data), plot)
        if html is not None:
            with terminal.writing("--html", html):
                write_page(data, html)
    return int(bool(red))
