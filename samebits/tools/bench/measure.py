"""One run of ``samebits bench``. Every case is checked for right bits before it is timed."""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits._version import __version__
from samebits.backends import UnavailableError, use_backend
from samebits.backends.product import Operands
from samebits.contract import FMA, TENSOR_CORE
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.matmul import matmul
from samebits.tools.bench.cases import (
    BF16,
    CASES,
    F32,
    HOST,
    ODD,
    PEERS,
    ROWS,
    BenchCase,
    Run,
    contestants,
    make_operands,
    packed_lengths,
)
from samebits.tools.bench.clock import ALONE, Race, how
from samebits.tools.seeds import seeded

Show = Callable[[float, str], None]


def check_bmm(case: BenchCase, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Raise AssertionError for wrong bits. Compares some matrices with the CPU's."""
    from samebits.backends.cuda.matmul import family
    from samebits.backends.reference import matmul as reference
    from samebits.testing import assert_same_bits

    some = torch.arange(case.batch - 1, -1, -(case.batch // 64 | 1), device=device)
    a, b = (t[some].cpu() for t in operands[:2])
    contract = FMA if case.dtype == F32 else TENSOR_CORE.on(family(device.index))
    want = reference.matmul(a, b, bias=None, out_dtype=case.dtype, contract=contract.key)
    assert_same_bits(ours(*operands)[some], want, f"{case}: against the CPU reference")


def check_logp(case: BenchCase, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Raise AssertionError for wrong bits. Compares some tokens with the CPU's."""
    from samebits.backends.cuda.matmul import family
    from samebits.testing import assert_same_bits

    x, weight, target = operands
    some = torch.tensor([0, case.m // 2, case.m - 1], device=device)
    contract = TENSOR_CORE.on(family(device.index))
    with use_backend("reference"):  # another backend may be chosen for the measurement
        want = linear_logp(x[some].cpu(), weight.cpu(), target[some].cpu(), contract=contract)
    assert_same_bits(ours(*operands)[some], want, f"{case}: against the CPU reference")


def check(case: BenchCase, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Raise AssertionError for wrong bits.

    Compares some rows with a universal kernel's, and some columns of those with the CPU's.
    """
    from samebits.backends.cuda.matmul import family
    from samebits.backends.cuda.products import fma, tensor_core
    from samebits.backends.reference import matmul as reference
    from samebits.testing import assert_same_bits

    if case.work in ("bmm", "logp"):
        check = check_bmm if case.work == "bmm" else check_logp
        check(case, operands, device, ours)
        return
    first, second = operands[:2]
    a, b = {"forward": (first, second.mT), "dX": (first, second)}.get(case.work, (first.mT, second))
    out = ours(*operands)
    # An odd step reaches every position in a tile. The last row is always included.
    rows = torch.arange(out.shape[0] - 1, -1, -(out.shape[0] // 16 | 1), device=device)
    cu_seqlens = None
    if case.work == "dW ragged":
        cu_seqlens = torch.tensor(
            [0, *itertools.accumulate(packed_lengths(case.m))], dtype=torch.int32, device=device
        )
    some = a[rows].contiguous()
    want = torch.full((len(rows), out.shape[1]), math.nan, dtype=out.dtype, device=device)
    if case.dtype == F32:
        fma.FMA.run(Operands(some, b, want), fma.SCHEDULES[-1])
    else:
        tensor_core.TENSOR_CORE.run(Operands(some, b, want, cu_seqlens=cu_seqlens))
    assert_same_bits(out[rows], want, f"{case}: rows {rows.tolist()}")
    columns = torch.arange(out.shape[1] - 1, -1, -(out.shape[1] // 32 | 1), device=device)
    x, y = some[:4].cpu()[None, None], b[:, columns].cpu()[None, None]
    key = FMA.key if case.dtype == F32 else TENSOR_CORE.on(family(device.index)).key
    if cu_seqlens is None:
        small = reference.matmul(x[0, 0], y[0, 0], bias=None, out_dtype=out.dtype, contract=key)
    else:
        small = reference.addbmm(None, x, y, cu_seqlens.cpu(), out_dtype=out.dtype, contract=key)[0]
    assert_same_bits(want[:4][:, columns].cpu(), small, f"{case}: against the CPU reference")


def _measure(case: BenchCase, device: torch.device, l2_bytes: int, peers: dict[str, Any]) -> dict[str, Any]:
    """Times of one case in microseconds."""
    count = max(1, min(64, math.ceil(4.5 * l2_bytes / case.bytes)))
    sets = [make_operands(case, device, torch.randn) for _ in range(count)]
    runs = contestants(case, device)
    check(case, sets[0], device, runs["samebits"])
    calls, by_itself = how(case.flop, case.bytes, case.dtype == F32)
    race = Race(calls)
    skipped = {}
    for name, run in runs.items():
        race.add(name, run, sets)
    for name, module in peers.items() if case.work == "forward" and case.dtype != F32 else ():
        try:
            theirs = [(x, PEERS[name].weight(w)) for x, w in sets]
            race.add(name, partial(PEERS[name].run, module), theirs)
        except Exception as error:  # another library's limits must not end the benchmark
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    us = race.alone() if by_itself else race.run(11)
    return case.record() | {"us": us} | ({"skipped": skipped} if skipped else {})


def _drift(k: int, n: int, device: torch.device) -> dict[str, Any]:
    """How many of the first M rows have other bits than in the largest batch, in cuBLAS and in samebits."""
    x = torch.randn((ROWS[-1], k), device=device, dtype=BF16)
    weight = torch.randn((n, k), device=device, dtype=BF16)
    changed: dict[str, list[int]] = {}
    for name, run in (("torch", torch.mm), ("samebits", matmul)):
        full = run(x, weight.mT).view(torch.int16)
        changed[name] = [
            int((run(x[:m], weight.mT).view(torch.int16) != full[:m]).any(1).sum()) for m in ROWS
        ]
    return {"k": k, "n": n, "rows": list(ROWS), "changed": changed}


def _host(m: int, k: int, n: int, device: torch.device) -> list[dict[str, Any]]:
    """The CPU launch overhead of one eager call, in microseconds."""
    x = torch.randn((m, k), device=device, dtype=BF16)
    weight = torch.randn((n, k), device=device, dtype=BF16)
    leaf = weight.clone().requires_grad_()
    operations: dict[str, tuple[Run, Run, Tensor]] = {
        "matmul": (lambda x, w: matmul(x, w.mT), lambda x, w: torch.mm(x, w.mT), weight),
        "linear": (linear, F.linear, weight),
        "linear, recording gradients": (linear, F.linear, leaf),
    }
    results = []
    for name, (ours, theirs, w) in operations.items():
        times: dict[str, list[float]] = {"samebits": [], "torch": []}
        for turn in range(16):
            for who, run in (("samebits", ours), ("torch", theirs)):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(300):
                    run(x, w)
                if turn:
                    times[who].append((time.perf_counter() - start) / 300 * 1e6)
        medians = {who: float(f"{statistics.median(t):.4g}") for who, t in times.items()}
        results.append({"operation": name, "m": m, "k": k, "n": n, "us": medians})
    return results


def ceilings(device: torch.device) -> dict[str, float]:
    """The bandwidth of a large copy and the speed of a large product on this GPU."""
    source = torch.empty(1 << 30, dtype=torch.int8, device=device).random_()
    a, b = (torch.randn((8192, 8192), device=device, dtype=BF16) for _ in range(2))
    race = Race(4)
    race.add("copy", torch.clone, [(source,)])
    race.add("product", torch.mm, [(a, b)])
    times = race.alone()
    return {
        "copy_bytes_per_s": 2 * source.numel() / times["copy"] * 1e6,
        "flop_per_s": 2 * 8192**3 / times["product"] * 1e6,
    }


def environment(index: int) -> dict[str, Any]:
    from samebits.backends.cuda import compiler, devices
    from samebits.backends.cuda.matmul import family

    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    contract = TENSOR_CORE.on(family(index))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": devices.device_info(index).name,
        "driver": driver,
        "contract": str(contract),
        "digest": contract.digest(),
        "versions": {
            "samebits": __version__,
            "torch": str(torch.__version__),
            "CUDA": str(torch.version.cuda),
            "NVRTC": compiler.nvrtc_version(),
        },
    }


def gpu(index: int) -> torch.device:
    """The CUDA device, or UnavailableError."""
    from samebits.backends.cuda import devices

    status = devices.status()
    if not status.available:
        raise UnavailableError(" → ".join(filter(None, (status.reason, status.remedy))))
    return torch.device("cuda", index)


def bench(
    cases: Iterable[BenchCase] = CASES,
    *,
    device: int = 0,
    peers: bool = False,
    backend: str | None = None,
    progress: Show = lambda done, what: None,
) -> dict[str, Any]:
    """Measure `cases`, cuBLAS's drift on their shapes, and the CPU launch overhead of a call.

    Args:
        cases: the cases.
        device: index of the CUDA device.
        peers: also measure those of `PEERS` that are installed.
        backend: the measured backend, as named by :func:`samebits.use_backend`. None is the automatic choice.
        progress: receives the fraction done, and the current work.

    Returns:
        The content of ``--json``: ``environment``, ``ceilings``, ``cases``, ``red`` (cases with other bits
        than specified, which are not timed), ``drift``, ``host``.

    Raises:
        samebits.backends.UnavailableError: no GPU can run this; the message says why.
    """
    from samebits.backends.cuda import devices, precompile

    where, todo = gpu(device), list(cases)
    with torch.cuda.device(device), seeded(), torch.no_grad(), use_backend(backend):

        def calls() -> Iterator[Callable[[], object]]:
            for case in todo:
                operands = make_operands(case, where, torch.empty)
                yield partial(contestants(case, where)["samebits"], *operands)

        progress(0.0, "choosing kernels")
        precompile.compile_for(calls(), lambda done, what: progress(0.1 * done, what))
        others = _installed(PEERS) if peers else {}
        data: dict[str, Any] = {"environment": environment(device), "ceilings": ceilings(where)}
        data["environment"] |= {"backend": backend or "automatic", "alone": ALONE}
        data["cases"], data["red"] = [], []
        for i, case in enumerate(todo):
            progress(0.1 + 0.8 * i / len(todo), f"{case.work}, M {case.m}, K {case.k}, N {case.n}")
            l2 = devices.device_info(device).l2_bytes
            try:
                data["cases"].append(_measure(case, where, l2, others))
            except AssertionError as error:
                data["red"].append(str(error))
        shapes = list(dict.fromkeys((c.k, c.n) for c in todo if c.work == "forward" and (c.k, c.n) != ODD))
        data["drift"] = []
        for i, (k, n) in enumerate(shapes):
            progress(0.9 + 0.08 * i / len(shapes), "rows that change with the batch")
            data["drift"].append(_drift(k, n, where))
    progress(0.98, "host")
    with torch.cuda.device(device), use_backend(backend):
        data["host"] = [line for shape in HOST for line in _host(*shape, where)]
    return data


def _installed(names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with suppress(Exception):  # not installed, or it does not run on this machine
            found[name] = importlib.import_module(name)
    return found
