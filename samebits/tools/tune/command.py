"""``samebits tune``: measure, merge and write tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from samebits.backends import UnavailableError
from samebits.backends.cuda import tuned
from samebits.backends.cuda.tuned import Table, TunedError
from samebits.tools import shapes as wanted
from samebits.tools import terminal
from samebits.tools.text import ToolError, plural
from samebits.tools.tune.measure import tune
from samebits.tools.tune.report import said, show


def main(
    *,
    shape: Sequence[str],
    models: Sequence[str],
    shapes: Path | None,
    rows: str,
    dtype: str | None,
    budget: float,
    out: Path | None,
    merge: Sequence[Path],
    device: int,
) -> int:
    """Measure on the CUDA device `device`, or merge. The arguments are the command's options.

    Returns:
        The exit code: 1 if some schedules gave other bits, and otherwise 0.

    Raises:
        ToolError: an argument is wrong, or nothing can be measured here.
    """
    console = terminal.Console()
    terminal.check_file("--out", out)
    if merge:
        if shape or models or shapes:
            raise ToolError("--merge: expected no shapes to measure beside it")
        if out is None:
            raise ToolError("--merge: expected --out FILE")
        table = merged(merge)
        _write(out, table)
        console.print(f"{out}: {_counted(table)}, {table.gpu}")
        return 0
    todo = wanted.asked(shape, models, shapes, rows, dtype)
    try:
        from samebits.tools.bench.measure import gpu

        gpu(device)
        from samebits.backends.cuda import devices

        name = devices.device_info(device).name
        if out is None:
            tuned.default_file(name)
        with terminal.progress() as say:
            found = tune(todo, device=device, budget=budget, progress=say)
    except UnavailableError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"no folder for tables: {error}: name a file with --out") from error
    console.print(show(found))
    if found.wrong:
        print(*(f"samebits tune: {what}" for what in found.wrong), sep="\n", file=sys.stderr)
    table = Table(name, found.entries)
    file = _write(out, table)
    console.print(f"{file}: {_counted(table)}", soft_wrap=True)
    return int(bool(found.wrong))


def merged(files: Sequence[Path]) -> Table:
    """The entries of all files; later ones replace earlier ones.

    Raises:
        ToolError: a file cannot be used, or they are for several GPUs.
    """
    found: Table | None = None
    for file in files:
        try:
            table = tuned.read(file)
        except TunedError as error:
            raise ToolError(f"--merge {file}: {error}") from error
        if table.stale:
            left = plural(table.stale, "entry", "entries")
            print(f"samebits tune: {file}: {left} of other versions of kernels left out", file=sys.stderr)
        if found is not None and table.gpu != found.gpu:
            raise ToolError(f"--merge {file}: expected a table for {found.gpu}, got one for {table.gpu}")
        found = table if found is None else found.changed(table.entries)
    assert found is not None
    return found


def _counted(table: Table) -> str:
    return f"{plural(len(table.entries), 'entry', 'entries')}: {said(table.entries.values())}"


def _write(file: Path | None, table: Table) -> Path:
    """Write a table to a file, or to where it is found by itself."""
    try:
        if file is None:
            return tuned.keep(table)
        tuned.write(file, table)
    except OSError as error:
        raise ToolError(f"{file or 'the table'}: {error.strerror or error}") from error
    return file
