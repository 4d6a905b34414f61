"""Time and memory of log-probabilities in samebits, torch and other libraries.

python -m benchmarks logp [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/logp.json. Times are medians of eager calls, which include the check of
targets, and of CUDA graphs, without CPU launch overhead. Each contestant runs alone before it is timed, until
the clock follows its power. Cases with wrong bits are not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, save
from samebits.testing import assert_same_bits
from samebits.tools.bench import BenchCase
from samebits.tools.bench.cases import stored_logits
from samebits.tools.bench.clock import alone, timed
from samebits.tools.bench.measure import check_logp
from samebits.tools.graphs import capture


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens, features and vocabulary, in bfloat16."""

    tokens: int
    d: int
    v: int


CASES = (
    Case(4096, 2048, 131072),
    Case(4096, 4096, 151936),
    Case(256, 4096, 151936),
    Case(16, 4096, 151936),
)
PRODUCT = "product (torch.mm)"
"""The product alone, for comparison."""
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def _triton(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with samebits.use_backend("triton"):
        return samebits.linear_logp(x, weight, target)


def contestants() -> dict[str, Run]:
    """The contestants that are installed."""
    found: dict[str, Run] = {
        "samebits": samebits.linear_logp,
        "samebits, Triton": _triton,
        "torch": stored_logits,
    }
    try:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        found["cut_cross_entropy"] = lambda x, w, t: -linear_cross_entropy(x, w, t, reduction="none")
    except ImportError:
        pass
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger_kernel"] = lambda x, w, t: -liger_fused_linear_cross_entropy(x, w, t, reduction="none")
    except ImportError:
        pass
    return found


def check(case: Case, x: Tensor, weight: Tensor, target: Tensor) -> None:
    """Raise for wrong bits: compares Triton with CUDA, and a few tokens with the CPU reference."""
    assert_same_bits(_triton(x, weight, target), samebits.linear_logp(x, weight, target))
    product = BenchCase("logp", case.tokens, case.d, case.v)
    check_logp(product, (x, weight, target), x.device, samebits.linear_logp)


def times(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds."""
    for run in runs.values():
        run()  # compiles its kernels
    found = alone({name: partial(timed, run) for name, run in runs.items()})
    return {name: float(f"{statistics.median(t) / 1e3:.4g}") for name, t in found.items()}


def graphs(runs: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Replays of the functions that can be captured."""
    found: dict[str, Callable[[], object]] = {}
    stream = torch.cuda.Stream()
    for name, run in runs.items():
        with torch.cuda.stream(stream):
            run()
        with suppress(RuntimeError):  # another library may wait for the GPU
            graph, _ = capture(run, stream=stream)
            found[name] = graph.replay
    return found


def memory(run: Callable[[], object]) -> float:
    """Peak memory in MiB, beyond the memory in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight and targets.

    By a generator of their own: PyTorch's stays in a capture that failed, as those of some libraries do.
    """
    random = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(rows, case.d, device="cuda", generator=random) for rows in (case.tokens, case.v))
    target = torch.randint(case.v, (case.tokens,), device="cuda", generator=random)
    return x.bfloat16(), (weight * case.d**-0.5).bfloat16(), target


def measure(case: Case) -> dict[str, Any]:
    """Time and memory of the forward, and of forward and backward."""
    x, weight, target = operands(case)
    grad = torch.randn(case.tokens).cuda()
    check(case, x, weight, target)
    forward: dict[str, Callable[[], object]] = {
        name: lambda run=run: run(x, weight, target)  # type: ignore[misc]
        for name, run in contestants().items()
    }
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    both: dict[str, Callable[[], object]] = {
        name: lambda run=run: torch.autograd.grad(run(*leaves, target), leaves, grad)  # type: ignore[misc]
        for name, run in contestants().items()
    }
    with torch.no_grad():
        used = {name: memory(run) for name, run in forward.items()}
        forward[PRODUCT] = lambda: torch.mm(x, weight.mT)
        taken, replayed = times(forward), times(graphs(forward))
    return asdict(case) | {
        "forward_ms": taken,
        "forward_graph_ms": replayed,
        "forward_mib": used,
        "forward_backward_ms": times(both),
        "forward_backward_graph_ms": times(graphs(both)),
        "forward_backward_peak_mib": {name: memory(run) for name, run in both.items()},
    }


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    data: dict[str, Any] = {"environment": environment(options.commit), "cases": []}
    for case in CASES:
        data["cases"].append(measure(case))
        print(data["cases"][-1])
        torch.cuda.empty_cache()
    save(options.out, "logp.json", data)
