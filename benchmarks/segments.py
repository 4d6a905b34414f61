"""What segments cost: products under ``TENSOR_CORE.segmented(8)`` beside the plain contract.

python -m benchmarks segments [--segments S] [--float32] [--schedules] [--commit COMMIT] [--out FILE]

A result is compared with the CPU reference, in some rows, before it is timed. ``--float32``: products of
``FMA.segmented(8)``. ``--schedules``: every schedule of tensor cores that could be chosen is timed, too, and
the fastest one is named.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, write
from samebits.backends.cuda import devices
from samebits.backends.cuda.products import segmented_sm90
from samebits.backends.cuda.products.tensor_core_sm90 import gemm
from samebits.backends.product import Operands, Product
from samebits.contract import FMA, TENSOR_CORE
from samebits.testing import assert_same_bits, values
from samebits.tools.bench.clock import Race, how

SIZES = ((4096, 4096), (8192, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 8192))
"""k and n."""
OF_FLOAT32 = ((768, 3072), (3072, 768), (4096, 1024), (4096, 4096), (4096, 6144), (7168, 256), (14336, 4096))
ROWS = (1, 8, 16, 32, 64, 128, 512, 1024, 2048, 4096, 8192)
FORMS = ("x @ w.T", "dy @ w")


def make(m: int, k: int, n: int, form: str, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Operands a and b."""
    a, weight = (values("normal", s, dtype, seed + i, "cuda") for i, s in enumerate(((m, k), (n, k))))
    return a, weight.mT if form == FORMS[0] else weight.mT.contiguous()


def check(out: Tensor, a: Tensor, b: Tensor, contract: samebits.Contract) -> None:
    some = torch.tensor(sorted({0, len(a) // 2, len(a) - 1}))
    columns = slice(0, 96)
    ours = contract.on(samebits.HOPPER) if contract.mma else contract
    want = samebits.matmul(a[some].cpu(), b[:, columns].cpu(), contract=ours, out_dtype=out.dtype)
    assert_same_bits(out[some.to(out.device), columns], want.to(out.device))


def measure(
    m: int, k: int, n: int, form: str, segments: int, every: bool, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Microseconds of one product."""
    in_float32 = dtype == torch.float32
    contract = (FMA if in_float32 else TENSOR_CORE).segmented(segments)
    moved = dtype.itemsize * (m * k + k * n + m * n)
    sets = [make(m, k, n, form, 10 * i, dtype) for i in range(max(1, min(8, math.ceil(120e6 / moved))))]
    check(samebits.matmul(*sets[0], contract=contract), *sets[0], contract)
    calls, by_itself = how(2 * m * n * k, moved, in_float32)
    race = Race(calls)
    race.add("plain", samebits.matmul, sets)
    race.add("segments", partial(samebits.matmul, contract=contract), sets)
    race.add("torch", torch.matmul, sets)
    p = Product.of(Operands(*sets[0], torch.empty(m, n, dtype=dtype, device="cuda")), contract.step)
    sms = devices.device_info(0).sm_count
    for s in segmented_sm90.candidates(gemm(p), sms, light=True) if every and not in_float32 else ():
        plan, out = segmented_sm90.plan(p, segments, s), torch.empty_like(samebits.matmul(*sets[0]))
        race.add(str(s), lambda a, b, plan=plan, out=out: plan.run(Operands(a, b, out)), sets)
    us = race.alone() if by_itself else race.run(11)
    names = ("plain", "segments", "torch")
    found: dict[str, Any] = {"m": m, "k": k, "n": n, "form": form, "us": {x: us[x] for x in names}}
    rest = {x: t for x, t in us.items() if x not in names}
    if rest:
        best = min(rest, key=rest.__getitem__)
        found |= {"best": best, "best_us": rest[best], "all": rest}
    return found


def geometric_mean(x: list[float]) -> float:
    return math.exp(sum(map(math.log, x)) / len(x))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    cases = []
    dtype, sizes = (torch.float32, OF_FLOAT32) if options.float32 else (torch.bfloat16, SIZES)
    for (k, n), m, form in itertools.product(sizes, options.rows, FORMS):
        found = measure(m, k, n, form, options.segments, options.schedules, dtype)
        cases.append(found)
        us = found["us"]
        best = f", best {found['best_us']:.1f} by {found['best']}" if options.schedules else ""
        ratio = us["segments"] / us["plain"]
        print(
            f"{form} {m} {k} {n}: {us['plain']:.1f} us, {us['segments']:.1f}: {ratio:.3f}{best}",
            file=sys.stderr,
        )
    table = Table("rows", "segments / plain", "worst", "segments / torch")
    few, many = [c["us"] for c in cases if c["m"] <= 128], [c["us"] for c in cases if c["m"] >= 512]
    for name, of in (("128 and fewer", few), ("512 and more", many)):
        if of:
            cost = [us["segments"] / us["plain"] for us in of]
            beside = geometric_mean([us["segments"] / us["torch"] for us in of])
            table.add_row(name, f"{geometric_mean(cost):.3f}", f"{max(cost):.3f}", f"{beside:.3f}")
    Console().print(table)
    if options.out:
        name = str(dtype).removeprefix("torch.")
        record = {"environment": environment(options.commit), "segments": options.segments, "dtype": name}
        record["cases"] = cases
        write(options.out, record)
