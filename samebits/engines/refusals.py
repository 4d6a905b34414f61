"""What an engine's plug-in says when it cannot keep its promise."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

__all__ = ["LATER", "RefusedError", "check_entry_point", "ignored"]

LATER = "run it without samebits; it is not covered yet"
"""What to do."""


class RefusedError(ValueError):
    """An engine was asked for something whose bits are not a trainer's.

    Args:
        what: the layer or option.
        reason: why not.
        remedy: what to do.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"samebits: {what}: {reason}. What to do: {remedy}")
        self.what = what


def check_entry_point(group: str, engine: str) -> None:
    """That `engine` can find samebits among its plug-ins: else it would run as it is, unsaid.

    Raises:
        RefusedError: samebits was imported from a folder, and is not installed.
    """
    if all(found.name != "samebits" for found in entry_points(group=group)):
        raise RefusedError(
            "the plug-in", f"samebits is not installed, so {engine} does not find it", "pip install a clone"
        )


def ignored(architecture: str, config: Any) -> str | None:
    """What an engine's own class of an architecture does not look at, and ``transformers`` does.

    Args:
        config: of ``transformers``, for the text model.
    """
    if architecture == "OlmoeForCausalLM" and config.clip_qkv is not None:
        return f"clip_qkv={config.clip_qkv}"
    if architecture == "Qwen3NextForCausalLM":
        for name, value in (("layer_scale", False), ("attn_output_gate", True), ("output_gate_type", "silu")):
            if getattr(config, name, value) != value:
                return f"{name}={getattr(config, name)}"
    return None
