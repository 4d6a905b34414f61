"""Tables of schedules that were measured, by shape. They take the place of the cost model's choice.

``samebits tune`` writes a table for one GPU model: a JSON file. A table can only select a schedule that the
cost model could have chosen for the call at hand, and ``samebits verify`` proves those. So a file, whatever
is in it, never changes a bit. What is wrong with a file gives one warning, and then the file, or a part of
it, does not count.

A table is asked where a plan is made, and nowhere else. See :func:`find`.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from samebits.backends import cache
from samebits.backends.cuda import compiler, devices
from samebits.backends.cuda.plans import forget_plans
from samebits.backends.cuda.shapes import Shape, as_data, from_data
from samebits.remedies import see

__all__ = [
    "Entry",
    "Table",
    "TunedError",
    "add",
    "default_file",
    "find",
    "in_use",
    "keep",
    "known",
    "load_tuned",
    "read",
    "schedule_data",
    "version",
    "write",
]

_FORMAT = 1
SHIPPED = Path(__file__).parents[2] / "data" / "tuned"
"""Tables that come along. They give no warning if kernels have changed since: a user could do nothing."""

_WIDEST = 2
"""A schedule holds between two measured sizes of which the larger is at most so many times the smaller."""


class TunedError(ValueError):
    """A file is no table that can be used. The message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for a shape.

    Attributes:
        kernel: the name of the kernel.
        schedule: :func:`schedule_data` of the fastest; None if the cost model's choice is as fast.
        us, model_us: microseconds of the fastest, and of the cost model's choice.
    """

    kernel: str
    schedule: dict[str, Any] | None
    us: float
    model_us: float


@dataclass(slots=True)
class Table:
    """The entries of one GPU model.

    Attributes:
        gpu: its name.
        entries: by shape.
        stale: how many entries of the file are of other versions of their kernels. They are left out.
        source: the file.
    """

    gpu: str
    entries: dict[Shape, Entry] = field(default_factory=dict)
    stale: int = 0
    source: str = ""
    _lines: dict[Shape, list[int]] | None = field(default=None, init=False, repr=False)

    def find(self, shape: Shape) -> tuple[Entry, bool] | None:
        """The entry for a shape, and whether it is the shape's own.

        If the shape was not measured, but the next smaller and the next larger one that differ from it only
        in :attr:`~samebits.backends.cuda.shapes.ProductShape.along` were, are close, and have the same
        schedule, that is the entry.
        """
        own = self.entries.get(shape)
        if own is not None:
            return own, True
        along = getattr(shape, "along", None)
        if along is None:
            return None
        if self._lines is None:
            self._lines = _lines(self.entries)
        sizes, size = self._lines.get(_at(shape, along, 0), ()), getattr(shape, along)
        at = bisect.bisect(sizes, size)
        if not 0 < at < len(sizes) or sizes[at] > _WIDEST * sizes[at - 1]:
            return None
        low, high = (self.entries[_at(shape, along, sizes[i])] for i in (at - 1, at))
        same = low.schedule is not None and (low.kernel, low.schedule) == (high.kernel, high.schedule)
        return (low, False) if same else None

    def changed(self, entries: dict[Shape, Entry]) -> Table:
        """This table with these entries, which replace older ones."""
        return Table(self.gpu, self.entries | entries, source=self.source)


def _at(shape: Shape, along: str, size: int) -> Shape:
    """The shape with another size there."""
    change: dict[str, Any] = {along: size}
    return replace(shape, **change)


def _lines(entries: Iterable[Shape]) -> dict[Shape, list[int]]:
    """The measured sizes by everything else of a shape."""
    found: dict[Shape, list[int]] = {}
    for shape in entries:
        along = getattr(shape, "along", None)
        if along is not None:
            found.setdefault(_at(shape, along, 0), []).append(getattr(shape, along))
    return {key: sorted(sizes) for key, sizes in found.items()}


_MEASURED = ("alone", "busy", "by_k", "by_rows", "us")


def schedule_data(s: Any) -> dict[str, Any]:
    """A schedule for JSON: its fields, without times that were measured. No two of a kernel have the same."""
    found: dict[str, Any] = {"kind": type(s).__name__}
    for f in fields(s):
        if f.name not in _MEASURED:
            found[f.name] = _value(getattr(s, f.name))
    return found


def _value(x: Any) -> Any:
    if isinstance(x, tuple):
        return list(x)
    return schedule_data(x) if is_dataclass(x) else x


@functools.cache
def version(kernel: str) -> str:
    """A hash of a kernel's sources; empty if there is no such kernel."""
    found: Any = importlib.import_module("samebits.backends.cuda.every").KERNELS.get(kernel)
    return "" if found is None else compiler.source_hash(*found)[:16]


