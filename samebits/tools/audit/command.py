"""``samebits audit``: load a model, audit it, write the report and show it."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from samebits.tools import page, terminal
from samebits.tools.audit import operator_report, report
from samebits.tools.audit.linears import audit_linears
from samebits.tools.audit.models import load
from samebits.tools.audit.operators import audit
from samebits.tools.audit.target import cuda_problem
from samebits.tools.text import AuditError


def main(
    model: str,
    *,
    text: Path | None,
    dtype: str | None,
    max_rows: int | None,
    max_tokens: int,
    only: str | None,
    json_to: str | None,
    device: str | None,
    operators: bool,
    backward: bool,
    plot: Path | None,
    html: Path | None,
) -> int:
    """Audit `model`. The arguments are the command's options; a `dtype` of None leaves the model as it is.

    Returns:
        The exit code: 1 if bits changed, and otherwise 0.

    Raises:
        ToolError: the audit cannot run on what it was given.
    """
    out = terminal.Console(json_to)
    if backward and not operators:
        raise AuditError("--backward: expected --operators beside it")
    if only is not None and operators:
        raise AuditError("--only: chooses linear layers; leave it out with --operators")
    place = None if device is None else _device(device)
    if only is not None:
        try:
            re.compile(only)
        except re.error as error:
            raise AuditError(f"--only {only}: not a regular expression: {error}") from error
    terminal.check_file("--json", json_to)
    terminal.check_file("--plot", plot)
    terminal.check_file("--html", html)
    if plot is not None:
        page.check(plot)  # fails before the run
    if html is not None:
        page.figure()
    cast = None if dtype is None else getattr(torch, dtype)
    found: report.Report | operator_report.OperatorReport
    # Output of the user's code must not get into the JSON.
    with terminal.progress() as show, redirect_stdout(sys.stderr) if json_to == "-" else nullcontext():
        show(0, f"loading {model}")
        subject = load(model, text, cast, max_tokens, place)
        said: dict[str, Any] = {"name": subject.name, "source": subject.source, "notes": subject.notes}
        if operators:
            (inputs,) = subject.batched().inputs
            module = subject.module.eval()
            found = audit(module, inputs, backward=backward, max_rows=max_rows or 4, progress=show, **said)
        else:
            found = audit_linears(
                subject.module, subject.inputs, max_rows=max_rows or 96, only=only, progress=show, **said
            )
    shown: RenderableType
    if isinstance(found, operator_report.OperatorReport):
        shown, changed = operator_report.show(found, out.width), found.drifts
    else:
        shown, changed = report.show(found, out.width), found.samebits_drifts
    out.print(shown)  # before files, which may fail
    with terminal.unless(bool(changed)):
        if json_to is not None:
            terminal.write_json(found.to_json(), json_to)
        if plot is not None:
            with terminal.writing("--plot", plot):
                found.save_plot(plot)
        if html is not None:
            with terminal.writing("--html", html):
                found.save_html(html)
    return int(changed)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise AuditError(f"--device {name}: expected cpu, cuda, or one CUDA device such as cuda:1")
    if device.type == "cuda" and (problem := cuda_problem(device)) is not None:
        raise AuditError(f"--device {name}: {problem}")
    return device
