"""Block-scaled FP8 products beside PyTorch's own and bf16.

python -m benchmarks scaled [--schedules] [--quick] [--only RESULTS] [--commit COMMIT] [--out FILE]

It writes benchmarks/results/<gpu>/scaled.json, and scaled_grouped.json: groups of rows, and quantization.

Rows of a result are compared with the second implementation in ``tests/support/scaled.py``, then it is timed.
With ``--schedules``, every schedule is timed, too, and the fastest one is named. Where PyTorch has no
block-scaled product, half the time of its bf16 product stands for it. It has none of groups. Quantization is
timed beside a copy that moves as many bytes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.record import arguments, environment, save
from samebits.backends.cuda import quantize, scaled
from samebits.backends.cuda.products import scaled_grouped_sm90, scaled_sm90
from samebits.backends.cuda.products.scaled_grouped_sm90 import ScaledGrouped
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
    padded = scale_b.new_zeros(rows, -(-k // 4) * 4)
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
    for s in scaled_sm90.SCALED_SM90.all(p) if every else ():
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
    return found | best_of({x: t for x, t in us.items() if x not in names})


def beside(case: dict[str, Any]) -> float:
    """How many times as fast as PyTorch, or as its bf16 product in half the time where it refused."""
    us = case["us"]
    return float(us.get("torch", us["bf16"] / 2) / us["ours"])


@dataclass(frozen=True, slots=True)
class Grouped:
    """A product of the experts of a layer.

    Attributes:
        rows: of all experts. In a decoding step (`masked`) each has room for so many.
        skewed: whether expert i has a share of the rows in proportion to 1 / (i + 1); else all alike.
    """

    model: str
    experts: int
    k: int
    n: int
    rows: int
    skewed: bool
    masked: bool


LAYERS = (
    ("DeepSeek-V3, 1 of 8 ranks", 32, ((7168, 4096), (2048, 7168))),
    ("Qwen3-30B-A3B", 128, ((2048, 1536), (768, 2048))),
)
GROUPED = tuple(
    Grouped(model, experts, k, n, rows, skewed, False)
    for model, experts, sizes in LAYERS
    for k, n in sizes
    for rows in (4 * experts, 32 * experts, 128 * experts, 512 * experts)
    for skewed in (False, True)
) + tuple(Grouped(LAYERS[0][0], 32, k, n, 64, False, True) for k, n in LAYERS[0][2])


def measure_grouped(case: Grouped, every: bool) -> dict[str, Any]:
    """Microseconds of one grouped product, with bits as `scaled_mm` has them."""
    experts, k, n, rows = case.experts, case.k, case.n, case.rows
    shares = 1 / torch.arange(1, experts + 1) ** float(case.skewed)
    weight = torch.randn(experts, n, k, device="cuda").to(FP8)
    of_weight = torch.rand(experts, -(-n // 128), k // 128, device="cuda") + 0.5
    sets = []
    for seed in range(max(1, min(3, math.ceil(120e6 / weight.numel())))):
        g = torch.Generator().manual_seed(seed)
        if case.masked:
            counts = torch.randint(0, 17, (experts,), generator=g)
        else:
            chosen = torch.multinomial(shares, rows, True, generator=g)
            counts = torch.bincount(chosen, minlength=experts)
        offs = (counts if case.masked else counts.cumsum(0)).int().cuda()
        a = torch.randn(*((experts, rows) if case.masked else (rows,)), k, device="cuda").to(FP8)
        sets.append((a, weight, torch.rand(*a.shape[:-1], k // 128, device="cuda") + 0.5, of_weight, offs))
    check_grouped(*sets[0])
    real = int(counts.sum())
    moved = experts * k * n + real * (k + 2 * n)
    calls, by_itself = how(2 * real * n * k, moved, in_float32=False)
    race = Race(min(calls, 60))
    race.add("ours", scaled.scaled_grouped_mm, sets)
    if not case.masked:
        in_16 = weight.to(BF16).mT
        race.add("bf16", torch._grouped_mm, [(a.to(BF16), in_16, offs) for a, *_, offs in sets])
    strides = (k // 128, 1)
    m = experts * rows if case.masked else rows
    p = ScaledGrouped(
        scaled_sm90.Scaled(0, m, n, k, FP8, FP8, k, k, strides, strides, False, BF16, n),
        *(experts, case.masked, n * k, of_weight.stride(0)),
    )
    for s in scaled_grouped_sm90.SCALED_GROUPED_SM90.all(p) if every else ():
        if s.tile.swap and p.share > 512:
            continue
        race.add(str(s), partial(scaled.scaled_grouped_mm, schedule=s), sets)
    us = race.alone() if by_itself and not every else race.run(7)
    found = asdict(case) | {"us": {x: us[x] for x in ("ours", "bf16") if x in us}}
    found |= {"tflops": round(2e-6 * real * k * n / us["ours"], 1), "bytes": moved}
    return found | best_of({x: t for x, t in us.items() if x not in ("ours", "bf16")})


def check_grouped(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> None:
    """Raise AssertionError for other bits than `scaled_mm` gives, or than the second implementation."""
    out = scaled.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    ends = offs.tolist()
    for g in sorted({0, len(ends) // 2, len(ends) - 1}):
        at = (g, slice(0, ends[g])) if a.ndim == 3 else slice(ends[g - 1] if g else 0, ends[g])
        if len(out[at]):
            assert_same_bits(out[at], ours(a[at].contiguous(), b[g], scale_a[at].contiguous(), scale_b[g]))
            check(out[at], a[at], b[g], scale_a[at], scale_b[g])


def best_of(times: dict[str, float]) -> dict[str, Any]:
    """The fastest schedule, if there are any."""
    if not times:
        return {}
    best = min(times, key=times.__getitem__)
    return {"best": best, "best_us": times[best], "all": times}


QUANTIZED = ((4096, 7168), (16384, 7168), (4096, 28672), (128, 7168))
"""Rows and columns of what is quantized."""


def measure_quantize(rows: int, k: int) -> list[dict[str, Any]]:
    """Microseconds of each kind of quantization, and of a copy of as many bytes."""
    found = []
    sets = [
        [torch.randn(rows, 2 * k, device="cuda", dtype=BF16)]
        for _ in range(max(1, min(8, math.ceil(200e6 / (rows * k * 4)))))
    ]
    halves = [list(x.chunk(2, 1)) for (x,) in sets]
    kinds: dict[str, tuple[Any, list[list[Tensor]], float]] = {
        "1 x 128": (
            partial(quantize.quantize, rows=1, dtype=FP8),
            [[x[:, :k].contiguous()] for (x,) in sets],
            2,
        ),
        "128 x 128": (
            partial(quantize.quantize, rows=128, dtype=FP8),
            [[x[:, k:].contiguous()] for (x,) in sets],
            2,
        ),
        "silu(gate) * up, 1 x 128": (partial(quantize.silu_mul_quantize, dtype=FP8), halves, 4),
    }
    for kind, (run, given, read) in kinds.items():
        scales = rows * k / (128 if kind.endswith("1 x 128") else 16384) * 4
        moved = int(rows * k * (read + 1) + scales)
        sources = [[torch.empty(moved // 32 * 16, dtype=torch.uint8, device="cuda")] for _ in given]
        race = Race(max(len(given), min(100, math.ceil(2e9 / moved))))
        race.add("ours", run, given)
        race.add("copy", torch.clone, sources)
        us = race.run(15)
        found.append({"kind": kind, "rows": rows, "k": k, "us": us, "bytes": moved})
    return found


def share(case: dict[str, Any]) -> float:
    """Of a copy's bandwidth."""
    return float(case["us"]["copy"] / case["us"]["ours"])


