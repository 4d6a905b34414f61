"""The command line: ``samebits audit``, ``bench``, ``info`` and ``verify``."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Never

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from samebits._version import __version__
from samebits.auditing.words import AuditError, module_name, plural

if TYPE_CHECKING:
    import torch

    from samebits.auditing import Drift, Layer, OperatorReport, Report
    from samebits.info import Info

_SAY_EVERY = 20.0  # seconds
_SOFTWARE, _CLOSED_PIPE = 70, 128 + 13  # as in sysexits.h, and as the shell reports SIGPIPE

app = typer.Typer(
    help="Batch-invariant operators for PyTorch, from matrix products to attention, with specified bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)


class Dtype(StrEnum):
    loaded = "loaded"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Backend(StrEnum):
    cuda = "cuda"
    triton = "triton"


def _version(asked: bool) -> None:
    if asked:
        print(f"samebits {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Batch-invariant operators for PyTorch, from matrix products to attention, with specified bits."""


@app.command()
def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, or the name of a model in its cache (nothing is downloaded);"
            " package.module:function, which returns (module, inputs); or demo: MiniLM, from the demo extra.",
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to run the model on, instead of the one that comes along.")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            "--dtype",  # typer 0.27 would derive --DTYPE from the metavar
            metavar="DTYPE",
            help="Cast the model: float32, bfloat16, float16, or loaded to leave it.",
        ),
    ] = Dtype.loaded,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Audit this many rows of each layer (96), or with --operators of the batch (4).",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Use this much of the text.")] = 4096,
    only: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Audit only the layers whose name matches.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full report there; - is stdout.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Move the model there: cpu, cuda or cuda:1; by default it runs where it is."),
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Audit every operator of the model in batches of sequences.")
    ] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="With --operators: those of the backward, too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --operators: draw how the difference grows (SVG, PNG, PDF)."),
    ] = None,
) -> None:
    """Which of a model's linear layers change their bits with the batch: PyTorch's, and samebits'.

    Runs the model on real text, catches what reaches each linear layer, and runs the layer again on those
    rows in other batch sizes, positions, paddings, neighbours and chunks. With --operators, runs the whole
    model in several batches, and compares every operator. Exit code: 0, samebits (or all operators) kept
    every bit; 1, not so; 2, the audit could not run on what it was given; 70, samebits itself failed.
    """
    out = _Console(stderr=json_to == "-", highlight=False)
    with _errors("audit"):
        from samebits.auditing import audit as audit_operators
        from samebits.auditing import audit_linears
        from samebits.auditing.operator_report import OperatorReport, figure_for
        from samebits.auditing.operator_report import show as show_operators

        for option, given in (("--backward", backward), ("--plot", plot is not None)):
            if given and not operators:
                raise AuditError(f"{option}: expected --operators beside it")
        if only is not None and operators:
            raise AuditError("--only: chooses linear layers; leave it out with --operators")
        place = None if device is None else _device(device)
        if only is not None:
            try:
                re.compile(only)
            except re.error as error:
                raise AuditError(f"--only {only}: not a regular expression: {error}") from error
        _check_file("--json", json_to)
        _check_file("--plot", plot)
        if plot is not None:
            figure_for(plot)  # to fail before the run, not after
        # What the user's code prints is no part of the JSON.
        with _progress() as show, redirect_stdout(sys.stderr) if json_to == "-" else nullcontext():
            show(0, f"loading {model}")
            import torch

            from samebits._models import load

            cast = None if dtype is Dtype.loaded else getattr(torch, dtype.value)
            subject = load(model, text, cast, max_tokens, place)
            said: dict[str, Any] = {"name": subject.name, "source": subject.source, "notes": subject.notes}
            report: Report | OperatorReport
            if operators:
                (inputs,) = subject.batched().inputs
                module = subject.module.eval()
                report = audit_operators(
                    module, inputs, backward=backward, max_rows=max_rows or 4, progress=show, **said
                )
            else:
                report = audit_linears(
                    subject.module, subject.inputs, max_rows=max_rows or 96, only=only, progress=show, **said
                )
        if json_to is not None:
            _write(report.to_json(), json_to)
        if isinstance(report, OperatorReport):
            if plot is not None:
                report.save_plot(plot)
            out.print(show_operators(report, out.width))
            changed = report.drifts
        else:
            _show_report(report, out)
            changed = report.samebits_drifts
    raise typer.Exit(1 if changed else 0)


