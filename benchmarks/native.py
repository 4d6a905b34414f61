"""``libsamebits`` beside the same products through PyTorch: benchmarks/results/<gpu>/native.json.

python -m benchmarks native [--archive FILE] [--commit COMMIT] [--out FILE]

Sixty cases of ``samebits bench``, each compared bit for bit and then timed in CUDA graphs. And what a call
costs the CPU, from C and through ``samebits_native``, where the loop never waits for the GPU. Without an
archive, one is made.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.record import ROOT, arguments, environment, lines_of_progress, save
from samebits.backends.cuda import devices
from samebits.testing import assert_same_bits
from samebits.tools.bench.cases import BF16, CASES, F32, BenchCase, contestants, make_operands, packed_lengths
from samebits.tools.bench.clock import Race
from samebits_native import engine
from samebits_native.export.command import compile_all
from samebits_native.export.kernels import DTYPES, build

COUNT = 60
HOST = ((1, 1024, 1024), (16, 256, 256), (2048, 1024, 1024))
"""(M, K, N) of products whose cost to the CPU is measured."""

LOOP = """
#include <time.h>
#include "samebits.h"
SB_API double loop(const sb_context* context, const sb_product* product, CUstream stream, int count) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < count; i++)
        if (sb_gemm(context, product, stream) != SB_OK) return -1;
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
"""


def cases() -> list[BenchCase]:
    """Cases of every kind that the library has, evenly."""
    works = ("forward", "dX", "dW", "dW ragged", "dW main_grad")
    every = [c for c in CASES if c.work in works]
    return [every[i * len(every) // COUNT] for i in range(COUNT)]


def library(folder: Path) -> Path:
    """The library, and beside it the loop, compiled."""
    sources = [*map(str, sorted((ROOT / "native/src").glob("*.c")))]
    (folder / "loop.c").write_text(LOOP)
    flags = [
        "-std=c11",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
        f"-I{ROOT / 'native/src'}",
        "-D_POSIX_C_SOURCE=200809L",
    ]
    out = folder / "libsamebits.so"
    options = ["-o", str(out), "-ldl", "-lpthread"]
    subprocess.run(["cc", *flags, *sources, str(folder / "loop.c"), *options], check=True)
    return out


def native(of: engine.Engine, case: BenchCase, x: tuple[Tensor, ...], out: Tensor, ends: Tensor) -> None:
    """The case by the library, into `out`."""
    stream = torch.cuda.current_stream().cuda_stream
    if case.work == "forward":
        of.matmul(x[0], x[1].mT, out=out, stream=stream)
    elif case.work == "dX":
        of.matmul(x[0], x[1], out=out, stream=stream)
    elif case.work == "dW":
        of.matmul(x[0].mT, x[1], out=out, stream=stream)
    elif case.work == "dW main_grad":
        of.matmul(x[0].mT, x[1], out=x[2], accumulate=True, stream=stream)
    else:
        of.matmul_sequences(x[0].mT, x[1], ends, out=out, stream=stream)


def measure(of: engine.Engine, case: BenchCase, device: torch.device, l2_bytes: int) -> dict[str, Any]:
    """Times of a case in microseconds."""
    count = max(1, min(64, math.ceil(4.5 * l2_bytes / case.bytes)))
    sets = [make_operands(case, device, torch.randn) for _ in range(count)]
    ours = contestants(case, device)["samebits"]
    ends = torch.tensor([0, *itertools.accumulate(packed_lengths(case.m))], dtype=torch.int32, device=device)
    kept = [t.clone() for t in sets[0]]
    found = ours(*sets[0])
    want, out = found.clone(), torch.empty_like(found)
    native(of, case, tuple(kept), out, ends)
    got = kept[2] if case.work == "dW main_grad" else out
    assert_same_bits(got, want, str(case))
    # An output for each set of operands, as PyTorch's path has: so that results do not stay in the L2 cache.
    outs = [torch.empty_like(found) for _ in sets[: 1 if case.work == "dW main_grad" else None]]
    with_out = [(*operands, out) for operands, out in zip(sets, itertools.cycle(outs), strict=False)]
    del found, want, got, kept, out
    race = Race(max(2, min(300, math.ceil(3e-3 / max(case.flop / 600e12, case.bytes / 3.5e12, 3e-6)))))
    race.add("torch", lambda *x: ours(*x), sets)
    race.add("native", lambda *x: native(of, case, x[:-1], x[-1], ends), with_out)
    return case.record() | {"us": race.run(11)}


def host(of: engine.Engine, loop: Any, m: int, k: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of the CPU for a call, from C, through the engine, and through PyTorch."""
    x, w = (torch.randn(s, device="cuda").to(dtype) for s in ((m, k), (n, k)))
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    arrays = engine.Array.of(x), engine.Array.of(w).mT, engine.Array.of(out)
    product, stream = engine._product(*arrays, None, False), torch.cuda.current_stream().cuda_stream
    times: dict[str, list[float]] = {"c": [], "engine": [], "torch": []}
    ours = contestants(BenchCase("forward", m, k, n, dtype), torch.device("cuda", 0))["samebits"]
    for _ in range(15):
        torch.cuda.synchronize()
        times["c"].append(loop(of._context, ctypes.byref(product), stream, 300) / 1000)
        for name in ("engine", "torch"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                if name == "torch":
                    ours(x, w)
                else:
                    of.matmul(arrays[0], arrays[1], out=arrays[2], stream=stream)
            times[name].append((time.perf_counter() - start) / 300 * 1e6)
    medians = {name: float(f"{statistics.median(t[1:]):.4g}") for name, t in times.items()}
    return {"m": m, "k": k, "n": n, "dtype": str(dtype).removeprefix("torch."), "us": medians}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--archive", type=Path, help="made by samebits export")
    options = parser.parse_args()
    device, info = torch.device("cuda", 0), devices.device_info(0)
    say = lines_of_progress(Console(stderr=True))
    with tempfile.TemporaryDirectory() as name:
        built, path = library(Path(name)), options.archive or Path(name) / "archive"
        start = time.perf_counter()
        if options.archive is None:
            archive = build(info.arch.target, list(DTYPES.values()))
            path.write_bytes(archive.pack(compile_all(archive.specs, info.arch.target, say)))
        exported = time.perf_counter() - start
        start = time.perf_counter()
        of = engine.Engine(path, library=built)
        loaded = time.perf_counter() - start
        loop = ctypes.CDLL(str(built)).loop
        loop.restype = ctypes.c_double
        loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        measured = []
        for i, case in enumerate(cases()):
            measured.append(measure(of, case, device, info.l2_bytes))
            say((i + 1) / COUNT, str(case))
        ratios = [c["us"]["torch"] / c["us"]["native"] for c in measured]
        hosts = [host(of, loop, *shape, dtype) for shape in HOST for dtype in (BF16, F32)]
        data = {
            "environment": environment(options.commit),
            "archive_bytes": path.stat().st_size,
            "seconds": {"export": round(exported, 1), "load": round(loaded, 2)},
            "speed": {"mean": round(statistics.geometric_mean(ratios), 4), "worst": round(min(ratios), 4)},
            "host": hosts,
            "cases": measured,
        }
        torch.cuda.synchronize()
        of.close()
    save(options.out, "native.json", data)
    print(f"speed beside PyTorch's path: {data['speed']}; host: {[c['us'] for c in hosts]}")
