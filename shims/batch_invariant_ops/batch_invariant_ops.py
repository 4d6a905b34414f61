"""The functions of samebits by the name that TorchTitan imports them from."""

from samebits.torchtitan import (
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
)

__all__ = [
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
]
