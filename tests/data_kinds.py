"""Operand values that try a product's corners: the library's own, which ``samebits verify`` uses too."""

from samebits.testing import KINDS, values

__all__ = ["KINDS", "values"]