def write(path: Path, table: Table) -> None:
    """Write a table's file. It appears whole.

    Raises:
        OSError: it cannot be written.
    """
    kernels = {e.kernel: version(e.kernel) for e in table.entries.values()}
    head = {"format": _FORMAT, "gpu": table.gpu, "kernels": dict(sorted(kernels.items()))}
    lines = [json.dumps({"shape": as_data(shape)} | asdict(entry)) for shape, entry in table.entries.items()]
    text = json.dumps(head)[:-1] + ', "entries": [\n' + ",\n".join(sorted(lines)) + "\n]}\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: Path) -> Table:
    """A table from its file. Entries of other versions of their kernels are left out, and counted.

    Raises:
        TunedError: the file is missing or damaged, or of another format.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TunedError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TunedError(f"it is damaged: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise TunedError(f"it is no table of format {_FORMAT}")
    gpu, kernels, entries = (data.get(name) for name in ("gpu", "kernels", "entries"))
    if not isinstance(gpu, str) or not isinstance(kernels, dict) or not isinstance(entries, list):
        raise TunedError("it is damaged: expected gpu, kernels and entries")
    table = Table(gpu, source=str(path))
    for given in entries:
        shape, entry = _entry(given)
        if version(entry.kernel) and kernels.get(entry.kernel) == version(entry.kernel):
            table.entries[shape] = entry
        else:
            table.stale += 1
    return table


def _entry(data: Any) -> tuple[Shape, Entry]:
    try:
        kernel, schedule, us = (data[name] for name in ("kernel", "schedule", "us"))
        shape, model_us = from_data(data["shape"]), data["model_us"]
    except (KeyError, TypeError, ValueError) as error:
        raise TunedError(f"it is damaged: an entry: {error}") from error
    times = all(type(t) in (int, float) and 0 < t < 1e12 for t in (us, model_us))
    if not isinstance(kernel, str) or not isinstance(schedule, dict | None) or not times:
        raise TunedError(f"it is damaged: the entry of {shape}")
    return shape, Entry(kernel, schedule, us, model_us)


# ---- The tables in use ----


def slug(gpu: str) -> str:
    """A GPU's name, in the form for names of files."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def default_file(gpu: str) -> Path:
    """Where ``samebits tune`` keeps the table of a GPU: beside the compiled kernels.

    Raises:
        OSError: there is no folder for it, or others can write to it.
    """
    return cache.folder() / "tuned" / f"{slug(gpu)}.json"


class _InUse:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.given: Path | str | None = None  # "": no table; None: what the environment says
        self.tables: dict[str, Table] = {}
        self.warned: set[tuple[str, str]] = set()


_in_use = _InUse()


