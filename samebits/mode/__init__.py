"""``samebits.batch_invariant`` and its like: PyTorch's functions run this library's operators."""

from samebits.mode.calls import UncoveredError
from samebits.mode.context import batch_invariant
from samebits.mode.flops import register_flops
from samebits.mode.process import (
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    inherit_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)

__all__ = [
    "UncoveredError",
    "batch_invariant",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "inherit_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]

register_flops()
