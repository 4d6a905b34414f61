"""What an engine asks for, by ``additional_config={"samebits": ...}``."""

from __future__ import annotations

from typing import Any

from samebits.contract import TENSOR_CORE
from samebits.engines.refusals import RefusedError

__all__ = ["options", "segments_of"]

_OPTIONS: dict[str, Any] = {"any_version": False, "segments": 1}


def options(asked: Any) -> dict[str, Any]:
    """The arguments of :func:`samebits.vllm.options`, or its defaults if `asked` is no dictionary."""
    given = asked if isinstance(asked, dict) else {}
    for name in given.keys() - _OPTIONS.keys():
        raise RefusedError(f"{name} for samebits", f"its options are {', '.join(_OPTIONS)}", "leave it out")
    return _OPTIONS | given


def segments_of(config: Any) -> int:
    """Into how many segments a ``VllmConfig`` cuts sums."""
    segments = options((config.additional_config or {}).get("samebits"))["segments"]
    return TENSOR_CORE.segmented(segments).segments  # which checks it
