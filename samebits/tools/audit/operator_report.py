"""The report of a function's audit, as JSON, as a plot and for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samebits.tools import page
from samebits.tools.audit.report import plain
from samebits.tools.text import module_name, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Change:
    """How rows of a result changed with the batch.

    Attributes:
        rows: how many of the audited rows changed at least one bit in some batch.
        ulp: the largest difference in units in the last place; 0 if the result is not floating-point.
        of_row: the largest difference, relative to the largest magnitude in its row; infinite if NaN or
            infinity appeared or vanished.
        first: the first batch that changed a row; empty if none did.
    """

    rows: int = 0
    ulp: int = 0
    of_row: float = 0.0
    first: str = ""


@dataclass(frozen=True)
class OperatorAudit:
    """One call of an operator.

    Attributes:
        index: its place in the order of execution, from 0.
        phase: ``forward`` or ``backward``.
        module: the module that it runs in.
        operator: such as ``aten.addmm``.
        inputs: shapes of its tensor arguments in the whole batch.
        dtype: dtype of its first result that was compared.
        batches: batches in which it was compared.
        own: changes that the operator made itself, with arguments that had the bits of the whole batch.
        drift: changes that include those inherited from earlier operators.
        after: the operators whose results are arguments here and could not be compared. They may have made
            the change in ``own`` instead. Empty if there are none.
    """

    index: int
    phase: str
    module: str
    operator: str
    inputs: tuple[tuple[int, ...], ...]
    dtype: str
    batches: int
    own: Change
    drift: Change
    after: str = ""


@dataclass(frozen=True)
class NotCompared:
    """A call that could not be compared, or of which a result could not be compared.

    Attributes:
        index: its place in the order of execution, or that of the call before it.
        phase: ``forward`` or ``backward``.
        module: the module that it runs in.
        operator: a name such as ``aten.mm``.
        reason: why it could not be compared.
        first: the first batch in which it could not; empty if in all of them.
    """

    index: int
    phase: str
    module: str
    operator: str
    reason: str
    first: str


@dataclass(frozen=True)
class OperatorReport:
    """The audit of a function's operators.

    Attributes:
        model: the function's name.
        inputs: a description of the inputs.
        device: the device of the inputs.
        threads: CPU threads of PyTorch.
        torch_version: PyTorch's version.
        samebits_version: samebits' version.
        batch: rows in the whole batch.
        rows: the audited rows.
        batches: the batches that were compared with the whole one.
        seconds: time taken.
        notes: facts that a reader should know before trusting the numbers.
        operators: the operators in order of execution. The last ones, ``output``, are the function's results.
        not_compared: the calls that could not be compared, in order of execution.
    """

    model: str
    inputs: str
    device: str
    threads: int
    torch_version: str
    samebits_version: str
    batch: int
    rows: tuple[int, ...]
    batches: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...]
    operators: tuple[OperatorAudit, ...]
    not_compared: tuple[NotCompared, ...]

    @property
    def culprits(self) -> tuple[OperatorAudit, ...]:
        """The operators whose rows changed although their arguments did not, in order of execution."""
        return tuple(o for o in self.operators if o.own.rows)

    @property
    def first(self) -> OperatorAudit | None:
        """The first operator whose rows depend on the batch, or None."""
        return next(iter(self.culprits), None)

    @property
    def drifts(self) -> bool:
        """Whether any row of any operator changed."""
        return any(o.own.rows or o.drift.rows for o in self.operators)

    def to_json(self) -> str:
        """The report as standard JSON. An infinite number is the string "inf"."""
        return json.dumps({"schema": 1, **plain(dataclasses.asdict(self))}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> OperatorReport:
        """The report that :meth:`to_json` wrote."""
        data = json.loads(text)
        if data.pop("schema", None) != 1 or "operators" not in data:
            raise ValueError('OperatorReport.from_json: expected a report on operators with "schema": 1')

        def change(d: dict[str, Any]) -> Change:
            return Change(**{**d, "of_row": float(d["of_row"])})

        operators = (
            OperatorAudit(
                **{
                    **d,
                    "inputs": tuple(map(tuple, d["inputs"])),
                    "own": change(d["own"]),
                    "drift": change(d["drift"]),
                }
            )
            for d in data.pop("operators")
        )
        not_compared = tuple(NotCompared(**d) for d in data.pop("not_compared"))
        lists = {k: tuple(data[k]) for k in ("rows", "batches", "notes")}
        return cls(**{**data, **lists}, operators=tuple(operators), not_compared=not_compared)

    def __str__(self) -> str:
        return _verdict(self)

    def save_plot(self, path: str | Path) -> None:
        """Draw how the difference grows from operator to operator. Needs matplotlib (the ``bench`` extra)."""
        page.check(Path(path))
        page.save(self._drawn(), path)

    def save_html(self, path: str | Path) -> None:
        """Write a page with the plot and the operators, in one file, to send to somebody."""
        rows = (
            [
                *(str(o.index), _where(o.phase, o.module), _what(o), f"{o.own.rows} of {len(self.rows)}"),
                *(str(o.own.ulp), f"{o.own.of_row:.0e}", f"{o.drift.of_row:.0e}", o.own.first),
            ]
            for o in self.culprits
        )
        head = ["#", "module", "operator", "rows", "ulp", "of row", "by here", "first in"]
        tables = [page.Table("Operators whose rows depend on the batch by themselves", head, rows)]
        if self.not_compared:
            left = (
                [str(n.index), _where(n.phase, n.module), n.operator, n.reason] for n in self.not_compared
            )
            tables.append(page.Table("Not compared", ["#", "module", "operator", "why"], left))
        said = f"{self.inputs}; PyTorch {self.torch_version}, {self.device}. {' '.join(self.notes)}"
        page.write(Path(path), f"Audit of {self.model}", _verdict(self), self._drawn(), tables, said)

    def _drawn(self) -> Figure:
        figure = page.figure()
        axes = figure.subplots()
        shown = [o for o in self.operators if math.isfinite(o.drift.of_row)]
        for some, mark, colour, label in (
            (shown, ".", page.QUIET, "difference, in terms of its row"),
            (
                [o for o in shown if o.own.rows],
                "o",
                page.THEIRS,
                "operators that depend on the batch themselves",
            ),
        ):
            at, sizes = [o.index for o in some], [o.drift.of_row or math.nan for o in some]
            axes.plot(at, sizes, mark, color=colour, ms=4, label=label)
        if any(o.drift.of_row for o in shown):
            axes.set_yscale("log")
        axes.set_xlim(-0.5, max((o.index for o in self.operators), default=0) + 0.5)
        backward = [o.index for o in self.operators if o.phase == "backward"]
        if backward:
            axes.axvline(backward[0] - 0.5, color=page.QUIET, lw=0.8)
            axes.text(backward[0], 1.01, "backward", transform=axes.get_xaxis_transform(), fontsize=9)
        axes.set_xlabel("operators, in order of execution")
        axes.set_ylabel("largest difference")
        axes.set_title(f"{self.model}: {plural(self.batch, 'row')}", fontsize=11, loc="left")
        axes.legend(frameon=False)
        return figure


def show(report: OperatorReport, width: int) -> RenderableType:
    """Tables and the conclusion, for a terminal of `width` columns."""
    wide = width >= 100
    table = Table(box=None, padding=(0, 1 + wide, 0, 0), header_style="dim", title_justify="left")
    table.title = Text("Operators whose rows depend on the batch by themselves", style="bold not italic")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("module", overflow="fold")
    table.add_column("operator", overflow="fold")
    if wide:
        table.add_column("arguments", overflow="fold")
        table.add_column("first in")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("ulp", justify="right", no_wrap=True)
    table.add_column("of row", justify="right", no_wrap=True)
    table.add_column("by here", justify="right", no_wrap=True)
    for o in report.culprits:
        cells = [str(o.index), _where(o.phase, o.module), _what(o)]
        if wide:
            cells += [" ".join("x".join(map(str, s)) or "()" for s in o.inputs), o.own.first]
        cells += [f"{o.own.rows} of {len(report.rows)}", str(o.own.ulp), f"{o.own.of_row:.0e}"]
        table.add_row(*map(Text, [*cells, f"{o.drift.of_row:.0e}"]))
    parts: list[RenderableType] = [Text(), table, Text()] if report.culprits else [Text()]
    for reason in dict.fromkeys(n.reason for n in report.not_compared):
        calls = [n.operator for n in report.not_compared if n.reason == reason]
        what = f"{plural(len(calls), 'call')} of {', '.join(dict.fromkeys(calls))}"
        parts.append(Text(f"not compared: {what}: {reason}", style="yellow"))
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    parts.append(
        Text(
            f"{report.model}. {report.inputs}; rows {', '.join(map(str, report.rows))} of {report.batch}, in"
            f" {plural(len(report.batches), 'other batch', 'other batches')}. PyTorch {report.torch_version},"
            f" {report.device}, {plural(report.threads, 'CPU thread')}, {report.seconds:.0f} s.",
            style="dim",
        )
    )
    parts.append(Text("\n" + _verdict(report), style="bold " + ("yellow" if report.drifts else "green")))
    return Group(*parts)


def _verdict(report: OperatorReport) -> str:
    calls = plural(len(report.operators), "call")
    if report.first is None:
        says = f"no operator of {calls} depends on the batch"
        if report.drifts:
            says = f"no operator of {calls} changed with equal arguments, but results did change"
        return f"{report.model}: {says}; {len(report.not_compared)} not compared"
    first = report.first
    last = [o for o in report.operators if o.phase == "forward"][-1]
    return (
        f"{report.model}: {len(report.culprits)} of {calls} depend on the batch; first {_what(first)} in"
        f" {_where(first.phase, first.module)} (# {first.index}), by {first.own.ulp} ulp; the result of the"
        f" forward differs by {last.drift.of_row:.0e} of its row"
    )


def _where(phase: str, module: str) -> str:
    return ("backward of " if phase == "backward" else "") + module_name(module)


def _what(o: OperatorAudit) -> str:
    return f"{o.operator} (or {o.after}, before it)" if o.after else o.operator
