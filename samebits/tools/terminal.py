"""Output of the tools: the terminal, progress bars and JSON files."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Never

import rich.console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from samebits.tools.text import ToolError

_SAY_EVERY = 20.0  # seconds


class Console(rich.console.Console):
    """The console that shows a report: stdout, or stderr if the JSON goes to stdout."""

    def __init__(self, json_to: str | None = None) -> None:
        super().__init__(stderr=json_to == "-", highlight=False)

    def on_broken_pipe(self) -> Never:
        """Raise the error for the command line to handle. rich would exit with 1."""
        raise BrokenPipeError


@contextmanager
def progress() -> Iterator[Callable[[float, str], None]]:
    """A progress bar on stderr, which disappears at the end. Without a terminal, a line now and then."""
    console = rich.console.Console(stderr=True)
    said = time.monotonic()

    def say(done: float, what: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            print(f"{done:.0%} {what}", file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield say
        return
    columns = (
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(done: float, what: str) -> None:
            bar.update(task, completed=done, description=escape(what))

        yield show


def check_file(option: str, path: str | Path | None) -> None:
    """Refuse a path that cannot be a file, before the work whose result will go there."""
    if path is None or path == "-":
        return
    file = Path(path).absolute()
    if file.is_dir() or not file.parent.is_dir():
        raise ToolError(f"{option} {path}: expected a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ToolError(f"{option} {path}: expected a file that can be written")


@contextmanager
def unless(failed: bool) -> Iterator[None]:
    """Report a report that cannot be written. If the run `failed`, its exit code stays."""
    try:
        yield
    except ToolError as error:
        if not failed:
            raise
        print(f"samebits: {error}", file=sys.stderr)


@contextmanager
def writing(option: str, where: str | Path) -> Iterator[None]:
    """Name the option whose file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ToolError(f"{option} {where}: {error.strerror or error}") from error


def write_json(text: str, where: str) -> None:
    """Write `text` to the file `where`; ``-`` is stdout."""
    if where == "-":
        print(text)
        return
    with writing("--json", where):
        Path(where).write_text(text + "\n", "utf-8")
