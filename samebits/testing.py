"""Comparing results by their bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_same_bits", "bits"]

_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def bits(t: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor, as integers of its width."""
    return t.detach().view(_BITS[t.dtype])


def assert_same_bits(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Raise AssertionError unless two tensors have the same shape, dtype and bits: -0 is not +0, NaN is NaN.

    The error names the number of differing elements, the first one's coordinate, and both values and bit
    patterns there.
    """
    head = f"{message}: " if message else ""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{head}expected {tuple(expected.shape)} {expected.dtype},"
            f" got {tuple(actual.shape)} {actual.dtype}"
        )
    got, want = bits(actual).cpu(), bits(expected).cpu()
    different = (got != want).nonzero()
    if len(different) == 0:
        return
    at = tuple(different[0].tolist())
    width = got.element_size() * 2
    mask = (1 << (4 * width)) - 1
    raise AssertionError(
        f"{head}{len(different)} of {got.numel()} elements differ, first at {at}:"
        f" got {actual[at].item()!r} (0x{int(got[at]) & mask:0{width}X}),"
        f" expected {expected[at].item()!r} (0x{int(want[at]) & mask:0{width}X})"
    )
