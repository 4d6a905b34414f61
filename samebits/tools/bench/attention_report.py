"""The figures of attention's benchmark, for the terminal and the documents."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from samebits.tools.bench.attention_cases import CHUNKS, WINDOW

Case = dict[str, Any]

LARGE = 64 << 20
"""Bytes of keys and values from which on decoding is measured by bandwidth."""


def speed(case: Case) -> float | None:
    """Beside PyTorch's fastest backend, or, pair for pair, beside samebits' own causal attention. Above 1 is
    faster. None if no backend of PyTorch takes the case."""
    us = case["us"]
    if "dense" in us:
        return float(us["dense"] / case["dense"]["pairs"] / us["samebits"] * case["pairs"])
    return float(us["torch"] / us["samebits"]) if "torch" in us else None


def _is(work: str, *forms: str) -> Callable[[Case], bool]:
    return lambda c: c["work"] == work and c["form"] in forms


BANDS: dict[str, Callable[[Case], bool]] = {
    "forward, causal and full": _is("forward", "causal", "full"),
    "forward and backward, causal and full": _is("both", "causal", "full"),
    **{
        f"{said}, {what} / own causal": _is(work, form)
        for work, said in (("forward", "forward"), ("both", "forward and backward"))
        for form, what in (("window", f"window of {WINDOW:,}"), ("packed", "packed"), ("padded", "padded"))
    },
    "decode": _is("forward", "decode"),
    "512 queries over many keys": _is("forward", "chunk"),
    "512 queries over 8,192 keys, masks, window, sinks": _is("forward", *CHUNKS),
}
"""Lists of cases, of which a geometric mean is taken."""

BANDWIDTH = "decode, bandwidth / a large copy's"


@dataclass(frozen=True, slots=True)
class Figure:
    """Geometric mean and worst of some cases."""

    cases: int
    mean: float
    worst: float
    at: Case


def _figure(pairs: Iterable[tuple[float | None, Case]]) -> Figure | None:
    found = [(x, c) for x, c in pairs if x is not None]
    if not found:
        return None
    worst, at = min(found, key=lambda pair: pair[0])
    return Figure(len(found), statistics.geometric_mean(x for x, _ in found), worst, at)


def bandwidth(case: Case, data: Case) -> float:
    """Of the keys and values that are read, as a share of a large copy's."""
    share: float = case["key_bytes"] / case["us"]["samebits"] * 1e6 / data["ceilings"]["copy_bytes_per_s"]
    return share


def attention_summary(data: Case) -> dict[str, Figure]:
    """Every band's speed, and the bandwidth of decoding."""
    cases = data["cases"]
    found = {name: _figure((speed(c), c) for c in cases if chosen(c)) for name, chosen in BANDS.items()}
    large = [c for c in cases if c["form"] == "decode" and c["key_bytes"] >= LARGE]
    found[BANDWIDTH] = _figure((bandwidth(c, data), c) for c in large)
    return {name: figure for name, figure in found.items() if figure is not None}


def where(case: Case) -> str:
    """A case in a few words."""
    sizes = f"{case['batch']} x {case['keys']:,}, {case['head']}"
    return f"{case['form']} {sizes}"


def show_attention(data: Case) -> RenderableType:
    """Every case's time and speed, the summary, errors and memory."""
    times = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("attention", "batch x keys, head", "samebits, µs", "beside, µs", "by", "speed", "TFLOP/s"):
        times.add_column(name, justify="left" if name[0] in "ab" and name[1] != "e" else "right")
    for c in data["cases"]:
        ratio, us = speed(c), c["us"]
        factor = 14 if c["work"] == "both" else 4
        flops = factor * c["pairs"] * c["heads"] * c["head"] / us["samebits"] / 1e6
        times.add_row(
            f"{c['form']}{', backward' if c['work'] == 'both' else ''}",
            f"{c['batch']} x {c['keys']:,}, {c['head']}",
            f"{us['samebits']:.1f}",
            f"{us.get('dense', us.get('torch', float('nan'))):.1f}",
            "own causal" if "dense" in us else c.get("backend", ""),
            "" if ratio is None else f"{ratio:.3f}",
            f"{flops:.0f}",
        )
    means = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("speed relative to torch's fastest", "cases", "geometric mean", "worst", "at"):
        means.add_column(name, justify="left" if name[:2] in ("sp", "at") else "right")
    for name, f in attention_summary(data).items():
        means.add_row(name, str(f.cases), f"{f.mean:.3f}", f"{f.worst:.3f}", where(f.at))
    lines = [
        f"error of {name}, {where(c)}, {c['dtype']}: "
        + ", ".join(f"{who} {error[name]:.2e}" for who, error in c["error"].items())
        for c in data["accuracy"]
        for name in ("out", "dq", "dk", "dv")
    ]
    lines += [
        f"memory of {where(c)}, {c['kv_heads']} heads of keys, MiB: "
        + ", ".join(f"{who} {size / 2**20:.0f}" for who, size in c["bytes"].items())
        for c in data["memory"]
    ]
    return Group(times, "", means, "", *(Text(line) for line in lines))
