"""The mode's rules."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.tables.text import table
from samebits.mode import internals, rules
from samebits.mode.vectors import in_whole_vectors


def named(names: Iterable[str]) -> str:
    """Names of PyTorch's functions, each once. Operators are shown as symbols."""
    shown = ["@" if name == "__matmul__" else name for name in names]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(shown) if not name.startswith("__"))


def mode_replaced() -> str:
    rows = ((named(rule.name for rule in row.rules), row.result, row.uncovered) for row in rules.REPLACED)
    return table(["PyTorch", "as", "not covered"], rows)


def mode_vectors() -> str:
    return named(rule.name for rule in rules.ELEMENTWISE if rule.each is in_whole_vectors)


def mode_reported() -> str:
    return table(
        ["kind", "functions"], ((kind, named(names.split())) for kind, names in rules.REPORTED.items())
    )


def mode_internals() -> str:
    return table(
        ["kind", "operators"],
        (
            (kind, named(patterns.split()).replace("aten::", ""))
            for kind, patterns in internals.PATTERNS.items()
        ),
    )
