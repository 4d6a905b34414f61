"""``samebits bench``: speed beside PyTorch (cuBLAS) on the shapes of common models, with the right bits.

Times are medians over replays of CUDA graphs, which rotate over enough operands to defeat the L2 cache. Where
arithmetic is the bound, so is power, and the clock follows the power of the last tenth of a second. There
each contestant runs alone for as long before it is timed, as in a program that uses no other, in two turns;
elsewhere they take turns at each replay. No time is taken of a case whose sampled rows differ from the
universal kernel's or the reference's.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from samebits._version import __version__
from samebits.backends import UnavailableError, chosen_backend, pack_key, use_backend
from samebits.backends.product import Operands
from samebits.contract import FMA, TENSOR_CORE
from samebits.ops.addmm import addmm_
from samebits.ops.bmm import bmm
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.matmul import matmul

__all__ = ["CASES", "MODELS", "ROWS", "SHAPES", "Case", "bench", "quick", "show"]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Show = Callable[[float, str], None]
Run = Callable[..., Tensor]


MODELS = {
    "Llama-3 8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "Llama-3 70B": ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)),
    "Qwen3 8B": ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)),
    "Qwen3 32B": ((5120, 10240), (8192, 5120), (5120, 51200), (25600, 5120)),
    "router": ((7168, 256),),
    "small": ((768, 3072), (3072, 768), (4096, 1024)),
}
"""(K, N) of the projections: queries, keys and values together; output; gate and up together; down."""

SHAPES = tuple(dict.fromkeys(itertools.chain(*MODELS.values())))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BETWEEN = (20, 48, 96, 160, 200, 300)
"""Rows that fill no tile of a power of two; at some shapes, and in no mean of `ROWS`."""


F32_SHAPES = (*MODELS["Llama-3 8B"], *MODELS["router"], *MODELS["small"])


@dataclass(frozen=True, slots=True)
class Case:
    """One product, or log-probabilities.

    Attributes:
        work: ``forward`` x @ weight.T, ``dX`` dy @ weight, ``dW`` dy.T @ x; or ``dW ragged``, over packed
            sequences of mean length 512, whose competitor is samebits' own dense ``dW``; or ``dW main_grad``,
            accumulated into float32, beside ``mm`` and ``add_``; or ``bmm``, a batch of a @ b, beside which
            a copy of as many bytes is timed; or ``logp``, ``linear_logp`` of m tokens under a vocabulary of
            n, beside logits that are stored, and the bare product.
        m: rows, or tokens.
        k, n: in and out features.
        dtype: of everything.
        batch: matrices, in ``bmm``.
    """

    work: Literal["forward", "dX", "dW", "dW ragged", "dW main_grad", "bmm", "logp"]
    m: int
    k: int
    n: int
    dtype: torch.dtype = BF16
    batch: int = 1

    @property
    def flop(self) -> int:
        return 2 * self.m * self.k * self.n * self.batch

    @property
    def bytes(self) -> int:
        """Of both operands and the result."""
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return self.dtype.itemsize * elements * self.batch

    def record(self) -> dict[str, Any]:
        """As it is written into results."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


TINY = (
    (1024, 12, 64, 12),
    (1024, 12, 12, 64),
    (4096, 16, 64, 16),
    (1024, 64, 64, 64),
    (1024, 32, 32, 32),
    (16384, 8, 8, 8),
    (65536, 4, 4, 4),
    (8192, 16, 16, 16),
    (4096, 32, 64, 32),
    (4096, 48, 16, 48),
    (4096, 64, 64, 64),
    (512, 64, 16, 64),
)
"""(batch, M, K, N) of batched products."""

ODD = (4095, 4096)
"""(K, N) whose rows the copy engine cannot read: products for the universal kernel."""

_BETWEEN_AT = ((4096, 28672), (14336, 4096), (8192, 8192), (5120, 10240))
_TRAINED = ((4096, 4096), (4096, 28672), (14336, 4096), (768, 3072))

