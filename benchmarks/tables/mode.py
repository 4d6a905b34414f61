"""The mode's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.tables.text import table
from samebits.mode import internals, rules


def named(functions: Iterable[str | Callable[..., Any]]) -> str:
    """Names of PyTorch's functions, each once. Operators are shown as symbols."""
    names = [f if isinstance(f, str) else f.__name__ for f in functions]
    shown = ["@" if name == "__matmul__" else name for name in names]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(shown) if not name.startswith("__"))


def mode_replaced() -> str:
    rows = ((named(row.functions), row.result, row.uncovered) for row in rules.REPLACED)
    return table(["PyTorch", "as", "not covered"], rows)


def mode_vectors() -> str:
    return ", ".join(f"`{name}`" for name in rules.WHOLE_VECTORS if not name.startswith("__"))


def mode_reported() -> str:
    return table(
        ["kind", "functions"], ((kind, named(names.split())) for kind, names in rules.REPORTED.items())
    )


def mode_internals() -> str:
    return table(
        ["kind", "operators"],
        (
            (kind, named(patterns.split()).replace("aten::", ""))
            for kind, patterns in internals.REPORTED.items()
        ),
    )
