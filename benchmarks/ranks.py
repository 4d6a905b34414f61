"""What sums in segments and over ranks cost, from results of ``segments.py`` and ``distributed.py``."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean
from typing import Any

FEW = 128
"""Rows up to which a product is bound by the bytes of its weight."""


def _means(ratios: Iterable[tuple[int, float]], best: Any) -> list[tuple[str, str, str]]:
    """Of ratios by rows: what rows, the geometric mean, the worst."""
    ratios = list(ratios)
    parts = {
        f"M <= {FEW}": [r for m, r in ratios if m <= FEW],
        f"M > {FEW}": [r for m, r in ratios if m > FEW],
    }
    return [(name, f"{geometric_mean(of):.3f}", f"{best(of):.3f}") for name, of in parts.items() if of]


def segments_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Time of a product in segments, of the plain one's, and of cuBLAS's."""
    cases = [(case["m"], case["us"]) for case in data["cases"]]
    plain = _means(((m, us["segments"] / us["plain"]) for m, us in cases), max)
    torch = _means(((m, us["segments"] / us["torch"]) for m, us in cases), max)
    return [(*a, *b[1:]) for a, b in zip(plain, torch, strict=True)]


def parallel_rows(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Speed of a split layer with its exchange, beside a product and NCCL's all-reduce in bf16, in graphs."""
    cases = [(c["M"], c["ms"]["torch, graph"] / c["ms"]["samebits, graph"]) for c in data["row_parallel"]]
    return _means(cases, min)


def exchange_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Microseconds of an exchange, in graphs."""
    names = ("ordered_all_reduce", "all_reduce bf16", "all_reduce f32")
    return [
        (f"{c['rows']:,}", *(f"{1e3 * c['ms'][f'{name}, graph']:.1f}" for name in names))
        for c in data["exchanges"]
    ]


def step_rows(data: dict[str, Any]) -> list[tuple[str, ...]]:
    """Milliseconds of a training step: PyTorch split, samebits split, samebits on one GPU."""
    steps = data["llama"]["steps"]
    sizes = dict.fromkeys((s["rows"], s["tokens"]) for s in steps)
    ms = {(s["how"], s["rows"], s["tokens"]): s["ms"] for s in steps}
    return [
        (f"{rows} x {tokens:,}", *(f"{ms[how, rows, tokens]:.0f}" for how in ("torch", "samebits", "one")))
        for rows, tokens in sizes
    ]
