"""Every architecture of `transformers` as a tiny model: fused, and in its own code, under the mode.

python -m benchmarks fusion [NAME ...] [--device cuda] [--jobs 2] [--out FILE]

It writes benchmarks/results/cpu/fusion.json, or <gpu>/fusion.json: what ``samebits.fuse`` fused where, how
many values of logits, of losses in float32 and of gradients were compared, and how many differ. What is known
of an architecture lies in build/fusion: the next run goes on from there while the sources are the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import RESULTS, ROOT, environment, results_file, slug, write
from benchmarks.zoo.__main__ import digest_of_sources
from samebits.tools.text import dtype_name

KEPT = ROOT / "build" / "fusion"
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures, such as llama; all without")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--keep", action="store_true", help="results of other sources, too")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=results_file, help="instead of the file in benchmarks/results")
    options = parser.parse_args()
    from benchmarks.zoo.build import names

    every = names()
    if unknown := set(options.names) - {name for name, _ in every}:
        parser.error(f"unknown architectures: {', '.join(sorted(unknown))}")
    folder = KEPT / options.device
    folder.mkdir(parents=True, exist_ok=True)
    head = {"environment": environment(options.commit)}
    sources = digest_of_sources()
    chosen = [pair for pair in every if not options.names or pair[0] in options.names]
    todo = [pair for pair in chosen if not _known(folder / f"{pair[0]}.json", sources, options)]
    os.environ |= {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    _run(todo, folder, sources, options)
    found = [json.loads(p.read_text()) for name, _ in chosen if (p := folder / f"{name}.json").exists()]
    for one in found:
        one.pop("sources")
    if not options.names:
        machine = "cpu" if options.device == "cpu" else slug(torch.cuda.get_device_name())
        write(options.out or RESULTS / machine / "fusion.json", head | {"architectures": found})
    values, differ = (
        sum(d[key] for one in found for d in one.get("dtypes", {}).values()) for key in ("values", "differ")
    )
    fused = sum(bool(one.get("fused")) for one in found)
    print(f"{len(found)} architectures, {fused} with something fused: {differ} of {values:,} values differ")


def _known(path: Path, sources: str, options: argparse.Namespace) -> bool:
    if options.names or not path.exists():
        return False
    return options.keep or json.loads(path.read_text())["sources"] == sources  # type: ignore[no-any-return]


def _run(todo: list[tuple[str, str]], folder: Path, sources: str, options: argparse.Namespace) -> None:
    """Measure each in a process of several, which ends with one that takes too long."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(todo), dict[Any, tuple[list[tuple[str, str]], float]]()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            batch, waiting = waiting[:8], waiting[8:]
            process = context.Process(target=_serve, args=(batch, str(folder), sources, options.device))
            process.start()
            running[process] = batch, time.monotonic()
        time.sleep(1)
        for process, (batch, start) in list(running.items()):
            left = [pair for pair in batch if not _done(folder / f"{pair[0]}.json", start)]
            done = len(batch) - len(left)
            since = max(
                [
                    start,
                    *(
                        (folder / f"{n}.json").stat().st_mtime - time.time() + time.monotonic()
                        for n, _ in batch
                        if (n, _) not in left
                    ),
                ]
            )
            late = time.monotonic() - since > options.timeout
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[process]
            if left:
                name, kind = left[0]
                why = f"took longer than {options.timeout:.0f} s" if late else "ended its process"
                said = {"name": name, "kind": kind, "unbuilt": why, "sources": sources}
                (folder / f"{name}.json").write_text(json.dumps(said))
                waiting = left[1:] + waiting
            print(f"{len(todo) - len(waiting)} of {len(todo)}, {done} in this process", flush=True)


def _done(path: Path, start: float) -> bool:
    return path.exists() and path.stat().st_mtime - time.time() + time.monotonic() >= start


