"""What a call costs the CPU, in PyTorch and in both forms of the mode: benchmarks/results/<gpu>/host.json.

python -m benchmarks host [--device cpu] [--commit COMMIT] [--out FILE]

Calls are small, and no loop waits for the GPU. Each form has a process of its own, since what the switch of
the process registers stays. They take turns at every call, as :mod:`benchmarks.turns` says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, save
from benchmarks.turns import processes

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Of x[16, 256], w[256, 256], b[256] and ids[16].
COVERED: dict[str, Call] = {
    "mm": lambda x, w, b, ids: torch.mm(x, w),
    "matmul": lambda x, w, b, ids: x @ w,
    "bmm": lambda x, w, b, ids: torch.bmm(x[None], w[None]),
    "addmm": lambda x, w, b, ids: torch.addmm(b, x, w),
    "linear": lambda x, w, b, ids: F.linear(x, w, b),
    "softmax": lambda x, w, b, ids: x.softmax(-1),
    "log_softmax": lambda x, w, b, ids: x.log_softmax(-1),
    "cross_entropy": lambda x, w, b, ids: F.cross_entropy(x, ids),
    "layer_norm": lambda x, w, b, ids: F.layer_norm(x, (256,), b, b),
    "rms_norm": lambda x, w, b, ids: F.rms_norm(x, (256,), b),
    "sum": lambda x, w, b, ids: x.sum(-1),
    "mean": lambda x, w, b, ids: x.mean(-1),
    "norm": lambda x, w, b, ids: x.norm(dim=-1),
    "embedding": lambda x, w, b, ids: F.embedding(ids, w),
    "attention": lambda x, w, b, ids: F.scaled_dot_product_attention(
        *(x.view(1, 16, 4, 64).transpose(1, 2),) * 3, is_causal=True
    ),
}
UNCOVERED: dict[str, Call] = {
    "a + a": lambda x, w, b, ids: x + x,
    "view": lambda x, w, b, ids: x.view(-1),
    "relu": lambda x, w, b, ids: x.relu(),
    "cat": lambda x, w, b, ids: torch.cat((x, x)),
    "where": lambda x, w, b, ids: torch.where(x > 0, x, 0),
}
FORMS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torch": nullcontext,
    "context": lambda: samebits.batch_invariant("ignore"),
    "process": lambda: samebits.set_batch_invariant_mode(True, "ignore"),
}


Key = tuple[str, str, bool]
TURNS = 9


def calls(device: str) -> dict[Key, Callable[[], object]]:
    """Every call, by its name, what is done, and whether it is covered."""
    x, w = (torch.randn(n, 256, device=device, dtype=torch.bfloat16) for n in (16, 256))
    b, ids = torch.ones(256, device=device, dtype=torch.bfloat16), torch.arange(16).to(device)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    found: dict[Key, Callable[[], object]] = {}
    for covered, some in ((True, COVERED), (False, UNCOVERED)):
        for name, f in some.items():
            recorded = partial(f, leaves[0], leaves[1], leaves[2], ids)
            found[name, "no gradient", covered] = plain = partial(f, x, w, b, ids)
            found[name, "recorded", covered] = recorded
            if covered:
                grad = torch.ones_like(plain())
                found[name, "and backward", covered] = partial(_and_backward, recorded, leaves, grad)
    return found


def _and_backward(run: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> object:
    return torch.autograd.grad(run(), leaves, grad, allow_unused=True)


def serve(device: str, count: int, form: str, turns: Connection) -> None:
    """Answer every key with the microseconds of its call, over `count` of them, until None comes."""
    with FORMS[form]():
        todo = calls(device)
        turns.send(list(todo))
        while (key := turns.recv()) is not None:
            call = todo[key]
            start = time.perf_counter()
            for _ in range(count):
                call()
            took = time.perf_counter() - start
            if device == "cuda":
                torch.cuda.synchronize()
            turns.send(took / count * 1e6)


def measure(device: str, count: int) -> dict[Key, dict[str, float]]:
    """Microseconds of every call in each form: medians of turns, of which the first does not count."""
    found = {}
    with processes(partial(serve, device, count), FORMS) as forms:
        keys = {form: of.recv() for form, of in forms.items()}
        for key in keys["torch"]:
            times: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(TURNS + 1):
                for form, turns in forms.items():
                    turns.send(key)
                    times[form].append(turns.recv())
            found[key] = {form: float(f"{statistics.median(t[1:]):.4g}") for form, t in times.items()}
        for turns in forms.values():
            turns.send(None)
    return found


def ratios(data: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Geometric means beside PyTorch of the context and of the process, by what is done."""
    found = []
    for covered in (True, False):
        cases = [c for c in data["cases"] if c["covered"] == covered]
        for work in dict.fromkeys(c["work"] for c in cases):
            us = [c["us"] for c in cases if c["work"] == work]
            context, process = (
                statistics.geometric_mean(t[form] / t["torch"] for t in us) for form in ("context", "process")
            )
            found.append((f"{'covered' if covered else 'not covered'}, {work}", context, process))
    return found


def show(data: dict[str, Any]) -> Table:
    table = Table("call", "", *(f"{form}, us" for form in FORMS))
    for case in data["cases"]:
        table.add_row(case["call"], case["work"], *(f"{case['us'][form]:.1f}" for form in FORMS))
    for what, context, process in ratios(data):
        table.add_row(f"/ torch: {what}", "", "1", f"{context:.2f}", f"{process:.2f}")
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--count", type=int, default=100, help="calls in a turn")
    options = parser.parse_args()
    if samebits.is_batch_invariant_mode_enabled():
        parser.error("the process is in the mode already")
    record, found = environment(options.commit), measure(options.device, options.count)
    cases = [
        {"call": name, "work": work, "covered": covered, "us": us}
        for (name, work, covered), us in found.items()
    ]
    data = {"environment": record, "cases": cases}
    Console(width=110).print(show(data))
    if options.out or options.device == "cuda":
        save(options.out, "host.json", data)
