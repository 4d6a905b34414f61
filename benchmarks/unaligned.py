"""Products at K = 4,095, which TMA cannot read, beside torch and the universal kernel: unaligned.json.

python -m benchmarks unaligned [--commit COMMIT] [--out FILE]

Every result is compared with the universal kernel's before it is timed.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, results, write
from samebits.backends.cuda.matmul import fastest
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.product import Operands, Product
from samebits.testing import assert_same_bits, values
from samebits.tools.bench.clock import Race, how

WORK = ("forward", "dX", "dW")
ROWS = (16, 64, 256, 1000, 4096)
K, N = 4095, 4096


def operands(work: str, m: int, seed: int) -> tuple[Tensor, Tensor]:
    """a and b of a product of ``x[M, K]``, ``weight[N, K]`` and ``dy[M, N]``."""
    x, weight, dy = (
        values("normal", size, torch.bfloat16, seed + i, "cuda")
        for i, size in enumerate(((m, K), (N, K), (m, N)))
    )
    return {"forward": (x, weight.mT), "dX": (dy, weight), "dW": (dy.mT, x)}[work]


def universal(a: Tensor, b: Tensor) -> Tensor:
    out = torch.full((len(a), b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)
    TENSOR_CORE.run(Operands(a, b, out))
    return out


def measure(work: str, m: int) -> dict[str, Any]:
    """Microseconds of one product."""
    moved = 2 * (m * K + K * N + m * N)
    sets = [operands(work, m, 10 * i) for i in range(max(1, min(8, math.ceil(120e6 / moved))))]
    out = universal(*sets[0])
    assert_same_bits(samebits.matmul(*sets[0]), out)
    calls, by_itself = how(2 * m * N * K, moved, in_float32=False)
    race = Race(calls)
    race.add("samebits", samebits.matmul, sets)
    race.add("universal kernel", universal, sets)
    race.add("torch", torch.matmul, sets)
    us = race.alone() if by_itself else race.run(11)
    kernel = fastest(Product.of(Operands(*sets[0], out), "mma")).name
    return {"work": work, "m": m, "k": K, "n": N, "kernel": kernel, "us": us}


def speed(case: dict[str, Any]) -> float:
    """Relative to torch."""
    return float(case["us"]["torch"] / case["us"]["samebits"])


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    out = results(options.out, "unaligned.json")
    cases = []
    for work, m in itertools.product(WORK, ROWS):
        cases.append(measure(work, m))
        print(cases[-1], file=sys.stderr)
    shown = Table("work", *(f"M {m:,}" for m in ROWS))
    for work in WORK:
        shown.add_row(work, *(f"{speed(c):.2f}" for c in cases if c["work"] == work))
    Console().print(shown)
    write(out, {"environment": environment(options.commit), "cases": cases})
