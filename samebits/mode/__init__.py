"""``samebits.batch_invariant``: PyTorch's functions run this library's operators."""

from samebits.mode.context import UncoveredError, batch_invariant

__all__ = ["UncoveredError", "batch_invariant"]