CASES = (
    *(Case("forward", m, k, n) for k, n in SHAPES for m in ROWS),
    *(Case("forward", m, k, n) for k, n in _BETWEEN_AT for m in BETWEEN),
    *(Case(work, m, k, n) for work in ("dX", "dW") for k, n in SHAPES for m in ROWS if m >= 512),
    *(Case("forward", m, *ODD) for m in (16, 256, 4096)),
    *(Case("forward", m, k, n, F16) for k, n in MODELS["Llama-3 8B"] for m in ROWS),
    *(
        Case(work, m, k, n, F16)
        for work in ("dX", "dW")
        for k, n in MODELS["Llama-3 8B"]
        for m in (512, 2048, 8192)
    ),
    *(Case("forward", m, k, n, F32) for k, n in F32_SHAPES for m in (1, 8, 16, 32, 64, 128, 256, 512, 2048)),
    *(Case("dX", m, k, n, F32) for k, n in F32_SHAPES for m in (1, 16)),
    *(Case(work, m, k, n, F32) for work in ("dX", "dW") for k, n in F32_SHAPES for m in (512, 2048)),
    *(Case("dW ragged", m, k, n) for k, n in _TRAINED for m in (8192, 16384)),
    *(Case("dW main_grad", m, k, n) for k, n in _TRAINED for m in (2048, 8192)),
    *(Case("bmm", m, k, n, dtype, batch) for batch, m, k, n in TINY for dtype in (BF16, F32)),
    *(Case("logp", m, 4096, 151936) for m in (16, 256)),
    Case("logp", 4096, 2048, 131072),
)

ALONE = 0.08
"""Seconds after which a GPU's clock follows what runs alone."""

HOST = ((16, 256, 256), (1, 1024, 1024))
"""(M, K, N) at which a call costs the host more than the GPU."""

_QUICK = {(4096, 6144), (4096, 4096), (14336, 4096), (7168, 256), (768, 3072)}


