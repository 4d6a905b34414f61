"""Block-scaled FP8 products beside PyTorch's own and bf16: benchmarks/results/<gpu>/scaled.json.

python -m benchmarks.scaled [--schedules] [--quick] [--commit COMMIT] [--out FILE]

Rows of a result are compared with the second implementation in ``tests/support/scaled.py``, then it is timed.
With ``--schedules``, every schedule is timed, too, and the fastest one is named. Where PyTorch has no
block-scaled product, half the time of its bf16 product stands for it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.record import RESULTS, environment, results_file, slug, write
from samebits.backends.cuda import scaled
from samebits.backends.cuda.products import scaled_sm90
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race, how
from tests.support import scaled as naive

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SIZES = ((7168, 4096), (7168, 2112), (2048, 7168), (16384, 7168), (4096, 4096), (4096, 28672))
"""k and n: of DeepSeek-V3 and of Llama 3."""
ROWS = (1, 16, 64, 128, 512, 2048, 4096, 8192)


def make(m: int, k: int, n: int) -> tuple[Tensor, ...]:
    """a, b and their scales, all one after the other in memory."""
    a, b = (torch.randn(rows, k, device="cuda").to(FP8) for rows in (m, n))
    scale_a = torch.rand(m, k // 128, device="cuda") + 0.5
    scale_b = torch.rand(-(-n // 128), k // 128, device="cuda") + 0.5
    return a, b, scale_a, scale_b


def ours(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return scaled.scaled_mm(a, b, scale_a, scale_b)


def theirs(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """PyTorch's, with scales as it takes them: of neighbouring rows side by side."""
    recipe = torch.nn.functional.ScalingType
    recipes = recipe.BlockWise1x128, recipe.BlockWise128x128
    found: Tensor = torch.nn.functional.scaled_mm(
        a, b.T, scale_a, recipes[0], scale_b, recipes[1], output_dtype=BF16
    )
    return found


def for_pytorch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, ...]:
    rows, k = scale_b.shape
    padded = torch.zeros(rows, -(-k // 4) * 4, device="cuda")
    padded[:, :k] = scale_b
    beside = scale_a.T.contiguous()  # of one row, PyTorch wants these strides to the letter
    return a, b, beside.as_strided(scale_a.shape, (1, len(scale_a))), padded[:, :k].T


def check(out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    some, columns = sorted({0, len(a) // 2, len(a) - 1}), slice(0, 96)
    scales = scale_a[some], scale_b.repeat_interleave(128, 0)[columns]
    assert_same_bits(out[some][:, columns], naive.scaled(a[some], b[columns], *scales).to(BF16))


def measure(m: int, k: int, n: int, every: bool) -> dict[str, Any]:
    """Microseconds of one product."""
    moved = m * k + k * n + 2 * m * n
    sets = [make(m, k, n) for _ in range(max(1, min(8, math.ceil(120e6 / moved))))]
    check(ours(*sets[0]), *sets[0])
    calls, by_itself = how(m * n * k, moved, in_float32=False)
    race = Race(calls)
    race.add("ours", ours, sets)
    race.add("bf16", torch.mm, [(a.to(BF16), b.to(BF16).T) for a, b, *_ in sets])
    reason = None
    try:
        for_theirs = [for_pytorch(*x) for x in sets]
        theirs(*for_theirs[0])
        race.add("torch", theirs, for_theirs)
    except (RuntimeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
    a, b, scale_a, scale_b = sets[0]
    strides = (k // 128, 1)
    p = scaled_sm90.Scaled(0, m, n, k, FP8, FP8, k, k, strides, strides, False, BF16, n)
    for s in scaled_sm90.schedules(p) if every else ():
        if s.tile.swap and m > 512:
            continue
        assert_same_bits(scaled.scaled_mm(a, b, scale_a, scale_b, schedule=s), ours(*sets[0]))
        race.add(str(s), partial(scaled.scaled_mm, schedule=s), sets)
    us = race.alone() if by_itself else race.run(11)
    names = ("ours", "bf16", "torch")
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "us": {x: us[x] for x in names if x in us}}
    found |= {"tflops": round(2e-6 * m * n * k / us["ours"], 1), "bytes": moved}
    if reason:
        found["without_torch"] = reason
    rest = {x: t for x, t in us.items() if x not in names}
    if rest:
        best = min(rest, key=rest.__getitem__)
        found |= {"best": best, "best_us": rest[best], "all": rest}
    return found


def beside(case: dict[str, Any]) -> float:
    """How many times as fast as PyTorch, or as its bf16 product in half the time where it refused."""
    us = case["us"]
    return float(us.get("torch", us["bf16"] / 2) / us["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--quick", action="store_true", help="half of the sizes")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    out = options.out or RESULTS / slug(torch.cuda.get_device_name()) / "scaled.json"
    torch.manual_seed(0)
    cases = []
    for (k, n), m in itertools.product(SIZES[:3] if options.quick else SIZES, ROWS):
        found = measure(m, k, n, options.schedules)
        cases.append(found)
        best = f", best {found['best_us']:.1f} by {found['best']}" if options.schedules else ""
        print(
            f"{m} {k} {n}: {found['us']} {found['tflops']} TFLOP/s {beside(found):.3f}{best}", file=sys.stderr
        )
    table = Table("rows", "times as fast as PyTorch", "worst")
    for name, of in (
        ("128 and fewer", [beside(c) for c in cases if c["m"] <= 128]),
        ("512 and more", [beside(c) for c in cases if c["m"] >= 512]),
    ):
        table.add_row(name, f"{math.exp(sum(map(math.log, of)) / len(of)):.3f}", f"{min(of):.3f}")
    Console().print(table)
    write(out, {"environment": environment(options.commit), "cases": cases})


if __name__ == "__main__":
    main()
