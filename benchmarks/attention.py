"""The attention of ``samebits bench``, recorded in benchmarks/results/<gpu>/attention.json.

python -m benchmarks attention [--quick] [--commit COMMIT] [--out FILE]
"""

from __future__ import annotations

import sys

from rich.console import Console

from benchmarks.record import arguments, environment, lines_of_progress, save
from samebits.tools import bench


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    options = parser.parse_args()
    record = environment(options.commit)
    console = Console(width=150)
    cases = bench.quick_attention() if options.quick else bench.ATTENTION
    data = bench.bench_attention(cases, progress=lines_of_progress(console))
    measured = data["environment"]
    data["environment"] = record | measured | {"versions": record["versions"] | measured["versions"]}
    save(options.out, "attention.json", data)
    console.print(bench.show_attention(data))
    for case in data["red"]:
        console.print(f"RED {case}", style="red", highlight=False)
    sys.exit(bool(data["red"]))
