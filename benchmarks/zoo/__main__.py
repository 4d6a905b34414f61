"""Every architecture of `transformers` as a tiny model, in PyTorch and under ``samebits.batch_invariant``.

python -m benchmarks zoo [NAME ...] [--fp8] [--device cuda] [--jobs 2] [--out FILE]

It writes benchmarks/results/cpu/zoo.json, or <gpu>/zoo.json; with ``--fp8``, models in block FP8 to
zoo_fp8.json there. What is known of an architecture lies in build/zoo, so that the next run goes on from
there while the sources are the same. Those that are named are measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.record import RESULTS, ROOT, environment, lines_of_progress, results_file, slug, write
from benchmarks.zoo.report import verdict

KEPT = ROOT / "build" / "zoo"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures, such as llama; all without")
    parser.add_argument("--fp8", action="store_true", help="models in block FP8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--keep", action="store_true", help="results of other sources, too")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of benchmarks/results/<machine>/zoo.json")
    options = parser.parse_args()
    from benchmarks.zoo.build import names

    every = names(options.fp8)
    if unknown := set(options.names) - {name for name, _ in every}:
        parser.error(f"unknown architectures: {', '.join(sorted(unknown))}")
    folder = KEPT / options.device
    folder.mkdir(parents=True, exist_ok=True)
    sources = digest_of_sources()
    todo = [
        (name, kind)
        for name, kind in every
        if (
            name in options.names
            if options.names
            else not _known(folder / f"{name}.json", sources, options.keep)
        )
    ]
    head = {"environment": environment(options.commit), "contract": contracts()}
    _run(todo, folder, sources, options)
    found = [json.loads(p.read_text()) for name, _ in every if (p := folder / f"{name}.json").exists()]
    for one in found:
        one.pop("sources")
    if options.names:
        print("named architectures are measured; run without names to write the results of all")
        return
    machine = "cpu" if options.device == "cpu" else slug(torch.cuda.get_device_name())
    file = "zoo_fp8.json" if options.fp8 else "zoo.json"
    write(options.out or RESULTS / machine / file, head | {"architectures": found})


def contracts() -> dict[str, str]:
    """The digests of the contracts that the models run under."""
    import samebits

    return {
        "float32": samebits.FMA.digest(),
        "bfloat16": samebits.TENSOR_CORE.on(samebits.HOPPER).digest(),
        "fp8": samebits.FP8.digest(),
    }


def digest_of_sources() -> str:
    files = [*(ROOT / "samebits").rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(files))).hexdigest()[:16]


def _known(path: Path, sources: str, keep: bool) -> bool:
    return path.exists() and (keep or json.loads(path.read_text())["sources"] == sources)


class Worker:
    """A process that measures one architecture after the other. It ends with one that takes too long."""

    def __init__(self, device: str, sources: str, timeout: float) -> None:
        self.given = (device, sources)
        self.timeout = timeout
        self.process: Any = None

    def measure(self, name: str, kind: str, path: Path) -> None:
        from benchmarks.zoo.checks import serve

        if self.process is None or not self.process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, *self.given), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send((name, kind, str(path)))
        try:
            why = "" if self.pipe.poll(self.timeout) else f"took longer than {self.timeout:.0f} s"
            if not why:
                self.pipe.recv()
        except EOFError:
            why = "ended its process"
        if why:
            self.process.kill()
            self.process.join()
            said = {"name": name, "kind": kind, "unbuilt": why, "sources": self.given[1]}
            path.write_text(json.dumps(said))


def _run(todo: list[tuple[str, str]], folder: Path, sources: str, options: Any) -> None:
    os.environ |= {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    console = Console()
    states: Counter[str] = Counter()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    show = lines_of_progress(console)
    task = bar.add_task("architectures", total=len(todo))
    workers: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(options.jobs):
        workers.put(Worker(options.device, sources, options.timeout))

    def one(job: tuple[str, str]) -> None:
        name, kind = job
        path, start = folder / f"{name}.json", time.monotonic()
        worker = workers.get()
        worker.measure(name, kind, path)
        workers.put(worker)
        state, said = verdict(json.loads(path.read_text()))
        states[state] += 1
        if state != "passes":
            console.print(f"{name}: {state}: {said}"[:230], highlight=False, markup=False, soft_wrap=True)
        bar.advance(task)
        if not console.is_terminal:
            done = sum(states.values())
            show(done / len(todo), f"{name}, {time.monotonic() - start:.0f} s; {dict(states)}")

    with ThreadPoolExecutor(options.jobs) as pool, bar if console.is_terminal else nullcontext():
        list(pool.map(one, todo))
    console.print(", ".join(f"{count} {state}" for state, count in states.most_common()) or "nothing to do")


if __name__ == "__main__":
    main()
