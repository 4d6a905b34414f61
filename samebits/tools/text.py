"""Text in the tools' messages: counts, names, and errors of one line."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ToolError(ValueError):
    """A tool cannot run on its arguments. The message is one line: what is wrong, and what to do."""


class AuditError(ToolError):
    """The audit cannot run on its arguments. The message is one line: what is wrong, and what to do."""


def some_names(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(map(module_name, names[:8]))
    return shown + (f", and {len(names) - 8} more" if len(names) > 8 else "")


def module_name(name: str) -> str:
    """A name to show for the module `name` of a model. PyTorch's name for the model itself is empty."""
    return name or "(the module itself)"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plural(count: int, thing: str, things: str | None = None) -> str:
    """The count and the noun, in singular or plural."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def one_line(error: BaseException) -> str:
    """The message of an exception, on one line of limited length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
