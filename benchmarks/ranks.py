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


STEPS = {
    "torch": "PyTorch, split",
    "samebits": "samebits, split",
    "one": "samebits, one GPU",
    "samebits, graph": "split, in a CUDA graph",
    "one, graph": "one GPU, in a CUDA graph",
}


def step_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds of training steps: the head of a table and its rows. Ways that nobody ran are left out."""
    found: dict[str, dict[str, str]] = {}
    for s in data["llama"]["steps"]:
        row = found.setdefault(f"{s.get('model', '1.2 billion')}, {s['rows']} x {s['tokens']:,}", {})
        row[s["how"]] = f"{s['ms']:.0f}"
        if "graph" in s:
            row[f"{s['how']}, graph"] = f"{s['graph']:.0f}"
    ways = [way for way in STEPS if any(way in row for row in found.values())]
    head = ["parameters, step; milliseconds", *(STEPS[way] for way in ways)]
    return head, [[name, *(row.get(way, "") for way in ways)] for name, row in found.items()]
