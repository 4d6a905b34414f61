"""``samebits verify`` and its environment, recorded in benchmarks/results/<gpu>/verify.json.

python -m benchmarks verify [--thorough] [--only PART ...] [--commit COMMIT] [--out FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import arguments, environment, results, write


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="parts alone, in a file of their own")
    options = parser.parse_args()
    record = environment(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "samebits", "verify", "--json", str(report)]
        command += ["--thorough"] if options.thorough else []
        command += [word for part in options.only for word in ("--only", part)]
        code = subprocess.run(command).returncode
        if code not in (0, 1):  # no GPU was verified, or samebits itself failed
            sys.exit(code)
        data = json.loads(report.read_text())
    record |= {"gpu": data.pop("gpu"), "versions": record["versions"] | data.pop("versions")}
    record["digest"] = data.pop("digest")
    out = results(options.out, "_".join(["verify", *options.only]) + ".json")
    write(out, {"environment": record, **data})
    sys.exit(code)