FILES = {"scaled": ("cases",), "scaled_grouped": ("grouped", "quantize")}
"""Files of results, and what is in them."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--quick", action="store_true", help="half of the sizes")
    parser.add_argument("--only", choices=FILES, help="one file of results")
    options = parser.parse_args()
    if options.out and not options.only:
        parser.error("--out: expected --only with it, for there are several files")
    record = environment(options.commit)
    torch.manual_seed(0)
    for name in FILES if options.only is None else (options.only,):
        data: dict[str, Any] = {"environment": record}
        for part in FILES[name]:
            data[part] = []
            for run in runs(part, options.quick, options.schedules):
                data[part] += run()
                print(part, data[part][-1], file=sys.stderr)
            save(options.out, f"{name}.json", data)
        Console().print(summary(data))


def runs(part: str, quick: bool, every: bool) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The measurements of a part of the results."""
    if part == "cases":
        for (k, n), m in itertools.product(SIZES[:3] if quick else SIZES, ROWS):
            yield lambda m=m, k=k, n=n: [measure(m, k, n, every)]  # type: ignore[misc]
    elif part == "grouped":
        for case in GROUPED[::5] if quick else GROUPED:
            yield lambda case=case: [measure_grouped(case, every)]  # type: ignore[misc]
    else:
        for rows, k in QUANTIZED[:2] if quick else QUANTIZED:
            yield partial(measure_quantize, rows, k)


def summary(data: dict[str, Any]) -> Table:
    """Geometric means and the worst case of each part."""
    table = Table("what", "mean", "worst")
    products = data.get("cases", [])
    bands = {
        "128 rows and fewer, times as fast as PyTorch": [beside(c) for c in products if c["m"] <= 128],
        "512 rows and more": [beside(c) for c in products if c["m"] >= 512],
        "groups, times as fast as bf16 twice as fast": [
            beside(c) for c in data.get("grouped", []) if not c["masked"]
        ],
    }
    for kind in dict.fromkeys(c["kind"] for c in data.get("quantize", [])):
        bands[f"{kind}, share of a copy"] = [share(c) for c in data["quantize"] if c["kind"] == kind]
    for name, of in bands.items():
        if of:
            table.add_row(name, f"{math.exp(sum(map(math.log, of)) / len(of)):.3f}", f"{min(of):.3f}")
    return table
