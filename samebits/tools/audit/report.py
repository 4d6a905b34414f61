"""The report of a model's audit, as JSON and for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samebits.tools import page
from samebits.tools.audit.drift import Difference, Drift, VariationCount
from samebits.tools.text import module_name, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Layer:
    """The audit of one linear layer.

    Attributes:
        name: the module's name in the model.
        operator: the operator that PyTorch runs for it.
        in_features: length of the sums.
        out_features: columns of the output.
        dtype: dtype of weights and activations.
        contract: the contract samebits ran under.
        digest: the contract's digest.
        torch: drift of PyTorch's operator.
        samebits: drift of samebits' operator.
    """

    name: str
    operator: str
    in_features: int
    out_features: int
    dtype: str
    contract: str
    digest: str
    torch: Drift
    samebits: Drift


@dataclass(frozen=True)
class Skipped:
    """A linear layer that was not audited, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The audit of one model.

    Attributes:
        model: the model's name.
        inputs: a description of the inputs.
        device: the model's device. Several are separated by commas.
        threads: CPU threads of PyTorch, and of samebits.
        machine: the CPU's architecture.
        torch_version: PyTorch's version.
        samebits_version: samebits' version.
        max_rows: the most rows that are audited of a layer, evenly spaced over all that reached it.
        seconds: time taken, without loading of the model.
        notes: facts that a reader should know before trusting the numbers.
        layers: results, in the model's order.
        skipped: linear layers left out.
    """

    model: str
    inputs: str
    device: str
    threads: int
    machine: str
    torch_version: str
    samebits_version: str
    max_rows: int
    seconds: float
    notes: tuple[str, ...]
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]

    @property
    def samebits_drifts(self) -> bool:
        """Whether any bit of samebits changed. This must never happen."""
        return any(layer.samebits.changed for layer in self.layers)

    def save_plot(self, path: str | Path) -> None:
        """Draw how many rows of each layer changed. Needs matplotlib (the ``bench`` extra)."""
        page.check(Path(path))
        page.save(self._drawn(), path)

    def save_html(self, path: str | Path) -> None:
        """Write a page with the plot and the layers, in one file, to send to somebody."""
        rows = (
            [x.name or "(the module itself)", x.operator, f"{x.in_features} x {x.out_features}", x.dtype]
            + [f"{d.changed} of {d.rows}" for d in (x.torch, x.samebits)]
            + [f"{x.torch.of_row:.1g}"]
            for x in self.layers
        )
        head = [
            "layer",
            "operator",
            "K x N",
            "dtype",
            "changed: PyTorch",
            "samebits",
            "PyTorch: by up to, of row",
        ]
        tables = [page.Table("Rows that changed with the batch", head, rows)]
        if self.skipped:
            left = ([s.name, s.reason] for s in self.skipped)
            tables.append(page.Table("Not audited", ["layer", "why"], left))
        theirs, ours = (sum(bool(d.changed) for d in side) for side in self._sides())
        of = plural(len(self.layers), "layer")
        verdict = f"Of {of}, {theirs} change bits with the batch in PyTorch, {ours} in samebits."
        said = f"{self.inputs}; PyTorch {self.torch_version}, {self.device}. {' '.join(self.notes)}"
        page.write(Path(path), f"Audit of {self.model}", verdict, self._drawn(), tables, said)

    def _sides(self) -> tuple[list[Drift], list[Drift]]:
        return [x.torch for x in self.layers], [x.samebits for x in self.layers]

    def _drawn(self) -> Figure:
        figure = page.figure(1.4 + 0.2 * len(self.layers))
        axes = figure.subplots()
        names = [module_name(x.name) for x in self.layers]
        for side, name, colour, shift in zip(
            self._sides(), ("PyTorch", "samebits"), (page.THEIRS, page.OURS), (-0.2, 0.2), strict=True
        ):
            at = [i + shift for i in range(len(names))]
            axes.barh(at, [100 * d.changed / max(d.rows, 1) for d in side], 0.4, color=colour, label=name)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.set_xlabel("rows with other bits in some batch, %")
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)  # beside no bar
        return figure

    def to_json(self) -> str:
        """The report as standard JSON: numbers that JSON lacks are the strings "nan", "inf" and "-inf"."""
        return json.dumps({"schema": 1, **plain(dataclasses.asdict(self))}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote."""
        data = json.loads(text)
        if data.pop("schema", None) != 1:
            raise ValueError('Report.from_json: expected a report of samebits audit with "schema": 1')

        def drift(d: dict[str, Any]) -> Drift:
            counts = tuple(VariationCount(**v) for v in d.pop("variations"))
            first = d.pop("first")
            if first is not None:
                first |= {k: float(first[k]) for k in ("expected", "got")}
                first = Difference(**first)
            numbers = {k: float(d[k]) for k in ("relative", "of_row")}
            return Drift(**{**d, **numbers}, first=first, variations=counts)

        layers = (
            Layer(**{**d, "torch": drift(d["torch"]), "samebits": drift(d["samebits"])})
            for d in data.pop("layers")
        )
        skipped = tuple(Skipped(**d) for d in data.pop("skipped"))
        return cls(**{**data, "notes": tuple(data["notes"])}, layers=tuple(layers), skipped=skipped)


def plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def show(report: Report, width: int) -> RenderableType:
    """Tables, and which layers changed, for a terminal of `width` columns."""
    layers = report.layers
    parts: list[RenderableType] = [_layer_table(layers, width), _variation_table(layers, width)]
    for who, drifts in (("PyTorch", [x.torch for x in layers]), ("samebits", [x.samebits for x in layers])):
        i = max(range(len(drifts)), key=lambda i: drifts[i].of_row)
        first = drifts[i].first
        if first is not None:
            parts += _first_difference(who, layers[i], first, width)
    for skipped in report.skipped:
        what = f"{escape(module_name(skipped.name))}: {escape(skipped.reason)}"
        parts.append(Text.from_markup(f"[yellow]not audited:[/] {what}"))
    parts += [Text.from_markup(f"[yellow]note:[/] {escape(note)}") for note in report.notes]
    dtypes = " and ".join(sorted({f"{layer.dtype} under {layer.contract.split('[')[0]}" for layer in layers}))
    parts.append(
        Text(
            f"{report.model}, {dtypes}. {report.inputs}; at most {report.max_rows} rows of a"
            f" layer audited, evenly spaced (--max-rows). PyTorch {report.torch_version}, {report.device},"
            f" {plural(report.threads, 'CPU thread')}, {report.seconds:.0f} s.\n",
            style="dim",
        )
    )
    parts.append(_verdict("PyTorch", "yellow", [layer.torch for layer in layers]))
    parts.append(_verdict("samebits", "red", [layer.samebits for layer in layers]))
    return Group(*parts)


