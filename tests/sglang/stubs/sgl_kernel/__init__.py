"""In place of SGLang's kernels, which need a GPU, or a CPU with AMX: they can be imported, and not called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
