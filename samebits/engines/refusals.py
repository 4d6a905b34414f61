"""What an engine's plug-in says when it cannot keep its promise."""

from __future__ import annotations

__all__ = ["RefusedError"]


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