def _first_difference(who: str, layer: Layer, first: Difference, width: int) -> list[RenderableType]:
    table = Table(box=None, padding=(0, 1 if width < 60 else 2), show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("in the batch of all rows", f"{first.expected:.9g}", first.expected_bits)
    table.add_row(f"in {first.variation}", f"{first.got:.9g}", first.got_bits)
    title = Text.from_markup(
        f"{who} changes [bold]{escape(module_name(layer.name))}[/] most, in terms of its rows."
        f" First at row {first.row}, column {first.column}:"
    )
    return [title, table, Text()]


def _verdict(who: str, alarm: str, drifts: list[Drift]) -> Text:
    layers, rows = sum(d.changed > 0 for d in drifts), sum(d.rows for d in drifts)
    changed = sum(d.changed for d in drifts)
    text = Text(f"{who:9} ", style="bold")
    text.append(
        f"{layers:>{len(str(len(drifts)))}} of {plural(len(drifts), 'layer')}"
        f" change{'s' if len(drifts) == 1 else ''} bits with the batch:"
        f" {changed:>{len(f'{rows:,}')},} of {plural(rows, 'row')}",
        style=f"{alarm if changed else 'green'} bold",
    )
    return text


def _layer_table(layers: tuple[Layer, ...], width: int) -> Padding:
    # Numbers are never clipped. Columns are dropped to make room for them, those like "3 of 96" last.
    counts = 2 * max(len("samebits"), *(len(_fraction(x.torch.rows, x.torch.rows, "")) for x in layers))
    wide, narrow = width >= 94 + counts, width < 44 + counts
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), header_style="dim", title_justify="left")
    table.title = Text("Rows of each layer whose bits changed in some batch", style="bold not italic")
    table.add_column("layer", overflow="fold")
    if wide:
        table.add_column("K → N", no_wrap=True, justify="right")
    table.add_column("samebits", no_wrap=True, justify="right")
    table.add_column("PyTorch", no_wrap=True, justify="right")
    if not narrow:
        table.add_column("ulp", no_wrap=True, justify="right")
        table.add_column("relative", no_wrap=True, justify="right")
    if wide:
        table.add_column("of row", no_wrap=True, justify="right")
    if not narrow:
        table.add_column("first place" if wide else "first (row, col)", no_wrap=True)
    block = ""
    for layer in layers:
        above, name = _split(layer.name)
        if above and above != block:
            table.add_row(Text(above, style="dim"))
        block = above
        drift, first = layer.torch, layer.torch.first
        cells = [Text(f"  {name}" if above else name)]
        if wide:
            cells.append(Text(f"{layer.in_features} → {layer.out_features}"))
        cells += [
            _fraction(d.changed, d.rows, c) for d, c in ((layer.samebits, "red bold"), (drift, "yellow"))
        ]
        if not narrow:
            cells += [Text(_short(drift.ulp)), Text(_magnitude(drift.relative))]
        if wide:
            cells.append(Text(_magnitude(drift.of_row)))
        if first is not None and wide:
            cells.append(Text(f"{first.variation}: row {first.row}, column {first.column}"))
        elif first is not None and not narrow:
            cells.append(Text(f"{first.row}, {first.column}"))
        table.add_row(*cells)
    return Padding(table, (1, 0))


def _split(name: str) -> tuple[str, str]:
    """The name of the block that a layer is in, which ends with a number, and the layer's name in it."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if part.isdecimal()]
    cut = numbers[-1] + 1 if numbers else 0
    return ".".join(parts[:cut]), ".".join(parts[cut:]) or module_name(name)


def _magnitude(number: float) -> str:
    return f"{number:.0e}" if number else "0"


def _variation_table(layers: tuple[Layer, ...], width: int) -> Padding:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    table.title = Text("The same over all layers, by what was done to the batch", style="bold not italic")
    with_kind = width >= 60
    for _ in range(1 + with_kind):
        table.add_column("")
    for name in ("samebits", "PyTorch"):
        table.add_column(name, no_wrap=True, justify="right")
    totals: dict[tuple[str, str], list[int]] = {}
    for layer in layers:
        for theirs, ours in zip(layer.torch.variations, layer.samebits.variations, strict=True):
            total = totals.setdefault((theirs.kind, theirs.name), [0, 0, 0])
            for i, add in enumerate((theirs.changed, ours.changed, theirs.rows)):
                total[i] += add
    shown = ""
    for (kind, name), (theirs_changed, ours_changed, rows) in totals.items():
        table.add_row(
            *(["" if kind == shown else Text(kind, style="dim")] if with_kind else []),
            name,
            _fraction(ours_changed, rows, "red bold"),
            _fraction(theirs_changed, rows, "yellow"),
        )
        shown = kind
    return Padding(table, (0, 0, 1, 0))


def _fraction(changed: int, rows: int, alarm: str) -> Text:
    return Text(f"{changed:,} of {rows:,}", style=alarm if changed else "green")


def _short(number: int) -> str:
    """The number in at most 6 characters."""
    return str(number) if number < 100_000 else f"{number:.0e}".replace("e+0", "e").replace("e+", "e")
