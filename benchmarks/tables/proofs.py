"""What was compared bit for bit, and on which GPU."""

from __future__ import annotations

from typing import Any

from benchmarks import support
from benchmarks.tables.text import measured_on_gpu, table


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
    ways: dict[str, list[int]] = {}
    for way in (way for s in data["setups"] for way in s["ways"]):
        count = ways.setdefault(way["way"], [0, 0])
        count[0] += way["values"]
        count[1] += way["differing"]
    rows = [[name, f"{values:,}", f"{differing:,}"] for name, (values, differing) in ways.items()]
    said = (
        f"{data['compared']:,} values of {len(data['setups'])} kinds of attention, beside one prefill of"
        f" each: {data['differing']:,} differ. Packed and padded with the gradients."
    )
    return "\n\n".join((table(["computed again", "values", "differ"], rows), said, measured_on_gpu(data)))


def supported() -> str:
    """Which operation is proven on which GPU."""
    head, *rows = support.table_of_support()
    return table(head, rows)
