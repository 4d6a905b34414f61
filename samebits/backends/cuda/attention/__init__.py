"""Attention on CUDA tensors, as :mod:`samebits.backends.attention` describes it."""

from __future__ import annotations

from samebits.backends.cuda.attention.universal import backward, forward

__all__ = ["backward", "forward"]
