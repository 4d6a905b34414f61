"""``samebits.batch_invariant``: PyTorch's own operators run this library's."""

from samebits.mode.context import UncoveredError, batch_invariant

__all__ = ["UncoveredError", "batch_invariant"]
