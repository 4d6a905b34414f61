"""``samebits.fuse``: modules of a model in fused operators, each proven to have the bits of its own code."""

from samebits.fusion.fuse import fuse, fuse_parts
from samebits.fusion.report import Fused, Fusion, Left

__all__ = ["Fused", "Fusion", "Left", "fuse", "fuse_parts"]
