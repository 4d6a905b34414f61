"""The audit of MiniLM, summed over layers: how many rows of a real model change their bits with the batch.

python -m benchmarks drift
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, environment, results_file, write


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of the audit's report that pictures and tables use."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for layer in report["layers"]:
        for theirs, ours in zip(layer["torch"]["variations"], layer["samebits"]["variations"], strict=True):
            total = totals.setdefault(
                (theirs["kind"], theirs["name"]), {"rows": 0, "torch": 0, "samebits": 0}
            )
            total["rows"] += theirs["rows"]
            total["torch"] += theirs["changed"]
            total["samebits"] += ours["changed"]
    return {
        "model": report["model"],
        "inputs": report["inputs"],
        "max_rows": report["max_rows"],
        "variations": [{"kind": kind, "name": name, **total} for (kind, name), total in totals.items()],
        "layers": [
            {
                key: layer[key]
                for key in ("name", "in_features", "out_features", "dtype", "contract", "digest")
            }
            | {
                side: {key: layer[side][key] for key in ("rows", "changed", "ulp", "relative", "of_row")}
                for side in ("torch", "samebits")
            }
            for layer in report["layers"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=results_file, default=RESULTS / "cpu" / "drift.json")
    options = parser.parse_args()
    record = environment()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "audit.json"
        command = [sys.executable, "-m", "samebits", "audit", "demo", "--json", str(report)]
        subprocess.run(command, check=True)
        write(options.out, {"environment": record, **summary(json.loads(report.read_text()))})
