"""The products of ``samebits bench`` and their environment, recorded in benchmarks/results/<gpu>/bench.json.

python -m benchmarks gpu [--quick] [--dtype NAME...] [--peers] [--backend NAME] [--commit COMMIT]
"""

from __future__ import annotations

import sys

from rich.console import Console

from benchmarks.record import arguments, environment, lines_of_progress, save
from samebits.tools import bench
from samebits.tools.text import dtype_name

DTYPES = ("bfloat16", "float16", "float32")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="only products of these")
    parser.add_argument("--peers", action="store_true", help="other libraries too, if installed")
    parser.add_argument("--backend", help="in place of the automatic choice")
    options = parser.parse_args()
    record = environment(options.commit)
    console = Console(width=150)
    cases = [
        c for c in (bench.quick() if options.quick else bench.CASES) if dtype_name(c.dtype) in options.dtype
    ]
    data = bench.bench(
        cases, peers=options.peers, backend=options.backend, progress=lines_of_progress(console)
    )
    measured = data["environment"]
    data["environment"] = record | measured | {"versions": record["versions"] | measured["versions"]}
    save(options.out, f"{options.backend or 'bench'}.json", data)
    console.print(bench.show(data))
    for case in data["red"]:
        console.print(f"RED {case}", style="red", highlight=False)
    sys.exit(bool(data["red"]))
