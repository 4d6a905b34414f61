"""Verification that attention's bits depend on nothing but the sequence."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import torch
from torch import Tensor

from samebits.ops.attention import attention
from samebits.testing import values
from samebits.tools.verify.case import BF16, F16, F32
from samebits.tools.verify.failures import finish
from samebits.tools.verify.report import Report

SEQUENCES: tuple[dict[str, Any], ...] = (
    {"dtype": BF16, "tokens": 5000, "heads": (8, 4), "size": 128, "of_values": 128},
    {"dtype": F16, "tokens": 3000, "heads": (4, 1), "size": 64, "of_values": 64, "window": (700, 0)},
    {"dtype": BF16, "tokens": 1500, "heads": (2, 3), "size": 192, "of_values": 128, "softcap": 20.0},
    {"dtype": F32, "tokens": 1300, "heads": (2, 2), "size": 64, "of_values": 64},
)


def verify_sequences(report: Report, device: torch.device, thorough: bool) -> None:
    """Compare causal sequences with themselves, cut and placed in every way; around them all is NaN."""
    for i, (given, sinks) in enumerate(itertools.product(SEQUENCES, (False, True))):
        options = dict(given)
        if not thorough:
            options["tokens"] //= 2
        if thorough or sinks == (i % 4 == 0):
            _verify_sequence(report, device, Random(i), sinks=sinks, **options)


def _verify_sequence(
    report: Report,
    device: torch.device,
    r: Random,
    *,
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    size: int,
    of_values: int,
    sinks: bool,
    **options: Any,
) -> None:
    kv_heads, group = heads
    where = f"{dtype}, {tokens} tokens, {kv_heads} x {group} heads of {size} and {of_values}, {options}"
    of_heads = (
        (kv_heads * group, size),
        (kv_heads, size),
        (kv_heads, of_values),
        (kv_heads * group, of_values),
    )
    q, k, v, g = (values("normal", (1, tokens, *of), dtype, seed, device) for seed, of in enumerate(of_heads))
    options |= {"causal": True}
    if sinks:
        options["sinks"] = values("normal", (kv_heads * group,), F32, 9, device)
        where += ", sinks"

    def run(*of: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention(*of, **options, **more, return_lse=True)  # type: ignore[misc]
        return out, lse

    def ints(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    def around(t: Tensor, before: int, after: int, value: float = math.nan) -> Tensor:
        parts = (t.new_full((1, n, *t.shape[2:]), value) for n in (before, after))
        return torch.cat((next(parts), t, next(parts)), 1)

    def same(what: str, got: Tensor, want: Tensor) -> None:
        finish(f"attention, {what}, {where}")
        report.compare("samebits.attention", what, "a sequence by itself", got, want, where)

    out, lse = run(q, k, v)

    def part(what: str, found: tuple[Tensor, Tensor], start: int, stop: int) -> None:
        same(what, found[0].reshape(1, stop - start, *out.shape[2:]), out[:, start:stop])
        same(what, found[1].reshape(1, -1, stop - start), lse[:, :, start:stop])

    cuts = [0, *sorted(r.sample(range(1, tokens), 7)), tokens]
    for start, stop in itertools.pairwise(cuts):
        chunk = q[:, start:stop]
        part("chunks", run(chunk, k[:, :stop], v[:, :stop]), start, stop)
        cache = (around(t[:, :stop], 0, 300) for t in (k, v))
        part("chunks, static cache", run(chunk, *cache, key_length=ints(stop)), start, stop)
    for t in (0, 127, 511, 512, *r.sample(range(tokens), 6)):
        part("decoding", run(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1]), t, t + 1)
        page = r.choice((1, 16, 48, 256))
        count = -(-tokens // page)
        order = torch.tensor(r.sample(range(count + 3), count), device=device)
        pages = []
        for x in (k, v):
            store = x.new_full((count + 3, page, *x.shape[2:]), math.nan)
            store[order] = around(x, 0, count * page - tokens).view(count, page, *x.shape[2:])
            pages.append(store)
        paged = {"block_table": order[None].int(), "key_length": ints(t + 1)}
        part("decoding, pages", run(q[:, t : t + 1], *pages, **paged), t, t + 1)

    leaves = (q, k, v)
    wanted = _gradients(leaves, g, options)
    for pad in (1, r.randint(2, 700)):
        left = [around(t, pad, 0) for t in leaves]
        first = {"key_start": ints(pad)}
        found = run(*left, **first)
        part("padding on the left", (found[0][:, pad:], found[1][:, :, pad:]), 0, tokens)
        # Where there are gradients, queries and their gradients must be finite.
        left[0] = around(q, pad, 0, 1.0)
        grads = _gradients(left, around(g, pad, 0, 0.0), options | first)
        for name, got, want in zip("qkv", grads, wanted, strict=True):
            same(f"padding on the left, d{name}", got[:, pad:], want)
        right = [around(t, 0, pad, 1.0) for t in leaves]
        found = run(*right)
        part("padding on the right", (found[0][:, :tokens], found[1][:, :, :tokens]), 0, tokens)
        grads = _gradients(right, around(g, 0, pad, 0.0), options)
        for name, got, want in zip("qkv", grads, wanted, strict=True):
            same(f"padding on the right, d{name}", got[:, :tokens], want)

    before, after = r.randint(1, 40), r.randint(1, 700)
    ends = ints(0, before, before, before + tokens, before + tokens + after)
    offsets = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    packed = [around(t, before, after)[0] for t in leaves]
    here = slice(before, before + tokens)
    found = run(*packed, **offsets)
    part("packed", (found[0][here], found[1][:, here]), 0, tokens)
    grads = _gradients(packed, around(g, before, after)[0], options | offsets)
    for name, got, want in zip("qkv", grads, wanted, strict=True):
        same(f"packed, d{name}", got[here], want[0])


def _gradients(of: Any, grad: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in of]
    with torch.enable_grad():
        out = attention(*leaves, **options)
    return torch.autograd.grad(out, leaves, grad)
