"""``samebits verify``: compare, show the report and write it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from samebits.tools import terminal
from samebits.tools.verify.report import show
from samebits.tools.verify.run import verify
from samebits.tools.verify.sheet import machine, sheet


def main(
    *,
    thorough: bool,
    backend: str | None,
    only: Sequence[str],
    json_to: str | None,
    report_to: Path | None,
    device: int,
) -> int:
    """Verify the kernels on the CUDA device `device`. The arguments are the command's options.

    Returns:
        The exit code, that of the report.

    Raises:
        ToolError: the report cannot be written.
    """
    out = terminal.Console(json_to)
    terminal.check_file("--json", json_to)
    terminal.check_file("--report", report_to)
    where = None if report_to is None else machine(device)  # a kernel that hangs would make it wait
    with terminal.progress() as say:
        report = verify(thorough=thorough, backend=backend, only=only, device=device, progress=say)
    try:
        out.print(show(report))
        if json_to is not None:
            with terminal.unless(report.exit_code == 1):
                terminal.write_json(report.to_json(), json_to)
        if report_to is not None and where is not None:
            with terminal.unless(report.exit_code == 1), terminal.writing("--report", report_to):
                report_to.write_text(sheet(report, where), "utf-8")
    finally:
        if report.hung:  # the driver would wait for the kernel at a usual exit
            sys.stdout.flush()
            os._exit(report.exit_code)
    return report.exit_code
