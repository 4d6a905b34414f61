"""Test helpers: comparison of results by their bits, and operands with a product's edge cases."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KINDS", "assert_same_bits", "bits", "pattern", "values"]

_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}

KINDS = ("normal", "wide", "tiny", "brink", "cancel", "sparse", "huge", "special")
"""Kinds of :func:`values`."""

# Exponents of factors whose products lie near the smallest f32 subnormal and a zero's exponent. For f32, of
# values that lie there themselves.
_BRINK = {torch.float32: (-150, -124), torch.bfloat16: (-84, -58), torch.float16: (-24, -8)}

# The smallest and largest exponent of a dtype, subnormals included.
_EXPONENTS = {torch.float32: (-149, 127), torch.bfloat16: (-133, 127), torch.float16: (-24, 15)}


def bits(t: Tensor) -> Tensor:
    """The bit patterns of a floating-point tensor, as integers of its width."""
    return t.detach().view(_BITS[t.dtype])


def pattern(x: Tensor) -> str:
    """The bit pattern of one value, such as ``0x7FC0``."""
    digits = 2 * x.element_size()
    return f"0x{int(bits(x)) & ((1 << 4 * digits) - 1):0{digits}X}"


def assert_same_bits(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Raise AssertionError unless two tensors have the same shape, dtype and bits.

    -0 is not +0, and a NaN equals a NaN of the same bits. The error names the number of differing elements,
    the first one's coordinate, and both values and bit patterns there.
    """
    head = f"{message}: " if message else ""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{head}expected {tuple(expected.shape)} {expected.dtype},"
            f" got {tuple(actual.shape)} {actual.dtype}"
        )
    different = (bits(actual).cpu() != bits(expected).cpu()).nonzero()
    if len(different) == 0:
        return
    at = tuple(different[0].tolist())
    got, want = actual[at], expected[at]
    raise AssertionError(
        f"{head}{len(different)} of {actual.numel()} elements differ, first at {at}:"
        f" got {got.item()!r} ({pattern(got)}), expected {want.item()!r} ({pattern(want)})"
    )


def values(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Random values of one of :data:`KINDS`. One seed gives the same values on one kind of device."""
    if kind not in KINDS or dtype not in _EXPONENTS:
        raise ValueError(
            f"samebits.testing.values: expected one of {KINDS} and bf16, f16 or f32, got {kind!r} and {dtype}"
        )
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64, device=device)
    low, high = _EXPONENTS[dtype]

    def scale(lo: int, hi: int) -> Tensor:
        return torch.exp2(torch.randint(lo, hi + 1, shape, generator=g, device=device).double())

    if kind == "wide":
        x = x * scale(low // 2, high // 2)
    elif kind == "tiny":
        x = x * scale(low, low + 12)
    elif kind == "brink":
        keep = torch.rand(shape, generator=g, device=device) >= 0.4
        x = torch.where(keep, x * scale(*_BRINK[dtype]), 0.0)
    elif kind == "cancel":
        x = torch.sign(x) * (1 + torch.randint(0, 4, shape, generator=g, device=device) / 64.0)
    elif kind == "sparse":
        keep = torch.rand(shape, generator=g, device=device) >= 0.7
        x = torch.where(keep, x, torch.copysign(torch.zeros_like(x), x))
    elif kind == "huge":
        x = x * scale(high - 6, high)
    elif kind == "special":
        specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], device=device).double()
        pick = specials[torch.randint(0, 5, shape, generator=g, device=device)]
        x = torch.where(torch.rand(shape, generator=g, device=device) < 0.06, pick, x)
    return x.to(dtype)
