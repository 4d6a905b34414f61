"""Records of measurements: the environment, and JSON files of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def measured(results: str) -> list[str]:
    """The folders of GPUs that have these results."""
    return sorted(path.parent.name for path in RESULTS.glob(f"*/{results}"))


def commits(gpu: str, files: Iterable[str] = ()) -> set[str]:
    """Those at which results of a GPU were measured, or these of them."""
    found = {path.name for path in (RESULTS / gpu).glob("*.json")}
    return {load(f"{gpu}/{name}")["environment"]["commit"] for name in found & set(files or found)}


GPUS = sorted(measured("bench.json"), key=lambda gpu: len(commits(gpu)))
"""Folders of GPUs. The first, which pages show most of, has results of the fewest commits."""


def overview() -> dict[str, str]:
    """README's first results and their GPUs: that of TRL's run with vLLM, if it has them, or another."""
    order = [*measured("trl_vllm.json")[:1], *GPUS]
    found = {name: [gpu for gpu in order if gpu in measured(f"{name}.json")] for name in OVERVIEW}
    return {name: gpus[0] for name, gpus in found.items() if gpus}


OVERVIEW = ("trl_vllm", "vllm", "vllm_1.7b", "sglang_8b", "steps")


def tiny(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The batched products among the cases of `samebits bench`, if they were measured."""
    return [c for c in data["cases"] if c["work"] == "bmm"]


def environment(commit: str | None = None) -> dict[str, Any]:
    """Commit, machine, versions and date, without a host name. Without git, pass `commit`."""
    packages = ("samebits", "torch", "numpy", "numba", "llvmlite", "mmasim", "transformers", "vllm", "sglang")
    return {
        "commit": commit or _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "replays": find_spec("samebits.backends._replay") is not None,
        "versions": {name: v for name in packages if (v := _version(name))},
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def slug(gpu: str) -> str:
    """A GPU's name, in the form for names of files and folders."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def lines(data: Any, depth: int = 0) -> str:
    """JSON with the innermost objects and lists on one line each."""
    text = json.dumps(data)
    items = list(data.values() if isinstance(data, dict) else data) if isinstance(data, dict | list) else []
    if len(text) < 200 - depth or not any(isinstance(item, dict | list) for item in items):
        return text
    pad = " " * (depth + 1)
    if isinstance(data, dict):
        inner = [f"{pad}{json.dumps(key)}: {lines(value, depth + 1)}" for key, value in data.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(f"{pad}{lines(item, depth + 1)}" for item in data) + "\n" + " " * depth + "]"


def lines_of_progress(console: Console) -> Callable[[float, str], None]:
    """Shows progress as a line for each tenth. A progress bar would fill a log."""
    said = -1

    def show(done: float, what: str) -> None:
        nonlocal said
        if int(done * 10) > said:
            said = int(done * 10)
            console.print(f"{done:4.0%} {what}", style="dim", highlight=False)

    return show


def results_file(name: str) -> Path:
    """An argument that names a file to write. A bad one is refused before the measurement."""
    path = Path(name)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{name} is a folder; the results are one file")
    return path


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark that writes results. It may add some of its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of the file in benchmarks/results")
    return parser


def results(out: Path | None, name: str) -> Path:
    """Where results go: the file that ``--out`` names, or that of the GPU at hand."""
    return out or RESULTS / slug(torch.cuda.get_device_name()) / name


def merged(path: Path, data: dict[str, Any], key: str) -> dict[str, Any]:
    """`data` with the other cases of results that are there, told apart by `key`.

    Those of another commit name it.

    Raises:
        ValueError: those were measured on another machine, or of other models.
    """
    if not path.exists():
        return data
    before = json.loads(path.read_text())
    free = {"commit", "date", "load_before", "threads", "cores"}
    for name in (*data["environment"].keys() - free, *data.keys() - {"environment", "cases"}):
        old, new = (of["environment"].get(name, of.get(name)) for of in (before, data))
        if old != new:
            raise ValueError(f"--merge: expected {name} {old} of {path}, got {new}")
    was, now = (of["environment"]["commit"] for of in (before, data))
    kept = (case if was == now else {key: case[key], "commit": was} | case for case in before["cases"])
    cases = {case[key]: case for case in (*kept, *data["cases"])}
    return data | {"cases": [*cases.values()]}


def save(out: Path | None, name: str, data: dict[str, Any]) -> None:
    write(results(out, name), data)


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(data) + "\n")
    print(f"wrote {path}")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    # Only the package is measured, so uncommitted changes of benchmarks do not count.
    changed = git("status", "--porcelain", "--", "samebits")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
