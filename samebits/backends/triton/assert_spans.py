"""The check of sequence offsets on a GPU, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_spans(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise a device-side assert unless the offsets rise from 0 to `tokens` and never decrease."""
    good = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens) & (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    torch._assert_async(
        good, f"samebits: cu_seqlens: expected offsets that rise from 0 to {tokens} and never decrease"
    )