def _device(name: str) -> torch.device:
    import torch

    from samebits.auditing.target import cuda_problem

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise AuditError(f"--device {name}: expected cpu, cuda, or one CUDA device such as cuda:1")
    if device.type == "cuda" and (problem := cuda_problem(device)) is not None:
        raise AuditError(f"--device {name}: {problem}")
    return device


@app.command()
def info(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """What this machine has, which backends work, and for each that does not: why, and what to do."""
    with _errors("info"):
        from samebits.info import gather

        found = gather()
        if json_:
            print(json.dumps(dataclasses.asdict(found), indent=2))
        else:
            _show_info(found, _Console(highlight=False))


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes: under a minute.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure batch_invariant_ops and sgemm-bi too, if installed.")
    ] = False,
    backend: Annotated[
        Backend | None, typer.Option("--backend", help="Measure this one, not the automatic choice.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all times there; - is stdout.")
    ] = None,
    device: Annotated[int, typer.Option(min=0, help="Index of the CUDA device.")] = 0,
) -> None:
    """Speed on this GPU beside PyTorch (cuBLAS): forward and gradients, from one row to 16,384.

    Exit code: 0, measured; 1, some products had other bits than specified, and have no time; 2, it cannot run
    here; 70, samebits itself failed.
    """
    out = _Console(stderr=json_to == "-", highlight=False)
    with _errors("bench"):
        _check_file("--json", json_to)
        from samebits import bench as benchmark
        from samebits.backends import UnavailableError

        try:
            with _progress() as show:
                cases = benchmark.quick() if quick else benchmark.CASES
                data = benchmark.bench(cases, device=device, peers=peers, backend=backend, progress=show)
        except UnavailableError as error:
            raise AuditError(str(error)) from error
        out.print(benchmark.show(data))
        if data["red"]:
            print(*(f"samebits bench: {case}" for case in data["red"]), sep="\n", file=sys.stderr)
        if json_to is not None:
            with _unless(bool(data["red"])):
                _write(json.dumps(data), json_to)
        if data["red"]:
            raise typer.Exit(1)


