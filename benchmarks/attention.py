"""The attention of ``samebits bench``, recorded in benchmarks/results/<gpu>/attention.json.

python -m benchmarks.attention [--quick] [--commit COMMIT] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

from benchmarks.record import RESULTS, environment, lines_of_progress, results_file, slug, write
from samebits.tools import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of benchmarks/results/<gpu>/attention.json")
    options = parser.parse_args()
    record = environment(options.commit)
    console = Console(width=150)
    cases = bench.quick_attention() if options.quick else bench.ATTENTION
    data = bench.bench_attention(cases, progress=lines_of_progress(console))
    measured = data["environment"]
    data["environment"] = record | measured | {"versions": record["versions"] | measured["versions"]}
    write(options.out or RESULTS / slug(torch.cuda.get_device_name()) / "attention.json", data)
    console.print(bench.show_attention(data))
    for case in data["red"]:
        console.print(f"RED {case}", style="red", highlight=False)
    sys.exit(bool(data["red"]))


if __name__ == "__main__":
    main()
