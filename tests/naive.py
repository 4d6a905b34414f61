"""A second implementation of docs/contract.md, with Python integers and fractions and no cleverness.

It shares no code with the package. Values are Python floats, which hold every bf16, f16 and f32.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

MODELS = {"HOPPER": (16, 25, -133), "AMPERE": (8, 24, -132)}
SMALLEST_NORMAL = {"f16": -14, "bf16": -126, "f32": -126}
# fraction bits and largest finite exponent
FORMATS = {"f16": (10, 15), "bf16": (7, 127), "f32": (23, 127)}


def exponent(x: float, dtype: str) -> int:
    """exp(x) of a finite nonzero x."""
    return max(math.frexp(x)[1] - 1, SMALLEST_NORMAL[dtype])


def round_to(value: Fraction, dtype: str, *, toward_zero: bool = False, negative_zero: bool = False) -> float:
    """An exact value in a format, by RNE or RZ, with subnormals and overflow to infinity."""
    fraction_bits, largest = FORMATS[dtype]
    sign = -1.0 if value < 0 or negative_zero else 1.0
    magnitude = abs(value)
    if magnitude == 0:
        return math.copysign(0.0, sign)
    e = SMALLEST_NORMAL[dtype]
    while magnitude >= Fraction(2) ** (e + 1):
        e += 1
    unit = Fraction(2) ** (e - fraction_bits)
    count = magnitude / unit
    whole = count.numerator // count.denominator
    rest = count - whole
    if not toward_zero and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)):
        whole += 1
    rounded = whole * unit
    if rounded >= Fraction(2) ** (largest + 1):
        return math.copysign(math.inf, sign)
    return math.copysign(float(rounded), sign)


def fused(acc: float, a: list[float], b: list[float], dtype: str, fraction_bits: int, zero: int) -> float:
    """One fused dot-product-add of a tensor core."""
    if not all(map(math.isfinite, [acc, *a, *b])):
        terms = [acc] + [x * y for x, y in zip(a, b, strict=True)]
        if any(map(math.isnan, terms)) or (math.inf in terms and -math.inf in terms):
            return math.nan
        return math.inf if math.inf in terms else -math.inf
    terms, exponents = [], []
    for x, y in zip(a, b, strict=True):
        terms.append(Fraction(x) * Fraction(y))
        exponents.append(zero if x == 0 or y == 0 else exponent(x, dtype) + exponent(y, dtype))
    terms.append(Fraction(acc))
    exponents.append(zero if acc == 0 else exponent(acc, "f32"))
    unit = Fraction(2) ** (max(exponents) - fraction_bits)
    total = sum((math.trunc(t / unit) for t in terms), 0) * unit
    return round_to(total, "f32", toward_zero=True) or 0.0  # a zero is +0


def fma(a: float, b: float, c: float) -> float:
    """IEEE 754 f32 fused multiply-add, RNE."""
    if not all(map(math.isfinite, (a, b, c))):
        product = math.nan if math.isnan(a) or math.isnan(b) else a * b
        return product + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # An exact zero is -0 only if both addends are negative zeros, or underflow exactly to them.
        negative = math.copysign(1, a) * math.copysign(1, b) < 0
        both_zero = Fraction(a) * Fraction(b) == 0 and c == 0
        return -0.0 if both_zero and negative and math.copysign(1, c) < 0 else 0.0
    return round_to(exact, "f32")


def chain(
    sequences: list[list[tuple[float, float]]],
    contract: str,
    dtype: str,
    *,
    acc: float = 0.0,
    plain: bool = True,
) -> float:
    """The accumulator after all sequences of (a, b) terms. `contract` is "FMA" or a model's name."""
    for terms in sequences:
        if contract == "FMA":
            for x, y in terms:
                acc = fma(x, y, acc)
            if not plain and terms:
                acc = fma(0.0, 0.0, acc)
            continue
        group, fraction_bits, zero = MODELS[contract]
        padded = terms + [(0.0, 0.0)] * (-len(terms) % 16)
        for i in range(0, len(padded), group):
            part = padded[i : i + group]
            acc = fused(acc, [x for x, _ in part], [y for _, y in part], dtype, fraction_bits, zero)
    return acc


def finish(acc: float, out: str, bias: float | None = None) -> int:
    """The bits of the result in the output format."""
    if bias is not None:
        if math.isfinite(acc) and math.isfinite(bias):
            both_negative_zero = (
                acc == 0 and bias == 0 and math.copysign(1, acc) + math.copysign(1, bias) == -2
            )
            exact = Fraction(acc) + Fraction(bias)
            acc = round_to(exact, "f32", negative_zero=both_negative_zero)
        else:
            acc = acc + bias
    if math.isnan(acc):
        return 0x7FFFFFFF if out == "f32" else 0x7FFF
    if math.isfinite(acc):
        acc = round_to(Fraction(acc), out, negative_zero=acc == 0 and math.copysign(1, acc) < 0)
    if out == "f16":
        return int(struct.unpack("<H", struct.pack("<e", acc))[0])
    f32 = int(struct.unpack("<I", struct.pack("<f", acc))[0])
    return f32 if out == "f32" else f32 >> 16
