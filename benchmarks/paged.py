"""Decoding over pages, in tables as wide as 8,192 keys, beside the same keys without pages: paged.json.

python -m benchmarks paged [--commit COMMIT] [--out FILE]

One query of each sequence, in CUDA graphs. Bits are compared before anything is timed. If vLLM is installed,
its FlashAttention 3 takes part, as an engine calls it: what it schedules is there before the step's layers.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import samebits
from benchmarks.record import arguments, environment, save
from samebits.testing import assert_same_bits
from samebits.tools.bench.clock import Race

HEADS, KV_HEADS, SIZE = 32, 8, 128
WIDTH = 8192
"""Keys that a row of the table has room for."""
PAGES = (16, 128)
CASES = ((1, 300), (8, 300), (64, 300), (256, 300), (1, 4096), (8, 4096), (64, 4096))
"""Sequences, and keys of each."""


def operands(rows: int, keys: int, page: int) -> list[Tensor]:
    """Queries, keys and values without pages, with them, lengths, and the table: pages in any order."""
    device = "cuda"
    q = torch.randn(rows, 1, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(rows, keys, KV_HEADS, SIZE, dtype=q.dtype, device=device) for _ in range(2))
    each = -(-keys // page)
    order = torch.randperm(rows * each, device=device)
    store = torch.full((rows * each, page, KV_HEADS, 2 * SIZE), math.nan, dtype=q.dtype, device=device)
    for half, t in zip(store.chunk(2, -1), (k, v), strict=True):
        whole = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, each * page - keys), value=math.nan)
        half[order] = whole.view(rows * each, page, KV_HEADS, SIZE)
    table = torch.full((rows, WIDTH // page), -1, dtype=torch.int32, device=device)
    table[:, :each] = order.view(rows, each)
    lengths = torch.full((rows,), keys, dtype=torch.int32, device=device)
    return [q, k, v, *store.chunk(2, -1), lengths, table, torch.empty_like(q)]


def over_pages(q: Tensor, _k: Tensor, _v: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
    lengths, table, out = more
    return samebits.attention(q, k, v, causal=True, key_length=lengths, block_table=table, out=out)


def without(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
    return samebits.attention(q, k, v, causal=True)


def flash_attention_3(rows: int, keys: int, page: int) -> Callable[..., Any]:
    from vllm.vllm_flash_attn import flash_attn_interface as theirs

    starts, lengths = (torch.arange(0, n * rows + 1, n, dtype=torch.int32, device="cuda") for n in (1, keys))
    scheduled = theirs.get_scheduler_metadata(
        *(rows, 1, keys, HEADS, KV_HEADS, SIZE, lengths.diff()),
        cu_seqlens_q=starts,
        page_size=page,
        causal=True,
    )

    def run(q: Tensor, _k: Tensor, _v: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        lengths, table, out = more
        return theirs.flash_attn_varlen_func(
            *(q[:, 0], k, v, 1, starts, keys),
            seqused_k=lengths,
            causal=True,
            block_table=table,
            out=out[:, 0],
            fa_version=3,
            scheduler_metadata=scheduled,
        )

    return run


def measure(rows: int, keys: int, page: int) -> dict[str, Any]:
    """Microseconds of a call."""
    key_bytes = 4 * rows * keys * KV_HEADS * SIZE
    sets = [operands(rows, keys, page) for _ in range(max(1, min(32, math.ceil(200e6 / key_bytes))))]
    assert_same_bits(over_pages(*sets[0]), without(*sets[0]))
    race = Race(max(8, min(200, math.ceil(3e-3 / (key_bytes / 3e12 + 5e-6)))))
    race.add("pages", over_pages, sets)
    race.add("no pages", without, sets)
    if find_spec("vllm"):
        theirs, want = flash_attention_3(rows, keys, page), without(*sets[0])[:, 0]
        torch.testing.assert_close(theirs(*sets[0]), want, rtol=2e-2, atol=2e-3)
        race.add("FlashAttention 3", theirs, sets)
    us = race.run(11)
    return {"rows": rows, "keys": keys, "page": page, "key_bytes": key_bytes, "us": us}


def show(data: dict[str, Any]) -> Table:
    names = list(data["cases"][0]["us"])
    table = Table("rows", "keys", "page", *(f"{name}, us" for name in names), "TB/s over pages")
    for c in data["cases"]:
        times = (f"{c['us'][name]:.1f}" for name in names)
        rate = f"{c['key_bytes'] / c['us']['pages'] / 1e6:.2f}"
        table.add_row(*map(str, (c["rows"], c["keys"], c["page"])), *times, rate)
    return table


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks paged needs a GPU")
    data: dict[str, Any] = {"environment": environment(options.commit), "cases": []}
    torch.manual_seed(0)
    with torch.inference_mode():
        for (rows, keys), page in itertools.product(CASES, PAGES):
            data["cases"].append(measure(rows, keys, page))
    save(options.out, "paged.json", data)
    Console(width=120).print(show(data))