@app.command()
def verify(
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="More combinations and large products, and Triton's kernels if installed."
        ),
    ] = False,
    backend: Annotated[
        Backend | None, typer.Option("--backend", help="Whose kernels; by default cuda's.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full report there; - is stdout.")
    ] = None,
    device: Annotated[int, typer.Option(min=0, help="Index of the CUDA device.")] = 0,
) -> None:
    """Prove the kernels on this GPU: every kernel and schedule against the CPU reference, bit for bit.

    Exit code: 0, every value has the bits specified; 1, some have not, or a kernel failed; 2, no GPU was
    verified (the CPU reference's known answers were).
    """
    out = _Console(stderr=json_to == "-", highlight=False)
    with _errors("verify"):
        _check_file("--json", json_to)
        from samebits import verify as verification

        with _progress() as show:
            report = verification.verify(thorough=thorough, backend=backend, device=device, progress=show)
        try:
            out.print(verification.show(report))
            if json_to is not None:
                with _unless(report.exit_code == 1):
                    _write(report.to_json(), json_to)
        finally:
            if report.hung:  # the driver would wait for the kernel at a usual exit
                sys.stdout.flush()
                os._exit(report.exit_code)
    raise typer.Exit(report.exit_code)


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Exit codes for all that goes wrong, so that 1 keeps its one meaning.

    Errors of the user's are one line of stderr and 2; errors of samebits' own a traceback and 70. A reader
    who closes the pipe, as `head` does, ends the command without a word.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where its encoding lacks an arrow
    try:
        yield
        sys.stdout.flush()  # at the interpreter's own exit, it would be too late
    except (typer.Exit, typer.Abort):
        raise
    except AuditError as error:
        print(f"samebits {command}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except BrokenPipeError:
        with suppress(OSError):  # what is still in the buffer has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from None
    except (Exception, SystemExit):
        traceback.print_exc()
        raise typer.Exit(_SOFTWARE) from None


class _Console(Console):
    def on_broken_pipe(self) -> Never:
        """Leave it to :func:`_errors`; rich would exit with 1."""
        raise BrokenPipeError


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr, gone when done; where that is no terminal, a line now and then."""
    console = Console(stderr=True)
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


def _check_file(option: str, path: str | Path | None) -> None:
    """Before the work whose result is to go there."""
    if path is None or path == "-":
        return
    file = Path(path).absolute()
    if file.is_dir() or not file.parent.is_dir():
        raise AuditError(f"{option} {path}: expected a file in a folder that exists")


@contextmanager
def _unless(failed: bool) -> Iterator[None]:
    """What cannot be written is said, and takes the place of no verdict that is worse."""
    try:
        yield
    except AuditError as error:
        if not failed:
            raise
        print(f"samebits: {error}", file=sys.stderr)


def _write(text: str, where: str) -> None:
    if where == "-":
        print(text)
        return
    try:
        Path(where).write_text(text + "\n", "utf-8")
    except OSError as error:
        raise AuditError(f"--json {where}: {error.strerror or error}") from error


def _show_report(report: Report, out: Console) -> None:
    layers = report.layers
    out.print(_layer_table(layers, out.width))
    out.print(_variation_table(layers, out.width))
    for who, drifts in (("PyTorch", [x.torch for x in layers]), ("samebits", [x.samebits for x in layers])):
        i = max(range(len(drifts)), key=lambda i: drifts[i].of_row)
        if drifts[i].first is not None:
            _show_first(who, layers[i], drifts[i], out)
    for skipped in report.skipped:
        out.print(f"[yellow]not audited:[/] {escape(module_name(skipped.name))}: {escape(skipped.reason)}")
    for note in report.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    dtypes = " and ".join(sorted({f"{layer.dtype} under {layer.contract.split('[')[0]}" for layer in layers}))
    out.print(
        f"{escape(report.model)}, {dtypes}. {escape(report.inputs)}; at most {report.max_rows} rows of a"
        f" layer audited, evenly spaced (--max-rows). PyTorch {report.torch_version}, {report.device},"
        f" {plural(report.threads, 'CPU thread')}, {report.seconds:.0f} s.\n",
        style="dim",
    )
    out.print(_verdict("PyTorch", "yellow", [layer.torch for layer in layers]))
    out.print(_verdict("samebits", "red", [layer.samebits for layer in layers]))


def _show_first(who: str, layer: Layer, drift: Drift, out: Console) -> None:
    first = drift.first
    assert first is not None
    out.print(
        f"{who} changes [bold]{escape(module_name(layer.name))}[/] most, in terms of its rows."
        f" First at row {first.row}, column {first.column}:"
    )
    table = Table(box=None, padding=(0, 1 if out.width < 60 else 2), show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("in the batch of all rows", f"{first.expected:.9g}", first.expected_bits)
    table.add_row(f"in {first.variation}", f"{first.got:.9g}", first.got_bits)
    out.print(table)
    out.print()


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
    # Numbers are never clipped: columns give way to them, of which "3 of 96" are the last.
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
    """The block of a model that a layer is in, which ends with a number, and the layer's name in it."""
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
    """At most 6 characters."""
    return str(number) if number < 100_000 else f"{number:.0e}".replace("e+0", "e").replace("e+", "e")


def _show_info(found: Info, out: Console) -> None:
    def section(title: str, rows: list[tuple[str, str | Text]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        table.add_column(no_wrap=True, style="dim", min_width=19)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        out.print(f"[bold]{title}[/]")
        out.print(table)
        out.print()

    versions: list[tuple[str, str | Text]] = [("samebits", found.samebits), ("Python", found.python)]
    versions += [(name, version or "not installed") for name, version in found.packages.items()]
    section("Versions", versions)
    gpus = [
        f"{gpu.name}, {gpu.capability}, {gpu.memory_gib} GiB: {', '.join(gpu.contracts) or 'too old'}"
        for gpu in found.gpus
    ]
    machine = f"{found.cpu}, {plural(found.cores, 'core')}, {plural(found.threads, 'thread')}"
    section("Machine", [("CPU", machine), ("GPUs", "\n".join(gpus) or "none that PyTorch can use")])
    section("Contracts (equal digests promise equal bits)", list(found.contracts.items()))
    backends: list[tuple[str, str | Text]] = []
    for backend in found.backends:
        state = (
            Text("works", style="green bold") if backend.works else Text("does not work", style="yellow bold")
        )
        state.append(
            f" on {backend.computes}: " if backend.works else f" ({backend.computes}): ", style="dim"
        )
        state.append(backend.why, style="default not bold")
        if backend.remedy:
            state.append(f"\n→ {backend.remedy}", style="default not bold")
        backends.append((backend.name, state))
    section("Backends", backends)