def _serve(batch: list[tuple[str, str]], folder: str, sources: str, device: str) -> None:
    import numba

    torch.set_num_threads(1)
    numba.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, kind in batch:
        start = time.monotonic()
        try:
            found = measure(name, kind, device)
        except Exception as error:
            found = {"unbuilt": f"{type(error).__name__}: {error}".partition("\n")[0][:160]}
        said = {"name": name, "kind": kind} | found | {"sources": sources}
        Path(folder, f"{name}.json").write_text(json.dumps(said))
        differ = {d: v["differ"] for d, v in found.get("dtypes", {}).items()}
        print(f"{name}: {time.monotonic() - start:.0f} s, {found.get('unbuilt', differ)}", flush=True)


def measure(name: str, kind: str, device: str) -> dict[str, Any]:
    """What is fused in an architecture, and what of its results differs."""
    from benchmarks.zoo.models import Model
    from samebits import fuse
    from samebits.fusion.source import LOSS

    model = Model(name, kind, torch.float32, device)
    net, model.short = model.net, [model._item(17, 12), model._item(9, 7)]
    weights = {n: t.clone() for n, t in (*net.named_parameters(), *net.named_buffers())}
    fusion = fuse(model.net, model.batch(model.short), loss=True)
    found: dict[str, Any] = {
        "attention": model.net.config._attn_implementation,
        "fused": [
            {"module": f.kind, "what": f.what, "count": len(f.names), "dtypes": [*map(dtype_name, f.dtypes)]}
            for f in fusion.fused
        ],
        "left": [
            {"module": u.kind, "what": u.what, "count": len(u.names), "why": u.reason} for u in fusion.left
        ],
        "dtypes": {},
    }
    if not fusion.fused:
        return found
    wide = any(f.what == LOSS for f in fusion.fused)  # in 16 bits that loss has other bits
    losses = {dtype: dtype == torch.float32 or not wide for dtype in DTYPES}
    fused = {dtype: _results(model, weights, dtype, losses[dtype]) for dtype in DTYPES}
    fusion.undo()
    for dtype, theirs in fused.items():
        own = _results(model, weights, dtype, losses[dtype])
        if isinstance(own, str) or isinstance(theirs, str):  # as the model itself fails
            found["dtypes"][dtype_name(dtype)] = {
                "values": 0,
                "differ": int(own != theirs),
                "said": str(own)[:160],
            }
            continue
        missing = own.keys() ^ theirs.keys()
        found["dtypes"][dtype_name(dtype)] = {
            "values": sum(t.numel() for t in own.values()),
            "differ": sum(_differ(own[n], theirs[n]) for n in own.keys() & theirs.keys()) + len(missing),
        }
    return found


def _results(
    model: Any, weights: dict[str, Tensor], dtype: torch.dtype, loss: bool
) -> dict[str, Tensor] | str:
    """Logits and gradients, of padded sequences; with `loss` that and its gradients, too."""
    import samebits

    model.net.to(dtype)
    with torch.no_grad():
        for name, t in (*model.net.named_parameters(), *model.net.named_buffers()):
            t.copy_(weights[name])
    model.dtype = dtype
    model.known.clear()
    items = [
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in item.items()} for item in model.short
    ]
    found: dict[str, Tensor] = {}
    try:
        with samebits.batch_invariant("ignore"):
            for i, row in enumerate(model.forward(items)):
                found[f"logits {i}"] = row
            grads = model.gradients(items, model.seeds(items))
            found |= {f"gradient of {n}": g for n, g in grads.items()}
            if loss and model.kind == "causal" and "labels" in model.takes:
                given = model.batch(items)
                mean = model.net(**given, labels=given["input_ids"]).loss
                named = {n: p for n, p in model.net.named_parameters() if p.requires_grad}
                of_loss = torch.autograd.grad(mean, list(named.values()), allow_unused=True)
                found["loss"] = mean.detach()
                found |= {
                    f"loss's gradient of {n}": g for n, g in zip(named, of_loss, strict=True) if g is not None
                }
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found


def _differ(a: Tensor, b: Tensor) -> int:
    from samebits.testing import bits

    return a.numel() if a.shape != b.shape else int((bits(a) != bits(b)).sum())
