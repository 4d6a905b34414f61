"""How the tools speak to people: counts, names, and errors of one line."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ToolError(ValueError):
    """A tool cannot run on what it was given; one line says what is wrong and what to do."""


class AuditError(ToolError):
    """The audit cannot run on what it was given; one line says what is wrong and what to do."""


def some_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(map(module_name, names[:8]))
    return shown + (f", and {len(names) - 8} more" if len(names) > 8 else "")


def module_name(name: str) -> str:
    """What to call the module `name` of a model: PyTorch's name for the model itself is empty."""
    return name or "(the module itself)"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plural(count: int, thing: str, things: str | None = None) -> str:
    """The count and the thing, in the form that fits."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