def quick() -> tuple[Case, ...]:
    """A part of `CASES` that takes under a minute."""
    rows = (1, 16, 128, 256, 2048)
    return tuple(
        c
        for c in CASES
        if c.work == "bmm"
        or (c.work == "logp" and c.m == 256)
        or ((c.k, c.n) in _QUICK and (c.m in rows or c.work in ("dW ragged", "dW main_grad")))
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """Another batch-invariant ``x @ weight.T``: how it wants the weight, and the call."""

    weight: Callable[[Tensor], Tensor]
    run: Callable[[Any, Tensor, Tensor], Tensor]


PEERS = {
    "batch_invariant_ops": Peer(lambda w: w.mT, lambda module, x, w: module.matmul_persistent(x, w)),
    "sgemm_bi": Peer(
        lambda w: w.mT.contiguous(),
        lambda module, x, w: module.deterministic_linear(x, w, None, tensor_cores=True),
    ),
}
"""By the module that has to be installed."""


def _lengths(tokens: int) -> list[int]:
    """Lengths of sequences of mean 512, the same for every run: between 1 and 1023, most of them odd."""
    found, left, state = [], tokens, 1
    while left:
        state = state * 48271 % 2147483647
        found.append(min(left, 1 + state % 1023))
        left -= found[-1]
    return found


def _operands(case: Case, device: torch.device, make: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    def matrix(rows: int, columns: int) -> Tensor:
        return make((rows, columns), device=device, dtype=case.dtype)

    m, k, n = case.m, case.k, case.n
    if case.work == "bmm":
        a, b = (make((case.batch, *shape), device=device, dtype=case.dtype) for shape in ((m, k), (k, n)))
        return a, b, torch.empty(case.bytes // 2, device=device, dtype=torch.uint8)
    if case.work == "forward":
        return matrix(m, k), matrix(n, k)
    if case.work == "logp":
        return matrix(m, k), matrix(n, k), torch.randint(n, (m,), device=device)
    if case.work == "dX":
        return matrix(m, n), matrix(n, k)
    if case.work == "dW main_grad":
        return matrix(m, n), matrix(m, k), torch.zeros(n, k, device=device)
    return matrix(m, n), matrix(m, k)


def stored_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities in PyTorch, by way of logits in memory."""
    return -F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")


def _contestants(case: Case, device: torch.device) -> dict[str, Run]:
    """samebits, and what it is compared with."""
    if case.work == "forward":
        return {"samebits": lambda x, w: matmul(x, w.mT), "torch": lambda x, w: torch.mm(x, w.mT)}
    if case.work == "dX":
        return {"samebits": matmul, "torch": torch.mm}
    if case.work == "bmm":
        return {
            "samebits": lambda a, b, half: bmm(a, b),
            "torch": lambda a, b, half: torch.bmm(a, b),
            "copy": lambda a, b, half: half.clone(),
        }
    if case.work == "logp":
        return {
            "samebits": linear_logp,
            "torch": stored_logits,
            "product": lambda x, w, t: torch.mm(x, w.mT),
        }
    dense: Run = lambda dy, x: matmul(dy.mT, x)  # noqa: E731
    if case.work == "dW":
        return {"samebits": dense, "torch": lambda dy, x: torch.mm(dy.mT, x)}
    if case.work == "dW main_grad":
        return {
            "samebits": lambda dy, x, grad: addmm_(grad, dy.mT, x),
            "torch": lambda dy, x, grad: grad.add_(torch.mm(dy.mT, x)),
        }
    ends = torch.tensor([0, *itertools.accumulate(_lengths(case.m))], dtype=torch.int32, device=device)

    def ragged(dy: Tensor, x: Tensor) -> Tensor:
        key = pack_key(TENSOR_CORE.key, chosen_backend("cuda"))
        parts = dy.mT[None, None], x[None, None], ends, case.dtype, key
        out: Tensor = torch.ops.samebits.addbmm(None, *parts)
        return out[0]

    return {"samebits": ragged, "dense": dense}


def _check_bmm(case: Case, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Refuse wrong bits: some matrices against the CPU."""
    from samebits.backends.cuda.matmul import family
    from samebits.backends.reference import matmul as reference
    from samebits.testing import assert_same_bits

    some = torch.arange(case.batch - 1, -1, -(case.batch // 64 | 1), device=device)
    a, b = (t[some].cpu() for t in operands[:2])
    contract = FMA if case.dtype == F32 else TENSOR_CORE.on(family(device.index))
    want = reference.matmul(a, b, bias=None, out_dtype=case.dtype, contract=contract.key)
    assert_same_bits(ours(*operands)[some], want, f"{case}: against the CPU reference")


def _check_logp(case: Case, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Refuse wrong bits: some tokens against the CPU."""
    from samebits.backends.cuda.matmul import family
    from samebits.testing import assert_same_bits

    x, weight, target = operands
    some = torch.tensor([0, case.m // 2, case.m - 1], device=device)
    contract = TENSOR_CORE.on(family(device.index))
    with use_backend("reference"):  # whichever is measured
        want = linear_logp(x[some].cpu(), weight.cpu(), target[some].cpu(), contract=contract)
    assert_same_bits(ours(*operands)[some], want, f"{case}: against the CPU reference")


def _check(case: Case, operands: Sequence[Tensor], device: torch.device, ours: Run) -> None:
    """Refuse wrong bits: some rows against a universal kernel, some of their columns against the CPU."""
    from samebits.backends.cuda.matmul import family
    from samebits.backends.cuda.products import fma, tensor_core
    from samebits.backends.reference import matmul as reference
    from samebits.testing import assert_same_bits

    if case.work in ("bmm", "logp"):
        check = _check_bmm if case.work == "bmm" else _check_logp
        check(case, operands, device, ours)
        return
    first, second = operands[:2]
    a, b = {"forward": (first, second.mT), "dX": (first, second)}.get(case.work, (first.mT, second))
    out = ours(*operands)
    # An odd step meets every place in a tile; the last row is always among them.
    rows = torch.arange(out.shape[0] - 1, -1, -(out.shape[0] // 16 | 1), device=device)
    spans = None
    if case.work == "dW ragged":
        spans = torch.tensor([0, *itertools.accumulate(_lengths(case.m))], dtype=torch.int32, device=device)
    some = a[rows].contiguous()
    want = torch.full((len(rows), out.shape[1]), math.nan, dtype=out.dtype, device=device)
    if case.dtype == F32:
        fma.FMA.run(Operands(some, b, want), fma.SCHEDULES[-1])
    else:
        tensor_core.TENSOR_CORE.run(Operands(some, b, want, cu_seqlens=spans))
    assert_same_bits(out[rows], want, f"{case}: rows {rows.tolist()}")
    columns = torch.arange(out.shape[1] - 1, -1, -(out.shape[1] // 32 | 1), device=device)
    x, y = some[:4].cpu()[None, None], b[:, columns].cpu()[None, None]
    key = FMA.key if case.dtype == F32 else TENSOR_CORE.on(family(device.index)).key
    if spans is None:
        small = reference.matmul(x[0, 0], y[0, 0], bias=None, out_dtype=out.dtype, contract=key)
    else:
        small = reference.addbmm(None, x, y, spans.cpu(), out_dtype=out.dtype, contract=key)[0]
    assert_same_bits(want[:4][:, columns].cpu(), small, f"{case}: against the CPU reference")


class _Race:
    """Contestants as CUDA graphs of the same number of calls."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def add(self, name: str, run: Run, sets: Sequence[Sequence[Tensor]]) -> None:
        for operands in sets[:2]:
            run(*operands)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # As many outputs as operands stay alive, so that results do not live in the L2 cache either.
        outputs: list[Tensor | None] = [None] * len(sets)
        with torch.cuda.graph(graph):
            for i in range(self._calls):
                outputs[i % len(sets)] = run(*sets[i % len(sets)])
        self._graphs[name] = graph

    def run(self, rounds: int) -> dict[str, float]:
        """Median microseconds of a call, over so many turns of one replay."""
        times: dict[str, list[float]] = {name: [] for name in self._graphs}
        for turn in range(rounds + 1):
            names = list(self._graphs)
            for name in names if turn % 2 else reversed(names):
                found = self._replay(name)
                if turn:
                    times[name].append(found)
        return {name: _median(t) for name, t in times.items()}

    def alone(self) -> dict[str, float]:
        """Median microseconds of a call, of each contestant alone."""
        times = _alone({name: partial(self._replay, name) for name in self._graphs})
        return {name: _median(t) for name, t in times.items()}

    def _replay(self, name: str) -> float:
        """Microseconds of a call."""
        return _timed(self._graphs[name].replay) / self._calls


def _timed(run: Callable[[], object]) -> float:
    """Microseconds on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _alone(runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """What each returns over two turns, in which it is counted after ALONE seconds, five times at least.

    What runs first after a pause is slower: that turn does not count, and the order is A, B, B, A.
    """

    def heat(run: Callable[[], float]) -> int:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < ALONE:
            run()
            count += 1
        return count

    found: dict[str, list[float]] = {name: [] for name in runs}
    heat(runs[[*runs][-1]])
    for name in [*runs, *reversed(runs)]:
        found[name] += [runs[name]() for _ in range(max(5, heat(runs[name]) // 2))]
    return found


def _median(times: list[float]) -> float:
    return float(f"{statistics.median(times):.5g}")


def _measure(case: Case, device: torch.device, l2_bytes: int, peers: dict[str, Any]) -> dict[str, Any]:
    """Times of one case in microseconds."""
    count = max(1, min(64, math.ceil(4.5 * l2_bytes / case.bytes)))
    sets = [_operands(case, device, torch.randn) for _ in range(count)]
    contestants = _contestants(case, device)
    _check(case, sets[0], device, contestants["samebits"])
    arithmetic, memory = case.flop / (50e12 if case.dtype == F32 else 600e12), case.bytes / 3.5e12
    race = _Race(max(2, min(300, math.ceil(3e-3 / max(arithmetic, memory, 3e-6)))))
    skipped = {}
    for name, run in contestants.items():
        race.add(name, run, sets)
    for name, module in peers.items() if case.work == "forward" and case.dtype != F32 else ():
        try:
            theirs = [(x, PEERS[name].weight(w)) for x, w in sets]
            race.add(name, partial(PEERS[name].run, module), theirs)
        except Exception as error:  # another library's limits are not ours
            skipped[name] = f"{type(error).__name__}: {error}"[:200]
    us = race.alone() if arithmetic > memory else race.run(11)
    return case.record() | {"us": us} | ({"skipped": skipped} if skipped else {})


def _drift(k: int, n: int, device: torch.device) -> dict[str, Any]:
    """How many of the first M rows have other bits than in the largest batch, for cuBLAS and for samebits."""
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
    """Microseconds of the caller's time for one eager call."""
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


def _ceilings(device: torch.device) -> dict[str, float]:
    """What a large copy and a large product reach here."""
    source = torch.empty(1 << 30, dtype=torch.int8, device=device).random_()
    a, b = (torch.randn((8192, 8192), device=device, dtype=BF16) for _ in range(2))
    race = _Race(4)
    race.add("copy", torch.clone, [(source,)])
    race.add("product", torch.mm, [(a, b)])
    times = race.alone()
    return {
        "copy_bytes_per_s": 2 * source.numel() / times["copy"] * 1e6,
        "flop_per_s": 2 * 8192**3 / times["product"] * 1e6,
    }


def _environment(index: int) -> dict[str, Any]:
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


def bench(
    cases: Iterable[Case] = CASES,
    *,
    device: int = 0,
    peers: bool = False,
    backend: str | None = None,
    progress: Show = lambda done, what: None,
) -> dict[str, Any]:
    """Measure `cases`, cuBLAS's drift on their shapes, and the host's cost of a call.

    Args:
        cases: what to measure.
        device: index of the CUDA device.
        peers: measure those of `PEERS` that are installed, too.
        backend: measure this one, as :func:`samebits.use_backend` names it, in place of the automatic choice.
        progress: told the fraction done, and what is being done.

    Returns:
        What ``--json`` writes: ``environment``, ``ceilings``, ``cases``, ``red`` (cases with other bits than
        specified, of which no time is taken), ``drift``, ``host``.

    Raises:
        samebits.backends.UnavailableError: no GPU can run this; the message says why.
    """
    from samebits.backends.cuda import devices, precompile

    status = devices.status()
    if not status.available:
        raise UnavailableError(f"{status.reason}. {status.remedy}".strip())
    todo = list(cases)
    where = torch.device("cuda", device)
    with torch.cuda.device(device), torch.no_grad(), use_backend(backend):
        torch.manual_seed(0)

        def calls() -> Iterator[Callable[[], object]]:
            for case in todo:
                operands = _operands(case, where, torch.empty)
                yield partial(_contestants(case, where)["samebits"], *operands)

        progress(0.0, "choosing kernels")
        precompile.compile_for(calls(), lambda done, what: progress(0.1 * done, what))
        others = _installed(PEERS) if peers else {}
        data: dict[str, Any] = {"environment": _environment(device), "ceilings": _ceilings(where)}
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
        with suppress(Exception):  # not installed, or not for this machine
            found[name] = importlib.import_module(name)
    return found


def is_forward(case: dict[str, Any]) -> bool:
    """Whether a result is of a forward on rows that the copy engine can read."""
    return bool(case["work"] == "forward" and case["k"] != ODD[0])


BANDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "forward, M <= 128": lambda c: is_forward(c) and c["m"] in ROWS and c["m"] <= 128,
    "forward, M = 256": lambda c: is_forward(c) and c["m"] == 256,
    "forward, M >= 512": lambda c: is_forward(c) and c["m"] >= 512,
    f"forward, M {', '.join(map(str, BETWEEN))}": lambda c: is_forward(c) and c["m"] in BETWEEN,
    f"forward, K {ODD[0]}": lambda c: c["work"] == "forward" and c["k"] == ODD[0],
    "dX, M <= 128": lambda c: c["work"] == "dX" and c["m"] <= 128,
    "dX, M >= 512": lambda c: c["work"] == "dX" and c["m"] >= 512,
    "dW, M >= 512": lambda c: c["work"] == "dW",
    "forward, dX and dW, M >= 512": lambda c: (is_forward(c) or c["work"] in ("dX", "dW")) and c["m"] >= 512,
    "dW ragged / dense": lambda c: c["work"] == "dW ragged",
    "dW main_grad / mm, add_": lambda c: c["work"] == "dW main_grad",
    "tiny bmm": lambda c: c["work"] == "bmm",
    "log-probabilities": lambda c: c["work"] == "logp",
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed relative to the competitor's over some cases: above 1 is faster."""

    cases: int
    mean: float
    worst: float
    worst_case: dict[str, Any]


def ratio(case: dict[str, Any], who: str = "samebits") -> float:
    """How many times as fast as the competitor."""
    us = case["us"]
    return float(us.get("torch", us.get("dense")) / us[who])


def summary(cases: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Speed]:
    """Geometric mean and worst of every band, by dtype."""
    found, every = {}, list(cases)
    for dtype, (band, chosen) in itertools.product(("bfloat16", "float16", "float32"), BANDS.items()):
        some = [c for c in every if c["dtype"] == dtype and chosen(c)]
        if some:
            worst = min(some, key=ratio)
            mean = statistics.geometric_mean(map(ratio, some))
            found[dtype, band] = Speed(len(some), mean, ratio(worst), worst)
    return found


def forward(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of a grid of shapes and `ROWS`: forward, bfloat16."""
    return [c for c in data["cases"] if is_forward(c) and c["dtype"] == "bfloat16" and c["m"] in ROWS]


def show(data: dict[str, Any]) -> RenderableType:
    """Forward speed by shape and M, then the summary."""
    cases = forward(data)
    sizes = sorted({c["m"] for c in cases})
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    grid.title = Text("Forward, bf16: speed relative to torch.mm, by K, N and M", style="bold not italic")
    grid.add_column("K, N", no_wrap=True)
    for m in sizes:
        grid.add_column(str(m), justify="right", no_wrap=True)
    for k, n in dict.fromkeys((c["k"], c["n"]) for c in cases):
        by_m = {c["m"]: ratio(c) for c in cases if (c["k"], c["n"]) == (k, n)}
        grid.add_row(f"{k}, {n}", *(_speed(by_m[m]) if m in by_m else Text("") for m in sizes))
    host = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("an eager call costs the host, µs", "M, K, N", "samebits", "torch"):
        host.add_column(name, justify="left" if name[0] in "aM" else "right")
    for line in data["host"]:
        us, shape = line["us"], f"{line['m']}, {line['k']}, {line['n']}"
        host.add_row(line["operation"], shape, f"{us['samebits']:.1f}", f"{us['torch']:.1f}")
    drifting = sum(any(d["changed"]["torch"]) for d in data["drift"])
    ours = sum(any(d["changed"]["samebits"]) for d in data["drift"])
    text = Text(f"Rows change bits with M at {drifting} of {len(data['drift'])} shapes under torch.mm, at ")
    text.append(f"{ours} under samebits", "red bold" if ours else "green bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("speed relative to torch", "dtype", "cases", "geometric mean", "worst", "at M, K, N"):
        table.add_column(name, justify="left" if name[:2] in ("sp", "dt", "at") else "right")
    for (dtype, band), s in summary(data["cases"]).items():
        w = s.worst_case
        at = f"{w['work']} {w['m']}, {w['k']}, {w['n']}" + (f" x {w['batch']}" if w["work"] == "bmm" else "")
        table.add_row(band, dtype, str(s.cases), _speed(s.mean, 3), _speed(s.worst, 3), at)
    e = data["environment"]
    return Group(
        grid,
        "",
        host,
        "",
        text,
        Text(f"{e['gpu']}, driver {e['driver']}, digest {e['digest']}", "dim"),
        table,
    )


def _speed(x: float, digits: int = 2) -> Text:
    return Text(f"{x:.{digits}f}", style="green" if x >= 1 else "default" if x >= 0.95 else "yellow")
