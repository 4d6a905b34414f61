"""Bits and speed of every schedule of ``matmul_sm90`` on a Hopper GPU, against ``torch.mm`` in the same run.

    python benchmarks/sm90_tune.py --check 4 --speed tune --out results.json

Each product is checked before it is timed: raw bits against a naive kernel, outputs poisoned. Times are as
``samebits bench`` takes them. The work runs in a child process: one that hangs is ended and the rest goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
from samebits.backends.cuda.schedule import (  # noqa: E402
    Product,
    Schedule,
    _schedule,
    _settle,
    catalogue,
    choose,
    estimate,
    menu,
)
from samebits.tools.bench.clock import Race  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
    (4096, 1024),
    (8192, 8192),
    (7168, 256),
    (768, 3072),
    (3072, 768),
    (8192, 10240),
    (8192, 57344),
    (28672, 8192),
    (5120, 10240),
    (5120, 51200),
    (25600, 5120),
    (4096, 24576),
    (12288, 4096),
    (8192, 5120),
]


# ---- schedules to try


def product(kind: str, m: int, k: int, n: int) -> Product:
    """What a forward pass of [m, k] and [n, k], or its backward, multiplies."""
    if kind == "fwd":
        return Product(m, n, k)
    return Product(m, k, n, b_mn=True) if kind == "dx" else Product(n, k, m, a_mn=True, b_mn=True)


def contestants(job: dict[str, Any]) -> list[Schedule]:
    """The chosen schedule first; then the next best ones, all that might be chosen, or more than that."""
    p = product(job["kind"], job["m"], job["k"], job["n"])
    chosen = choose(p, 132)
    if job["mode"] == "wide":
        return list(dict.fromkeys([chosen, *wide(p)]))
    others = menu(p, 132)
    if job["mode"] == "near":
        near = list(dict.fromkeys([chosen, *sorted(others, key=lambda s: estimate(s, p, 132))[:5]]))
        found = [chosen, *(_settle(s, p, 132) for s in near)]
        for s in near:
            deep = _schedule(p, s.block_m, s.block_n, 128) if s.warpgroups == 1 and not s.swap else s
            for one, early, group in itertools.product((s, deep), (True, False), (1, 2, 16)):
                if one.stages >= 3:
                    found.append(dataclasses.replace(one, early=early, group=group))
        return list(dict.fromkeys(found))
    found = [chosen]
    for s in others:
        for early in (True, False):
            for group in (1, 16) if s.block_m > s.block_n else (16,):
                found.append(dataclasses.replace(s, early=early, group=group))
    return list(dict.fromkeys(found))


def wide(p: Product) -> Iterator[Schedule]:
    """More than the menu, to see what it lacks."""
    if p.m <= 16:
        for rows, depth, blocks, early in itertools.product(
            (16, 24, 32, 48, 64), (128, 256, 512, 1024), (1, 2, 4), (False, True)
        ):
            s = _schedule(p, rows, 8 if p.m <= 8 else 16, depth, swap=True, blocks=blocks)
            if s.stages >= 3 and (early or (rows in (32, 64) and blocks < 4)):
                yield dataclasses.replace(s, early=early)
    elif p.m <= 128:
        for rows, tokens, depth, blocks, cluster in itertools.product(
            (16, 24, 32, 64), (16, 24, 32, 64, 128), (64, 128, 256, 512), (1, 2), (1, 2, 4)
        ):
            s = _schedule(p, rows, tokens, depth, swap=True, blocks=blocks)
            if s.stages < 3 or rows // cluster % 8 or (cluster > 1 and blocks == 2):
                continue
            yield dataclasses.replace(s, early=True, cluster=cluster)
        for block_n, depth, early in itertools.product((24, 32, 48, 64, 96), (64, 128, 256), (False, True)):
            s = _schedule(p, 64, block_n, depth)
            if s.stages >= 3:
                yield dataclasses.replace(s, early=early)
    elif p.m * p.n > 132 * 128 * 256 or p.a_mn:
        for (block_m, block_n, share), early, cluster in itertools.product(
            (
                *((128, 128, 1), (192, 96, 1), (192, 128, 1), (128, 192, 1), (128, 160, 1), (128, 224, 2)),
                *((128, 256, 2), (256, 128, 2), (256, 160, 2), (256, 192, 2)),
            ),
            (False, True),
            (1, 2),
        ):
            s = _schedule(p, block_m, block_n, 64, 2, share)
            yield dataclasses.replace(s, cluster=cluster, early=early)
    else:
        for (block_m, block_n), (warpgroups, depth), cluster, early in itertools.product(
            ((64, 32), (64, 48), (64, 64), (64, 96), (64, 128), (128, 64), (128, 80), (128, 96)),
            ((1, 64), (1, 128), (2, 64)),
            (1, 2, 4),
            (False, True),
        ):
            s = _schedule(p, block_m, block_n, depth, warpgroups, 1)
            if s.stages < 3 or (warpgroups == 1 and block_m * block_n > 8192):
                continue
            yield dataclasses.replace(s, cluster=cluster, early=early)


# ---- the naive kernel


def naive(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The definition: chains from ``start``, then bias, then one rounding; NaN canonical."""
    m, k = a.shape
    n = b.shape[1]
    acc = torch.zeros(m, n, device=a.device) if start is None else start.clone()
    bounds = torch.tensor([0, k], device=a.device) if cu_seqlens is None else cu_seqlens.long()
    spec = runtime.KernelSpec(
        str(HERE / "chain_naive.cu"),
        "chain",
        "PPPPqqqqiiii",
        (("INPUT", '"bf16"' if a.dtype == BF16 else '"f16"'),),
        32,
    )
    runtime.load(spec, a.get_device()).launch(
        (-(-n // 64), -(-m // 16), 1),
        a.data_ptr(),
        b.data_ptr(),
        acc.data_ptr(),
        bounds.data_ptr(),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        m,
        n,
        bounds.numel() - 1,
        0,
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


def fill(
    shape: tuple[int, int], dtype: torch.dtype, data: str, seed: int, transposed: bool, device: str = "cuda"
) -> Tensor:
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
    batch: int = 0  # with b the same for all


def run_check(c: Check, schedule: Schedule | None) -> str:
    dtype = getattr(torch, c.dtype)
    out_dtype = F32 if c.out == "f32" else dtype
    a = fill((c.m, c.k), dtype, c.data, 1, c.a_mn)
    b = fill((c.k, c.n), dtype, c.data, 2, not c.b_mn)
    bias = torch.randn(c.n, device="cuda").to(dtype) if c.bias else None
    seqs = None
    if c.lengths:
        seqs = (
            torch.tensor((0, *c.lengths), device="cuda").cumsum(0).to(torch.int64 if c.int64 else torch.int32)
        )
    if c.batch:
        more = torch.stack([fill((c.m, c.k), dtype, c.data, i, c.a_mn) for i in range(c.batch)])
        out = torch.full((c.batch, c.m, c.n), math.nan, dtype=out_dtype, device="cuda")
        matmul_sm90.matmul(more, b.expand(c.batch, c.k, c.n), out, schedule=schedule)
        return "".join(differing(out[i], naive(more[i], b, out_dtype)) for i in range(c.batch))
    out = poison(c.m, c.n, out_dtype, c.pitch or c.n)
    start = None
    if c.accumulate:
        start = torch.randn(c.m, c.n, device="cuda")
        out.copy_(start)
    want = naive(a, b, out_dtype, bias=bias, start=start, cu_seqlens=seqs)
    matmul_sm90.matmul(a, b, out, bias=bias, accumulate=c.accumulate, cu_seqlens=seqs, schedule=schedule)
    torch.cuda.synchronize()
    return differing(out, want)


def checks(schedule: Schedule | None, a_mn: bool, b_mn: bool) -> Iterator[Check]:
    """What a schedule can run, small; all that the default can."""
    for m, n, k in ((512, 768, 512), (136, 328, 200), (1000, 520, 1096), (8, 72, 8), (2048, 1536, 320)):
        yield Check(m, n, k, a_mn, b_mn)
    yield Check(304, 520, 264, a_mn, b_mn, "float16", bias=True, data="special")
    yield Check(304, 520, 264, a_mn, b_mn, data="wide", bias=True)
    yield Check(304, 520, 264, a_mn, b_mn, data="special", bias=True, out="f32")
    yield Check(264, 136, 392, a_mn, b_mn, out="f32", accumulate=True)
    yield Check(264, 136, 392, a_mn, b_mn, out="f32", accumulate=True, pitch=137)
    yield Check(200, 136, 72, a_mn, b_mn, pitch=139)
    yield Check(264, 136, 392, a_mn, b_mn, pitch=144, data="special")
    yield Check(72, 136, 264, a_mn, b_mn, batch=3)
    if a_mn and b_mn:
        for lengths in ((64, 128), (1, 0, 17, 63, 0, 200, 64, 5), (333,), (16,) * 9, (0,)):
            t = sum(lengths)
            yield Check(
                264, 520, max(t, 1), True, True, lengths=lengths, out="f32", accumulate=True, data="special"
            )
            yield Check(264, 520, max(t, 1), True, True, lengths=lengths, int64=True)
            yield Check(264, 520, t + 40, True, True, lengths=lengths, out="f32")
    if not a_mn and not b_mn:
        yield Check(1, 8, 16)
        yield Check(3, 5, 24)
        yield Check(33, 4096, 4096)
    if schedule is None:
        for m in (1, 2, 5, 16, 17, 40, 64, 100, 128, 129, 256, 300):
            for n, k in ((256, 7168), (1000, 256), (4096, 512), (6144, 64), (28672, 192)):
                yield Check(_up(m, 8) if a_mn else m, n, k, a_mn, b_mn, bias=m % 2 == 0)


def _up(x: int, step: int) -> int:
    return -(-x // step) * step


# ---- speed


def operands(kind: str, m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=BF16)

    if kind == "fwd":
        return make(m, k), make(n, k).T, torch.empty(m, n, device="cuda", dtype=BF16)
    if kind == "dx":
        return make(m, n), make(n, k), torch.empty(m, k, device="cuda", dtype=BF16)
    return make(m, n).T, make(m, k), torch.empty(n, k, device="cuda", dtype=BF16)


class _Told(Race):
    """Says who runs, so that a race of many is not taken for one that hangs."""

    def __init__(self, calls: int, say: Any) -> None:
        super().__init__(calls)
        self._say = say

    def _replay(self, name: str) -> float:
        self._say(name)
        return super()._replay(name)


def run_speed(kind: str, m: int, k: int, n: int, schedules: list[Schedule], say: Any) -> dict[str, Any]:
    one = 2 * (m * k + k * n + m * n)
    sets = [operands(kind, m, k, n) for _ in range(max(1, min(48, math.ceil(400e6 / one))))]
    a, b, out = sets[0]
    seqs = None
    if kind == "dwr":
        cuts = torch.randperm(m - 1)[: m // 512 - 1].add(1).sort().values
        seqs = torch.cat([torch.tensor([0]), cuts, torch.tensor([m])]).int().cuda()
    flops = 2 * m * n * k
    estimate = max(flops / 650e12, one / 4e12, 3e-6)
    race = _Told(max(2, min(300, math.ceil(3e-3 / estimate))), say)
    race.add("torch", lambda a, b, out: torch.mm(a, b, out=out), sets)
    want = torch.mm(a, b)
    reference, wrong = None, {}
    if seqs is not None:
        reference = want = naive(a, b, BF16, cu_seqlens=seqs)
    for i, s in enumerate(schedules):
        name = name_of(s) + ("" if i else " chosen")
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

        def run(a: Tensor, b: Tensor, out: Tensor, s: Schedule = s) -> Tensor:
            matmul_sm90.matmul(a, b, out, cu_seqlens=seqs, schedule=s)
            return out

        race.add(name, run, sets)
    times = race.alone() if m >= 256 else race.run(7)
    return {
        "kind": kind,
        "m": m,
        "k": k,
        "n": n,
        "us": times,
        "wrong": wrong,
        "cublas_chain": reference is None,
    }


def name_of(s: Schedule | None) -> str:
    if s is None:
        return "default"
    flags = ("T" if s.swap else "") + (f"a{s.ahead}" if s.ahead else "") + ("e" if s.early else "")
    return (
        f"{s.block_m}x{s.block_n}x{s.block_k}s{s.stages}w{s.warpgroups}/{s.share}c{s.cluster}"
        f"g{s.group}b{s.blocks}{flags}"
    )


def host_cost() -> dict[str, float]:
    """Microseconds of an eager call, the GPU kept out of it by small sizes."""
    a, b, out = operands("fwd", 16, 256, 256)
    cost = {}
    for name, function in (
        ("torch.mm", lambda: torch.mm(a, b, out=out)),
        ("matmul_sm90", lambda: matmul_sm90.matmul(a, b, out)),
    ):
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(500):
                function()
            times.append((time.perf_counter() - begin) / 500 * 1e6)
        cost[name] = median(times)
    return cost


# ---- jobs, and a child process that does them


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    todo: list[dict[str, Any]] = []
    if args.check:
        for a_mn, b_mn in ((x, y) for x in (False, True) for y in (False, True)):
            chosen = [None, *catalogue(a_mn, b_mn)[:: args.check]]
            todo += [
                {"job": "check", "schedule": s and dataclasses.asdict(s), "a_mn": a_mn, "b_mn": b_mn}
                for s in chosen
            ]
    if args.host:
        todo.append({"job": "host"})
    shapes = SHAPES if not args.shapes else [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    for case in args.cases.split(",") if args.cases else ():
        kind, *sizes = case.split(":")
        m, k, n = map(int, sizes)
        todo.append({"job": "speed", "kind": kind, "m": m, "k": k, "n": n, "mode": args.speed})
    if args.speed and not args.cases:
        for m in map(int, args.m.split(",")):
            for k, n in shapes:
                for kind in args.kinds.split(","):
                    if kind != "fwd" and m < 512:
                        continue
                    if m * (k + n) > 1.2e9 / 2:
                        continue
                    todo.append({"job": "speed", "kind": kind, "m": m, "k": k, "n": n, "mode": args.speed})
    return todo


def specs_of(job: dict[str, Any]) -> Iterator[runtime.KernelSpec]:
    """The kernels that a job will load, as far as they are known ahead."""
    if job["job"] == "speed":
        p = product(job["kind"], job["m"], job["k"], job["n"])
        ragged = torch.int32 if job["kind"] == "dwr" else None
        for s in contestants(job):
            folded = p.k % 64 == 0
            case = matmul_sm90.Case(BF16, BF16, p.a_mn, p.b_mn, folded=folded, bounds_dtype=ragged)
            yield matmul_sm90.spec(case, s)
    elif job["job"] == "check":
        for c in checks(job["schedule"] and Schedule(**job["schedule"]), job["a_mn"], job["b_mn"]):
            moved = (4 if c.out == "f32" else 2) * (2 if c.accumulate else 1)
            s = (
                Schedule(**job["schedule"])
                if job["schedule"]
                else choose(Product(c.m, c.n, c.k, c.batch or 1, c.a_mn, c.b_mn, moved), 132)
            )
            dtype = getattr(torch, c.dtype)
            aligned = (c.pitch or c.n) % (2 if c.out == "f32" else 8) == 0
            bounds = None if not c.lengths else torch.int64 if c.int64 else torch.int32
            yield matmul_sm90.spec(
                matmul_sm90.Case(
                    dtype,
                    F32 if c.out == "f32" else dtype,
                    c.a_mn,
                    c.b_mn,
                    dtype if c.bias else None,
                    c.accumulate,
                    aligned,
                    c.k % 64 == 0,
                    bounds,
                ),
                s,
            )


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
                s = job["schedule"] and Schedule(**job["schedule"])
                bad, count = [], 0
                for c in checks(s, job["a_mn"], job["b_mn"]):
                    say(f"{name_of(s)} {c}")
                    problem = run_check(c, s)
                    count += 1
                    if problem:
                        bad.append(f"{c}: {problem}")
                layout = ("T" if job["a_mn"] else "N") + ("N" if job["b_mn"] else "T")
                result = {"job": "check", "name": f"{layout} {name_of(s)}", "checks": count, "bad": bad}
            elif job["job"] == "host":
                result = {"host": host_cost()}
            else:
                result = run_speed(job["kind"], job["m"], job["k"], job["n"], contestants(job), say)
        except runtime.CompileError as error:
            result = {"error": str(error)[-300:], "job": job}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:600], "job": job}
            print(json.dumps({"at": i, "result": result}), flush=True)
            raise
        print(json.dumps({"at": i, "result": result}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=int, help="every how manieth schedule; 1: all")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--speed", choices=("near", "tune", "wide"))
    parser.add_argument("--m", default="1,16,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--kinds", default="fwd,dx,dw")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--cases", default="", help="instead of those: fwd:16:4096:1024,...")
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

    specs = {spec for job in todo for spec in specs_of(job)}
    began = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        failed = [e for e in pool.map(compile_one, specs, chunksize=1) if e]
    print(
        f"{len(specs)} kernels compiled in {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True
    )
    for e in failed[:3]:
        print(e[:1500])

    results: list[dict[str, Any]] = []
    at = 0
    while at < len(todo) and time.monotonic() < deadline:
        at = watch(args, listing, at, results, deadline)
        Path(args.out).write_text(json.dumps(results))
    report(results)


def watch(
    args: argparse.Namespace, listing: Path, at: int, results: list[dict[str, Any]], deadline: float
) -> int:
    """Run a child from job ``at``; returns where the next one should begin."""
    import select

    worker = subprocess.Popen(
        [sys.executable, __file__, "--child", str(listing), str(at)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout
    assert worker.stderr
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
    if "host" in r:
        return f"host cost of a call, us: {r['host']}"
    if "bad" in r:
        state = "BAD" if r["bad"] else "ok "
        return f"{state} {r['name']} {r['checks']} checks {len(r['bad'])} bad {r['bad'][:2]}"
    base = r["us"]["torch"]
    times = sorted((t, name) for name, t in r["us"].items() if name != "torch")
    best = "  ".join(f"{name} {base / t:.3f}" for t, name in times[: 14 if len(times) > 60 else 4])
    wrong = f" WRONG {r['wrong']}" if r["wrong"] else ""
    chosen = next((base / t for t, name in times if name.endswith("chosen")), 0)
    case = f"{r['kind']:3} {r['m']:5} {r['k']:5} {r['n']:5}"
    return f"{case} torch {base:8.1f} us; chosen {chosen:.3f}; {best}{wrong}"


def report(results: list[dict[str, Any]]) -> None:
    """Speed against torch: of the chosen schedules, and of the best ones tried."""
    print("\nspeed against torch.mm    chosen: geomean, worst | best tried: geomean, worst")
    for kind in ("fwd", "dx", "dw", "dwr", ""):
        for low, high in ((1, 128), (256, 256), (512, 1 << 30)):
            rows = [
                r
                for r in results
                if kind in (r.get("kind"), "")
                and "us" in r
                and r.get("kind") != "dwr" * (not kind)
                and low <= r["m"] <= high
                and len(r["us"]) > 1
            ]
            if not rows:
                continue
            chosen = [
                r["us"]["torch"] / t for r in rows for name, t in r["us"].items() if name.endswith("chosen")
            ]
            best = [r["us"]["torch"] / min(t for name, t in r["us"].items() if name != "torch") for r in rows]
            cells = [f"{geometric_mean(x):.3f} {min(x):.3f}" for x in (chosen, best) if x]
            span = f"{low}..{high if high < 1 << 30 else ''}"
            print(f"{kind or 'all':3} M {span}: {' | '.join(cells)}  ({len(rows)} cases)")
    bad = [r for r in results if r.get("bad") or r.get("wrong") or r.get("error")]
    print(f"{len(bad)} results bad of {len(results)}")


if __name__ == "__main__":
    main()
