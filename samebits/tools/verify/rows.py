"""Verification that a product's rows have the same bits in every batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend
from samebits.contract import Contract
from samebits.ops.linear import linear
from samebits.testing import values
from samebits.tools.graphs import capture
from samebits.tools.verify.case import BF16, F16, ProductCase
from samebits.tools.verify.failures import finish
from samebits.tools.verify.operands import Inputs, laid
from samebits.tools.verify.reference import REFERENCE, on_cpu
from samebits.tools.verify.report import Report

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS_OF = ((1024, 4096, BF16), (256, 7168, BF16), (4096, 4096, BF16), (3072, 768, F16), (4096, 14336, BF16))


def verify_rows(
    report: Report,
    contract: Contract,
    device: torch.device,
    n: int,
    k: int,
    dtype: torch.dtype,
    thorough: bool,
) -> None:
    """Compare rows in batches of other sizes, positions, neighbours, chunks, strides, streams and graphs.

    The chosen backend computes them, if one was chosen.
    """
    linears = f"{chosen_backend(device.type) or ''} samebits.linear".strip()
    where = f"N {n}, K {k}, {dtype}"
    x = values("normal", (ROWS[-1], k), dtype, 1, device)
    weight = values("normal", (n, k), dtype, 2, device)
    full = linear(x, weight)
    spread = torch.arange(0, ROWS[-1], ROWS[-1] // 8, device=device)
    want = on_cpu(ProductCase("", 8, n, k, dtype=dtype), Inputs(x[spread], weight.mT), contract)
    report.compare(linears, "rows, sampled", REFERENCE, full[spread], want, where)

    def same(what: str, got: Tensor, rows: Any, counts: bool = True, who: str = linears) -> None:
        finish(f"{who}, {what}, {where}")
        report.compare(who, what, "full batch", got, full[rows], where, counts=counts)

    noise = values("special", (ROWS[-1], k), dtype, 3, device)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    load = values("normal", (4096, 4096), dtype, 4, device)
    for m in ROWS:
        prefix = slice(0, m)
        same("number of rows", linear(x[:m], weight), prefix)
        at = (ROWS[-1] - m) * 5 // 8
        here = slice(at, at + m)
        same("position", linear(x[here], weight), here)

        company = noise[: 2 * m].clone()
        mine = slice(m // 2, m // 2 + m) if len(company) == 2 * m else slice(0, m)
        company[mine] = x[here]
        same("NaN and inf beside it", linear(company, weight)[mine], here)

        padded = torch.cat((x[here], x.new_zeros(max(1, m // 3), k)))
        same("padding", linear(padded, weight)[:m], here)

        chunks = [linear(c, weight) for c in x[: min(ROWS[-1], 64 * m)].split(m)]
        same("chunks", torch.cat(chunks), slice(0, min(ROWS[-1], 64 * m)))

        for place in ("pitched", "odd", "spread"):
            same("strides", linear(laid(x[here], "N", place), weight), here)
        same("strides", linear(laid(x[here], "T", "plain"), weight), here)

        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            got = linear(x[here], weight)
            same("another stream", got, here)

        graph, got = capture(partial(linear, x[here], weight))
        for _ in range(2):
            got.fill_(math.nan)
            graph.replay()
            same("CUDA graph", got, here)

        with torch.cuda.stream(busy):
            for _ in range(20):
                torch.mm(load, load)
        again = [linear(x[here], weight) for _ in range(4 if thorough else 2)]
        for got in again:
            same("beside other work", got, here)
        torch.cuda.synchronize()

        same("equal bits", torch.mm(x[:m], weight.mT), prefix, counts=False, who="torch.mm (cuBLAS)")
