"""What backends of Mamba's scan share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["empty_as", "laid_out"]


def laid_out(u: Tensor, t: Tensor) -> Tensor:
    """``t[batch, channels, T]``, whose tokens lie side by side if those of `u` do, else its channels."""
    if u.stride(2) == 1:
        return t if t.stride(2) == 1 else t.contiguous()
    return t if t.stride(1) == 1 else t.transpose(1, 2).contiguous().transpose(1, 2)


def empty_as(u: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of u's shape, all of whose entries lie in the order of :func:`laid_out`."""
    batch, channels, tokens = u.shape
    if u.stride(2) == 1:
        return u.new_empty((batch, channels, tokens), dtype=dtype)
    return u.new_empty((batch, tokens, channels), dtype=dtype).transpose(1, 2)
