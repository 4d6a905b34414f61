"""The report of ``samebits verify`` as a file to send: what ran where, and every result."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import Any

from samebits.tools.info import gather
from samebits.tools.text import plural
from samebits.tools.verify.report import Report

__all__ = ["machine", "sheet"]


def machine(device: int) -> dict[str, Any]:
    """What a result may depend on: the GPU, the driver, versions and digests. No names, no paths."""
    found = gather()
    gpu = dataclasses.asdict(found.gpus[device]) if device < len(found.gpus) else None
    if gpu is not None:
        del gpu["proven"], gpu["tuned"]
    return {
        "gpu": gpu,
        "driver": found.driver,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": found.cpu,
        "cores": found.cores,
        "versions": {"samebits": found.samebits, "python": found.python, **found.packages},
        "contracts": found.contracts,
    }


def sheet(report: Report, where: dict[str, Any]) -> str:
    """The report in Markdown, for people; its end has all of it in JSON.

    Args:
        report: that of the run.
        where: the machine, from :func:`machine`.
    """
    gpu = where["gpu"]
    named = f"{gpu['name']}, {gpu['capability']}, {gpu['memory_gib']} GiB" if gpu else "none"
    family = f"{gpu['family'] or 'unknown'}" if gpu else ""
    ran = f"{' and '.join(report.backends)}{', thorough' * report.thorough}"
    ran += f", {', '.join(report.only)} alone" if report.only else ""
    facts = {
        "GPU": named,
        "family of its tensor cores": family,
        "driver": where["driver"] or "none",
        "system": f"{where['system']}, {where['cpu']}, {plural(where['cores'], 'CPU')}",
        "versions": ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v),
        "NVRTC": report.versions.get("nvrtc", ""),
        "digests": "; ".join(f"{name} `{digest}`" for name, digest in where["contracts"].items()),
        "compared with": f"{report.contract}, digest `{report.digest}`",
        "ran": f"{ran}; {plural(report.kernels, 'kernel')} in {report.seconds:.0f} s",
    }
    parts = [f"# samebits verify: {gpu['name'] if gpu else 'no GPU'}", f"**{_verdict(report)}**"]
    parts.append(_table(("", ""), [(name, fact) for name, fact in facts.items() if fact]))
    if report.first is not None:
        f = report.first
        parts.append(
            f"First difference: {f.kernel}, {f.what}, {f.case}, at {f.at}: got {f.got!r} (`{f.got_bits}`),"
            f" expected {f.expected!r} (`{f.expected_bits}`). {f.schedule}"
        )
    if report.failure:
        parts.append(f"```text\n{report.failure}\n```")
    counts = ("schedules", "results", "values", "differing")
    lines = [
        (
            *(line.kernel, line.what, line.against),
            *(f"{n:,}" for n in (line.schedules, line.results, line.compared, line.differing)),
        )
        for line in report.lines
    ]
    parts.append(_table(("kernel", "what", "held to", *counts), lines))
    data = json.dumps({"machine": where, "report": json.loads(report.to_json())})
    parts.append(f"<details><summary>JSON</summary>\n\n```json\n{data}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _verdict(report: Report) -> str:
    if report.differing:
        return f"{report.differing:,} of {report.compared:,} values differ"
    if report.failure:
        return f"It did not run to its end; {report.compared:,} values have the bits specified"
    if report.gpu is None:
        return f"No GPU was verified: {report.why_not}"
    return f"All {report.compared:,} values have the bits specified"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
