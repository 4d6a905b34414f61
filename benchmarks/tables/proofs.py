"""What was compared bit for bit, and on which GPU."""

from __future__ import annotations

from typing import Any

from benchmarks import support
from benchmarks.record import GPUS, RESULTS, load
from benchmarks.tables.text import measured_on_gpu, table


def commits() -> str:
    """What was measured when, and at which commit."""
    rows = []
    for folder in GPUS:
        found: dict[tuple[str, str, str], list[str]] = {}
        for path in sorted((RESULTS / folder).glob("*.json")):
            made = load(f"{folder}/{path.name}")["environment"]
            commit, *changes = made["commit"].split(" ", 1)
            if path.stem != "triton_tune":  # where words say which commit
                said = " ".join((f"`{commit[:10]}`", *changes))
                found.setdefault((made["date"], made["gpu"], said), []).append(path.stem)
        for (date, gpu, said), results in sorted(found.items(), reverse=True):
            rows.append([gpu, date, said, ", ".join(results)])
    return table(["GPU", "measured", "commit", "results"], rows)


def gpu_verify(data: dict[str, Any]) -> str:
    """The results of the last recorded run of ``samebits verify``."""
    thorough = " --thorough" if data["thorough"] else ""
    said = (
        f"`samebits verify{thorough}` compared {data['compared']:,} values of {data['kernels']:,} compiled"
        f" kernels in {data['seconds']:.0f} s: {data['differing']} differ."
    )
    if data["failure"] or data["hung"]:
        said += f" It did not end well: {data['failure'] or 'a kernel hung'}."
    return f"{said} {measured_on_gpu(data)}"


def gpu_attention_invariance(data: dict[str, Any]) -> str:
    """How many values of attention were computed again in which ways."""
    said = (
        f"{data['compared']:,} values of {len(data['setups'])} kinds of attention, beside one prefill of"
        f" each: {data['differing']:,} differ. Packed and padded with the gradients."
    )
    return "\n\n".join((_ways(data), said, measured_on_gpu(data)))


def gpu_fp8_invariance(data: dict[str, Any]) -> str:
    """The same of products in FP8."""
    said = (
        f"{data['compared']:,} values of {len(data['setups'])} products of up to"
        f" {max(s['m'] for s in data['setups']):,} rows, in {data['seconds']:.0f} s:"
        f" {data['differing']:,} differ."
    )
    return "\n\n".join((_ways(data), said, measured_on_gpu(data)))


def _ways(data: dict[str, Any]) -> str:
    ways: dict[str, list[int]] = {}
    for way in (way for s in data["setups"] for way in s["ways"]):
        count = ways.setdefault(way["way"], [0, 0])
        count[0] += way["values"]
        count[1] += way["differing"]
    rows = [[name, f"{values:,}", f"{differing:,}"] for name, (values, differing) in ways.items()]
    return table(["computed again", "values", "differ"], rows)


def supported() -> str:
    """Which operation is proven on which GPU."""
    head, *rows = support.table_of_support()
    return table(head, rows)
