"""A second implementation of "FP8" in docs/contract.md, from that page, with integers and fractions."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np

from tests.support.naive import LN2, LN2_LOW, LOG2E, UNIT, E, exact, f32, finish, fma, fma32, round_to

# exponent bits, fraction bits, bias of the exponent, largest value
FORMATS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0)}
SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14, "f32": -126}
MODEL = (32, 13, -133, 14)


def decoded(code: int, form: str) -> float:
    """The value of a byte."""
    _, fraction_bits, bias, _ = FORMATS[form]
    sign, magnitude = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if form == "e4m3" and magnitude == 0x7F:
        return math.nan
    if form == "e5m2" and magnitude >= 0x7C:
        return sign * math.inf if magnitude == 0x7C else math.nan
    exponent, fraction = magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1)
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)


_VALUES = {form: [decoded(c, form) for c in range(0x7F if form == "e4m3" else 0x7C)] for form in FORMATS}


def encoded(x: float, form: str) -> int:
    """The byte of the value nearest to x, ties to the even byte; x is not beyond the largest value."""
    if math.isnan(x):
        return 0x7F
    magnitude, found = abs(x), _VALUES[form]
    above = bisect.bisect_left(found, magnitude)
    near = [c for c in (above - 1, above) if 0 <= c < len(found)]
    nearest = min(near, key=lambda c: (abs(Fraction(found[c]) - Fraction(magnitude)), c % 2))
    return nearest | (0x80 if math.copysign(1, x) < 0 else 0)


def exponent(x: float, form: str) -> int:
    return max(math.frexp(x)[1] - 1, SMALLEST_NORMAL[form])


def fused(acc: float, a: list[float], b: list[float], left: str, right: str) -> float:
    """One fused sum of up to 32 products and the accumulator."""
    _, fraction_bits, zero, significant = MODEL
    terms = [x * y for x, y in zip(a, b, strict=True)] + [acc]
    if not all(map(math.isfinite, [*a, *b, acc])):
        if any(map(math.isnan, terms)) or (math.inf in terms and -math.inf in terms):
            return math.nan
        return math.inf if math.inf in terms else -math.inf
    exponents = [
        zero if x == 0 or y == 0 else exponent(x, left) + exponent(y, right)
        for x, y in zip(a, b, strict=True)
    ]
    exponents.append(zero if acc == 0 else exponent(acc, "f32"))
    shift = max(exponents) - fraction_bits + UNIT
    count = sum((exact(abs(t)) >> shift) * (1 if t > 0 else -1) for t in terms)
    lost = max(0, abs(count).bit_length() - significant)
    count = (abs(count) >> lost << lost) * (1 if count > 0 else -1)
    return round_to(count << shift, "f32", toward_zero=True) or 0.0


def chain(a: list[float], b: list[float], left: str, right: str, acc: float = 0.0) -> float:
    for k in range(0, len(a), 32):
        acc = fused(acc, a[k : k + 32], b[k : k + 32], left, right)
    return acc


def product(x: float, y: float) -> float:
    """The product of two f32 values by RNE."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y
    negative = math.copysign(1, x) * math.copysign(1, y) < 0
    return round_to(exact(x) * exact(y) >> UNIT, "f32", negative_zero=negative)


def element(
    a: list[float],
    b: list[float],
    left: str,
    right: str,
    scales: list[tuple[float, float]],
    out: str,
    bias: float | None = None,
) -> int:
    """The bits of one output element; `scales` has a pair for every block of 128."""
    acc = 0.0
    for block, (x, y) in enumerate(scales):
        span = slice(128 * block, 128 * (block + 1))
        acc = fma(chain(a[span], b[span], left, right), product(x, y), acc)
    return finish(acc, out, bias)


def quantized(block: list[float], form: str) -> tuple[list[int], float]:
    """The bytes of a block and its scale."""
    if not all(map(math.isfinite, block)):
        return [0x7F] * len(block), math.nan
    largest = max(map(abs, block))
    # Quotients are cut at 2**-298. None is so near to the middle of two f32 values that this would matter.
    scale = max(round_to(int(Fraction(largest) / Fraction(FORMATS[form][3]) * 2**UNIT), "f32"), 2.0**-126)
    reciprocal = round_to(int(2**UNIT / Fraction(scale)), "f32")
    return [encoded(product(x, reciprocal), form) for x in block], scale


def silu(a: float) -> float:
    """``a / (1 + e**-a)`` in f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(f32(a) / one_and_exp_minus(a))


def one_and_exp_minus(a: float) -> np.float32:
    """``1 + e**-a`` in f32."""
    if math.isnan(a):
        return f32(a)
    x = min(max(-a, -64.0), 89.0)
    t = fma32(x, LOG2E, 12583039)
    n = t - f32(12583039)
    f = fma32(n, -LN2_LOW, fma32(n, -LN2, x))
    q = f32(E[6])
    for i in range(5, -1, -1):
        q = fma32(q, f, E[i])
    with np.errstate(over="ignore", invalid="ignore"):
        return f32(f32(1) + q * np.ldexp(f32(1), int(n) - 1) * f32(2))


def rounded(x: float, dtype: str) -> float:
    """`x` in a dtype, by RNE."""
    return round_to(exact(x), dtype, negative_zero=math.copysign(1, x) < 0) if math.isfinite(x) else x


def silu_mul(a: float, b: float, dtype: str) -> float:
    """``silu(a) * b``, both rounded to a dtype."""
    return rounded(product(rounded(silu(a), dtype), b), dtype)
