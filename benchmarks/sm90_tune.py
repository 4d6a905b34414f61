"""Bits and speed of every schedule of ``matmul_sm90`` on a Hopper GPU, against ``torch.mm`` in the same run.

    python benchmarks/sm90_tune.py --check --speed tune --out results.json

Each product is checked before it is timed: raw bits against a naive kernel, outputs poisoned. Times are medians
over CUDA-graph replays that rotate over enough input sets to defeat the L2 cache; the contestants take turns,
so that heat and power are shared. The work runs in a child process: one that hangs is ended and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from samebits.backends.cuda import matmul_sm90, runtime  # noqa: E402
from samebits.backends.cuda.schedule import Schedule  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 1024), (8192, 8192), (7168, 256),
    (768, 3072), (3072, 768), (8192, 10240), (8192, 57344), (28672, 8192), (5120, 10240), (5120, 51200), (25600, 5120),
]


# ---- schedules to try

MAX_SMEM = 227 * 1024


def dense() -> list[Schedule]:
    """For many rows."""
    found = []
    one, two, row = (1, 1), (2, 1), (1, 2)
    for m, n, warpgroups, share, clusters in (
        (128, 256, 2, 2, (two,)), (256, 128, 2, 2, (row,)), (128, 192, 2, 2, (two,)), (128, 224, 2, 2, (one, two)),
        (128, 192, 2, 1, (one,)), (192, 128, 2, 1, (one,)), (128, 160, 2, 1, (one,)), (128, 128, 2, 1, (one, two, row)),
        (64, 256, 2, 1, (one,)), (64, 192, 2, 1, (one,)), (64, 224, 2, 1, (one,)), (64, 128, 2, 1, (one, row)),
        (128, 96, 2, 1, (one,)), (128, 64, 2, 2, (one, two)),
    ):
        for cluster in clusters:
            for group in (8, 16) if (m, n, cluster) == (128, 128, one) else (8,):
                stages = (MAX_SMEM - 1200 - warpgroups * 16384) // ((m + n) * 128 + 20)
                found.append(Schedule(m, n, 64, min(stages, 8), warpgroups, share, *cluster, group=group))
    return found


STEP = {8: 18, 16: 20, 32: 24, 64: 32, 128: 64}


def estimate(m: int, n: int, k: int, rows: int, tokens: int) -> float:
    """Seconds of a swapped schedule: the chain, a multiprocessor's intake, L2's and HBM's output."""
    tiles = -(-n // rows) * -(-m // tokens)
    intake = (rows + tokens) * k * 2
    tile = max(k / 16 * STEP[tokens] * -(-rows // 64) / 1.75e9, intake / 110e9)
    bounds = -(-tiles // 132) * tile, tiles * intake / 9e12, n * k * 2 / 4.2e12
    return max(bounds) + 0.15 * sum(bounds)


def swapped(m: int | None = None, n: int = 0, k: int = 0) -> list[Schedule]:
    """For few rows: the columns of the product take the tall side."""
    shapes = [(r, t) for r in (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128) for t in STEP
              if (r + t) * 128 * 4 < MAX_SMEM and (m is None or t < 2 * max(m, 8) and t * 16 >= m)]
    if m is not None:
        shapes = sorted(shapes, key=lambda s: estimate(m, n, k, *s))[: 9 if 32 < m <= 128 else 6]
    found = []
    for rows, tokens in shapes:
        warpgroups = 2 if rows > 64 else 1
        for cluster in ((1, 1), (2, 1), (1, 2)):
            if cluster[0] > 1 and tokens < 32 or cluster[1] > 1 and (rows % 16 or m is not None and tokens >= m):
                continue
            for depth in (64, 128, 256, 512):
                size = rows + tokens
                if not (depth == 64 and size >= 96 or depth == 128 or depth == 256 and size <= 80 or depth == 512 and size <= 32):
                    continue
                if depth == 128 and size < 40:
                    continue
                for blocks in (1, 2):
                    stages = (MAX_SMEM // blocks - 2048 - 8192) // (size * depth * 2 + 20)
                    if stages < 3:
                        continue
                    for ahead in (0, stages) if size <= 80 and n <= 4096 else (0,):
                        found.append(Schedule(rows, tokens, depth, stages, warpgroups, warpgroups, *cluster,
                                              blocks=blocks, ahead=ahead, swap=True))
    return found


def narrow(m: int) -> list[Schedule]:
    """Small tiles, of one warpgroup."""
    found = []
    for n in (16, 24, 32, 48, 64, 96, 128, 192):
        for cluster in ((1, 1), (2, 1)) if m > 64 and n % 16 == 0 else ((1, 1),):
            for depth in (64, 128, 256):
                if not (depth == 64 and n >= 64 or depth == 128 and n <= 128 or depth == 256 and n <= 32):
                    continue
                for blocks in (1, 2):
                    stages = (MAX_SMEM // blocks - 1200 - 16384) // ((64 + n) * depth * 2 + 20)
                    if stages >= 3:
                        found.append(Schedule(64, n, depth, stages, 1, 1, *cluster, blocks=blocks))
    return found


def suitable(m: int, n: int, k: int, a_mn: bool, b_mn: bool) -> list[Schedule]:
    found = []
    if m <= 128 or -(-m // 128) * -(-n // 128) <= 66:
        found += swapped(m, n, k)
    if 32 < m and -(-m // 64) * -(-n // 64) <= 264 * 2 or 32 < m <= 128:
        found += narrow(m)
    if m > 128:
        found += dense()
    return [s for s in found if s.fits(a_mn, b_mn)]


# ---- the naive kernel

def naive(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, bias: Tensor | None = None, start: Tensor | None = None,
          cu_seqlens: Tensor | None = None) -> Tensor:
    """The definition: chains from ``start``, then bias, then one rounding; NaN canonical."""
    m, k = a.shape
    n = b.shape[1]
    acc = torch.zeros(m, n, device=a.device) if start is None else start.clone()
    bounds = torch.tensor([0, k], device=a.device) if cu_seqlens is None else cu_seqlens.long()
    spec = runtime.KernelSpec(
        str(HERE / "chain_naive.cu"), "chain", "PPPPqqqqiiii",
        (("INPUT", '"bf16"' if a.dtype == BF16 else '"f16"'),), 32,
    )
    runtime.load(spec, a.get_device()).launch(
        (-(-n // 64), -(-m // 16), 1), a.data_ptr(), b.data_ptr(), acc.data_ptr(), bounds.data_ptr(),
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), m, n, bounds.numel() - 1, 0,
    )
    if bias is not None:
        acc += bias.float()
    return acc.to(out_dtype)


def bits(x: Tensor) -> Tensor:
    """Raw bits, NaN canonical, so that what ``torch`` rounds compares too."""
    wide = x.dtype == F32
    raw = x.contiguous().view(torch.int32 if wide else torch.int16)
    return torch.where(x.isnan(), 0x7FFFFFFF if wide else 0x7FFF, raw)


def differing(got: Tensor, want: Tensor) -> str:
    """Empty where all bits agree; else how many do not, and the first."""
    raw = got.contiguous().view(torch.int32 if got.dtype == F32 else torch.int16)
    wrong = (raw != bits(want)).nonzero()
    if not len(wrong):
        return ""
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {got.numel()} differ, first {at}: {got[at].item()!r}, not {want[at].item()!r}"


# ---- correctness

def fill(shape: tuple[int, int], dtype: torch.dtype, data: str, seed: int, transposed: bool, device: str = "cuda") -> Tensor:
    g = torch.Generator(device).manual_seed(seed)
    rows, columns = shape[::-1] if transposed else shape
    pitch = -(-columns // 8) * 8
    x = torch.randn(rows, pitch, generator=g, device=device)
    if data == "wide":
        x *= torch.exp2(torch.randint(-40, 40, x.shape, generator=g, device=device).float())
    x = x.to(dtype)
    if data == "special":
        u = torch.rand(x.shape, generator=g, device=device)
        for i, value in enumerate((math.inf, -math.inf, math.nan, 0.0)):
            x[(u > i * 2e-4) & (u < (i + 1) * 2e-4)] = value
    x[:, columns:] = math.nan  # what lies beside a row must not matter
    x = x[:, :columns]
    return x.T if transposed else x


def poison(m: int, n: int, dtype: torch.dtype, pitch: int) -> Tensor:
    return torch.full((m, pitch), math.nan, dtype=dtype, device="cuda")[:, :n]


@dataclasses.dataclass(frozen=True)
class Check:
    m: int
    n: int
    k: int
    a_mn: bool = False
    b_mn: bool = False
    dtype: str = "bfloat16"
    out: str = "same"
    bias: bool = False
    accumulate: bool = False
    pitch: int = 0  # 0: the output's rows are contiguous
    data: str = "normal"
    lengths: tuple[int, ...] = ()
    int64: bool = False


def run_check(c: Check, schedule: Schedule | None) -> str:
    dtype = getattr(torch, c.dtype)
    out_dtype = F32 if c.out == "f32" else dtype
    a = fill((c.m, c.k), dtype, c.data, 1, c.a_mn)
    b = fill((c.k, c.n), dtype, c.data, 2, not c.b_mn)
    bias = torch.randn(c.n, device="cuda").to(dtype) if c.bias else None
    seqs = None
    if c.lengths:
        seqs = torch.tensor((0, *c.lengths), device="cuda").cumsum(0).to(torch.int64 if c.int64 else torch.int32)
    out = poison(c.m, c.n, out_dtype, c.pitch or c.n)
    start = None
    if c.accumulate:
        start = torch.randn(c.m, c.n, device="cuda")
        out.copy_(start)
    want = naive(a, b, out_dtype, bias=bias, start=start, cu_seqlens=seqs)
    matmul_sm90.matmul(a, b, out, bias=bias, accumulate=c.accumulate, cu_seqlens=seqs, schedule=schedule)
    torch.cuda.synchronize()
    return differing(out, want)


def checks(schedule: Schedule) -> Iterator[Check]:
    """What ``schedule`` can run, small."""
    free = not schedule.swap
    layouts = [(x, y) for x in (False, True) for y in (False, True)]
    layouts = [(x, y) for x, y in layouts if schedule.fits(x, y)]
    for a_mn, b_mn in layouts:
        for m, n, k in ((512, 768, 512), (136, 328, 200), (1000, 520, 1096), (8, 72, 8), (2048, 1536, 320)):
            yield Check(m, n, k, a_mn, b_mn)
        yield Check(300, 520, 264, a_mn, b_mn, "float16", bias=True, data="special")
        yield Check(300, 520, 264, a_mn, b_mn, data="wide", bias=True)
        yield Check(300, 520, 264, a_mn, b_mn, data="special", bias=True, out="f32")
        yield Check(264, 136, 392, a_mn, b_mn, out="f32", accumulate=True)
        yield Check(264, 136, 392, a_mn, b_mn, out="f32", accumulate=True, pitch=137)
        yield Check(200, 136, 72, a_mn, b_mn, pitch=139)
        yield Check(264, 136, 392, a_mn, b_mn, pitch=144, data="special")
    if (True, True) in layouts and free:
        for lengths in ((64, 128), (1, 0, 17, 63, 0, 200, 64, 5), (333,), (16,) * 9, (0,)):
            t = sum(lengths)
            yield Check(264, 520, max(t, 1), True, True, lengths=lengths, out="f32", accumulate=True, data="special")
            yield Check(264, 520, max(t, 1), True, True, lengths=lengths, int64=True)
            yield Check(264, 520, t + 40, True, True, lengths=lengths, out="f32")
    yield Check(1, 8, 16)
    yield Check(3, 5, 24)
    yield Check(33, 4096, 4096)


# ---- speed

def operands(kind: str, m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16)
    if kind == "fwd":
        return make(m, k), make(n, k).T, torch.empty(m, n, device="cuda", dtype=BF16)
    if kind == "dx":
        return make(m, n), make(n, k), torch.empty(m, k, device="cuda", dtype=BF16)
    return make(m, n).T, make(m, k), torch.empty(n, k, device="cuda", dtype=BF16)


class Timer:
    """Contestants' graphs, replayed in turns."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.graphs: dict[str, Any] = {}
        self.times: dict[str, list[float]] = {}

    def add(self, name: str, function: Any, sets: list[Any]) -> None:
        for args in sets[:2]:
            function(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.calls):
                function(*sets[i % len(sets)])
        self.graphs[name] = graph
        self.times[name] = []

    def run(self, rounds: int) -> dict[str, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for r in range(rounds + 1):
            for name, graph in self.graphs.items():
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if r:
                    self.times[name].append(begin.elapsed_time(end) * 1e3 / self.calls)
        return {name: median(t) for name, t in self.times.items()}


def run_speed(kind: str, m: int, k: int, n: int, schedules: list[Schedule | None], say: Any) -> dict[str, Any]:
    one = 2 * (m * k + k * n + m * n)
    sets = [operands(kind, m, k, n) for _ in range(max(1, min(48, math.ceil(400e6 / one))))]
    a, b, out = sets[0]
    seqs = None
    if kind == "dwr":
        cuts = torch.randperm(m - 1)[: m // 512 - 1].add(1).sort().values
        seqs = torch.cat([torch.tensor([0]), cuts, torch.tensor([m])]).int().cuda()
    flops = 2 * m * n * k
    estimate = max(flops / 650e12, one / 4e12, 3e-6)
    timer = Timer(max(2, min(200, math.ceil(1.5e-3 / estimate))))
    timer.add("torch", lambda a, b, out: torch.mm(a, b, out=out), sets)
    want = torch.mm(a, b)
    reference, wrong = None, {}
    if seqs is not None:
        reference = want = naive(a, b, BF16, cu_seqlens=seqs)
    for s in schedules:
        name = name_of(s)
        say(name)
        out.fill_(math.nan)
        matmul_sm90.matmul(a, b, out, cu_seqlens=seqs, schedule=s)
        torch.cuda.synchronize()
        if differing(out, want):
            if reference is None:
                reference = naive(a, b, BF16)
            problem = differing(out, reference)
            if problem:
                wrong[name] = problem
                continue
        timer.add(name, lambda a, b, out, s=s: matmul_sm90.matmul(a, b, out, cu_seqlens=seqs, schedule=s), sets)
    rounds = 7 if estimate * timer.calls < 4e-3 else 5
    times = timer.run(rounds)
    return {"kind": kind, "m": m, "k": k, "n": n, "us": times, "wrong": wrong, "cublas_chain": reference is None}


def name_of(s: Schedule | None) -> str:
    if s is None:
        return "default"
    return (f"{s.block_m}x{s.block_n}x{s.block_k}s{s.stages}w{s.warpgroups}/{s.share}c{s.cluster_m}x{s.cluster_n}"
            f"g{s.group}b{s.blocks}{f'T{s.ahead}' if s.swap else ''}")


# ---- jobs, and a child process that does them

def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    todo: list[dict[str, Any]] = []
    if args.check:
        seen = dense() + narrow(128) + swapped()
        if args.check != "all":
            seen = seen[:: int(args.check)]
        todo += [{"job": "check", "schedule": dataclasses.asdict(s)} for s in seen]
    shapes = SHAPES if not args.shapes else [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    if args.speed:
        for m in map(int, args.m.split(",")):
            for k, n in shapes:
                for kind in args.kinds.split(","):
                    if kind != "fwd" and m < 512:
                        continue
                    if m * (k + n) > 1.2e9 / 2:
                        continue
                    todo.append({"job": "speed", "kind": kind, "m": m, "k": k, "n": n, "mode": args.speed})
    return todo


def schedules_for(job: dict[str, Any]) -> list[Schedule | None]:
    if job["mode"] == "default":
        return [None]
    m, k, n, kind = job["m"], job["k"], job["n"], job["kind"]
    rows, depth, columns = {"fwd": (m, k, n), "dx": (m, n, k)}.get(kind, (n, m, k))
    a_mn, b_mn = kind.startswith("dw"), kind != "fwd"
    return [None, *(s for s in suitable(rows, columns, depth, a_mn, b_mn))]


def compile_one(spec: runtime.KernelSpec) -> str:
    try:
        runtime.cached_cubin(spec, "sm_90a")
    except runtime.CompileError as error:
        return str(error)
    return ""


def child(path: str, begin: int) -> None:
    todo = json.loads(Path(path).read_text())
    torch.manual_seed(0)
    for i in range(begin, len(todo)):
        job = todo[i]

        def say(what: str, i: int = i) -> None:
            print(json.dumps({"at": i, "what": what}), flush=True)

        say("start")
        try:
            if job["job"] == "check":
                s = Schedule(**job["schedule"])
                bad, count = [], 0
                for c in checks(s):
                    say(f"{name_of(s)} {c}")
                    problem = run_check(c, s)
                    count += 1
                    if problem:
                        bad.append(f"{c}: {problem}")
                result = {"job": "check", "name": name_of(s), "checks": count, "bad": bad}
            else:
                result = run_speed(job["kind"], job["m"], job["k"], job["n"], schedules_for(job), say)
        except runtime.CompileError as error:
            result = {"error": str(error)[-300:], "job": job}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:600], "job": job}
            print(json.dumps({"at": i, "result": result}), flush=True)
            raise
        print(json.dumps({"at": i, "result": result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", help="all, or every how manieth schedule")
    parser.add_argument("--speed", choices=("tune", "default"))
    parser.add_argument("--m", default="1,16,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--kinds", default="fwd,dx,dw")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--limit", type=float, default=540, help="seconds")
    parser.add_argument("--out", default="sm90_tune.json")
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], int(args.child[1]))
        return
    deadline = time.monotonic() + args.limit
    todo = jobs(args)
    listing = Path(args.out + ".jobs")
    listing.write_text(json.dumps(todo))

    specs = set()
    for job in todo:
        if job["job"] == "check":
            s = Schedule(**job["schedule"])
            for c in checks(s):
                specs.add(matmul_sm90.spec(matmul_sm90.Case(
                    getattr(torch, c.dtype), F32 if c.out == "f32" else getattr(torch, c.dtype), c.a_mn, c.b_mn,
                    getattr(torch, c.dtype) if c.bias else None, c.accumulate,
                    (c.pitch or c.n) % (2 if c.out == "f32" else 8) == 0, c.k % 64 == 0,
                    (torch.int64 if c.int64 else torch.int32) if c.lengths else None), s))
        else:
            kind = job["kind"]
            for s in schedules_for(job):
                if s is not None:
                    specs.add(matmul_sm90.spec(matmul_sm90.Case(BF16, BF16, kind.startswith("dw"), kind != "fwd", folded=True,
                                                                bounds_dtype=torch.int32 if kind == "dwr" else None), s))
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        failed = [e for e in pool.map(compile_one, specs, chunksize=1) if e]
    print(f"{len(specs)} kernels compiled in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    for e in failed[:3]:
        print(e[:1500])

    results: list[dict[str, Any]] = []
    at = 0
    while at < len(todo) and time.monotonic() < deadline:
        at = watch(args, listing, at, results, deadline)
        Path(args.out).write_text(json.dumps(results))
    report(results)


def watch(args: argparse.Namespace, listing: Path, at: int, results: list[dict[str, Any]], deadline: float) -> int:
    """Run a child from job ``at``; returns where the next one should begin."""
    import select

    worker = subprocess.Popen([sys.executable, __file__, "--child", str(listing), str(at)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
    assert worker.stdout and worker.stderr
    what, quiet_limit = "start", 40
    while True:
        ready, _, _ = select.select([worker.stdout], [], [], quiet_limit)
        line = worker.stdout.readline() if ready else ""
        if not line or time.monotonic() > deadline:
            break
        message = json.loads(line)
        at = message["at"]
        if "result" in message:
            results.append(message["result"])
            print(summary(message["result"]), flush=True)
            what = "done"
        else:
            what = message["what"]
    worker.kill()
    errors = worker.stderr.read()[-800:]
    worker.wait()
    if what != "done":
        print(f"job {at}: stopped or hung at {what}", errors)
        results.append({"error": f"hung at {what}", "job": at})
    return at + 1


def summary(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"ERROR {r['error']} {r.get('job')}"
    if "bad" in r:
        return f"{'BAD' if r['bad'] else 'ok '} {r['name']} {r['checks']} checks {len(r['bad'])} bad {r['bad'][:2]}"
    base = r["us"]["torch"]
    times = sorted((t, name) for name, t in r["us"].items() if name not in ("torch", "default"))
    best = "  ".join(f"{name} {base / t:.3f}" for t, name in times[:4])
    default = base / r["us"]["default"] if "default" in r["us"] else 0
    wrong = f" WRONG {r['wrong']}" if r["wrong"] else ""
    return f"{r['kind']:3} {r['m']:5} {r['k']:5} {r['n']:5} torch {base:8.1f} us; default {default:.3f}; {best}{wrong}"


def report(results: list[dict[str, Any]]) -> None:
    """Speed against torch: the default schedule's, and that of the best one."""
    print("\nratio to torch.mm    default: geomean worst | best schedule: geomean worst")
    for kind in ("fwd", "dx", "dw", "dwr"):
        for low, high in ((1, 128), (256, 256), (512, 1 << 30)):
            rows = [r for r in results if r.get("kind") == kind and low <= r["m"] <= high and len(r["us"]) > 1]
            if not rows:
                continue
            default = [r["us"]["torch"] / r["us"]["default"] for r in rows if "default" in r["us"]]
            best = [r["us"]["torch"] / min(t for name, t in r["us"].items() if name != "torch") for r in rows]
            cells = [f"{geometric_mean(x):.3f} {min(x):.3f}" for x in (default, best) if x]
            print(f"{kind:3} M {low}..{high if high < 1 << 30 else ''}: {' | '.join(cells)}  ({len(rows)} cases)")
    bad = [r for r in results if r.get("bad") or r.get("wrong") or r.get("error")]
    print(f"{len(bad)} results bad of {len(results)}")


if __name__ == "__main__":
    main()