def load_tuned(path: str | os.PathLike[str] | None) -> int:
    """Choose schedules by this table, made by ``samebits tune``, and by no other.

    Without this call, ``SAMEBITS_TUNED`` names the table; empty, there is none. If it is not set, the tables
    are the one that comes with samebits, if there is one for this GPU, and the one that ``samebits tune``
    keeps beside the compiled kernels.

    A table never changes a bit. Plans of earlier calls are dropped, and the next call of each kind may
    compile and load another kernel: load the table before :func:`samebits.prepare`, and before you capture a
    graph.

    Args:
        path: the file. Empty: no table. None: as without this call.

    Returns:
        How many entries can be used. What is missing, damaged or stale gives a warning, and does not count. A
        table for another GPU gives a warning when it is first needed.
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"samebits.load_tuned: path: expected a path or None, got {type(path).__name__}")
    with _in_use.lock:
        _in_use.given = path if path is None or path == "" else _expanded(path)
        _in_use.tables.clear()
        _in_use.warned.clear()
        count = len(_checked(_in_use.given).entries) if isinstance(_in_use.given, Path) else 0
    forget_plans()
    return count


def keep(table: Table) -> Path:
    """Write a table to where it is found by itself, over the entries that are there.

    Raises:
        OSError: it cannot be written.
    """
    path = default_file(table.gpu)
    with suppress(TunedError):
        before = read(path)
        if before.gpu == table.gpu:
            table = before.changed(table.entries)
    write(path, table)
    return path


def add(table: Table, device: int) -> None:
    """Choose by these entries, too, until :func:`load_tuned` is called."""
    with _in_use.lock:
        _in_use.tables[table.gpu] = _table(device).changed(table.entries)
    forget_plans()


def known(shape: Shape, device: int) -> bool:
    """Whether the shape was measured."""
    return shape in _table(device).entries


def entries(device: int) -> int:
    """How many shapes the tables in use know for a GPU."""
    return len(_table(device).entries)


def in_use() -> Path | str | None:
    """What :func:`load_tuned` was given last."""
    return _in_use.given


def _warn(source: str, why: str) -> None:
    if (source, why) not in _in_use.warned:
        _in_use.warned.add((source, why))
        warnings.warn(f"samebits: the tuned table {source} is ignored: {why}", RuntimeWarning, stacklevel=3)


def _checked(path: Path) -> Table:
    """The table of a file; an empty one, and a warning, if it cannot be used."""
    try:
        table = read(path)
    except TunedError as error:
        _warn(str(path), str(error))
        return Table("")
    if table.stale and path.parent != SHIPPED:
        _warn(
            f"{path}" + (f" ({table.stale} of its entries)" if table.entries else ""),
            "it is of other versions of the kernels: run samebits tune again"
            + see("caches-tables-and-archives"),
        )
    return table


def _expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` expanded, or as it is if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _sources(gpu: str) -> Iterator[Path]:
    """The files for a GPU; later ones count more."""
    given = _in_use.given
    if given is None and "SAMEBITS_TUNED" in os.environ:
        given = os.environ["SAMEBITS_TUNED"]
    if given is not None:
        if given != "":
            yield _expanded(given)
        return
    found = [SHIPPED / f"{slug(gpu)}.json"]
    with suppress(OSError):
        found.append(default_file(gpu))
    yield from (path for path in found if path.is_file())


def _table(device: int) -> Table:
    """The entries for a GPU, from all files."""
    gpu = devices.device_info(device).name
    table = _in_use.tables.get(gpu)
    if table is None:
        with _in_use.lock:
            table = Table(gpu)
            for path in _sources(gpu):
                one = _checked(path)
                if one.gpu and one.gpu != gpu:
                    _warn(str(path), f"it is for {one.gpu}, and this is {gpu}")
                elif one.entries:
                    table = replace(table, entries=table.entries | one.entries, source=one.source)
            _in_use.tables[gpu] = table
    return table


def find(
    shape: Shape | None, device: int, ways: Callable[[str], Sequence[tuple[Any, Any]]]
) -> tuple[Any, Any] | None:
    """The way to compute a call of this shape that was measured to be the fastest; None if there is none.

    Args:
        shape: of the call.
        device: index of the GPU.
        ways: the kernels of a name, each with a schedule, that the cost model chooses among for this call.
            An entry of the table that names none of them is ignored.
    """
    table = _table(device)
    if not table.entries or shape is None:
        return None
    found = table.find(shape)
    if found is None or found[0].schedule is None:
        return None
    entry, own = found
    for kernel, schedule in ways(entry.kernel):
        if schedule_data(schedule) == entry.schedule:
            return kernel, schedule
    if own:
        _warn(
            f"{table.source} (the entry for {shape})",
            f"{entry.kernel} has no such schedule for it",
        )
    return None
