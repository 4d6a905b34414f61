"""``samebits tune``: measure, merge and write tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from samebits.backends import UnavailableError
from samebits.backends.cuda import tuned
from samebits.backends.cuda.shapes import Shape
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
    todo = asked(shape, models, shapes, rows, dtype)
    try:
        from samebits.tools.bench.measure import gpu

        gpu(device)
        from samebits.backends.cuda import devices

        name = devices.device_info(device).name
        file = out or tuned.default_file(name)
        with _untuned(), terminal.progress() as say:
            found = tune(todo, device=device, budget=budget, progress=say)
    except UnavailableError as error:
        raise ToolError(str(error)) from error
    except OSError as error:
        raise ToolError(f"no folder for tables: {error}: name a file with --out") from error
    console.print(show(found))
    if found.wrong:
        print(*(f"samebits tune: {what}" for what in found.wrong), sep="\n", file=sys.stderr)
    table = Table(name, found.entries)
    if out is None and file.is_file():
        table = _kept(file, table)
    _write(file, table)
    console.print(f"{file}: {_counted(table)}", soft_wrap=True)
    return int(bool(found.wrong))


def asked(
    shape: Sequence[str], models: Sequence[str], shapes: Path | None, rows: str, dtype: str | None
) -> list[Shape]:
    """The shapes of the options.

    Raises:
        ToolError: there are none, or an option is wrong.
    """
    sizes = wanted.numbers("--rows", rows)
    given: torch.dtype = getattr(torch, dtype or "bfloat16")
    found: list[Shape] = []
    if shape:
        found += wanted.of_weights([wanted.weight(text) for text in shape], sizes, given)
    for model in models:
        weights, own = wanted.of_model(model)
        found += wanted.of_weights(weights, sizes, given if dtype else own)
    if shapes is not None:
        found += wanted.read_shapes(shapes)
    if not found:
        raise ToolError("expected --shape KxN, --model NAME_OR_CONFIG or --shapes FILE")
    return list(dict.fromkeys(found))


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


def _kept(file: Path, table: Table) -> Table:
    """`table` with what its file already has."""
    try:
        before = tuned.read(file)
    except TunedError as error:
        print(f"samebits tune: {file} is replaced: {error}", file=sys.stderr)
        return table
    return before.changed(table.entries) if before.gpu == table.gpu else table


def _counted(table: Table) -> str:
    return f"{plural(len(table.entries), 'entry', 'entries')}: {said(table.entries.values())}"


def _write(file: Path, table: Table) -> None:
    try:
        tuned.write(file, table)
    except OSError as error:
        raise ToolError(f"{file}: {error.strerror or error}") from error


@contextmanager
def _untuned() -> Iterator[None]:
    """No table in use: it is the cost model that is measured against."""
    before = tuned.in_use()
    tuned.load_tuned("")
    try:
        yield
    finally:
        tuned.load_tuned(before)
