"""A second implementation of docs/contract.md, with Python integers and no cleverness.

It shares no code with the package. Values are Python floats, which hold every bf16, f16 and f32. An exact
value is an integer, the count of its units of 2**-298, of which every product of two f32 values has a whole
number.
"""

from __future__ import annotations

import functools
import math
import struct

import numpy as np

MODELS = {"HOPPER": (16, 25, -133), "AMPERE": (8, 24, -132)}
SMALLEST_NORMAL = {"f16": -14, "bf16": -126, "f32": -126}
# fraction bits and largest finite exponent
FORMATS = {"f16": (10, 15), "bf16": (7, 127), "f32": (23, 127)}
UNIT = 298


def exponent(x: float, dtype: str) -> int:
    """exp(x) of a finite nonzero x."""
    return max(math.frexp(x)[1] - 1, SMALLEST_NORMAL[dtype])


def exact(x: float) -> int:
    """The count of a finite value."""
    return int(x * 2.0**UNIT)


def round_to(value: int, dtype: str, *, toward_zero: bool = False, negative_zero: bool = False) -> float:
    """An exact value in a format, by RNE or RZ, with subnormals and overflow to infinity."""
    fraction_bits, largest = FORMATS[dtype]
    sign = -1.0 if value < 0 or negative_zero else 1.0
    magnitude = abs(value)
    e = max(SMALLEST_NORMAL[dtype], magnitude.bit_length() - 1 - UNIT)
    lost = e - fraction_bits + UNIT
    whole = magnitude >> lost
    rest, half = magnitude - (whole << lost), 1 << lost - 1
    if not toward_zero and (rest > half or (rest == half and whole % 2 == 1)):
        whole += 1
    rounded = math.ldexp(whole, e - fraction_bits)
    return math.copysign(rounded if rounded < 2.0 ** (largest + 1) else math.inf, sign)


def fused(acc: float, a: list[float], b: list[float], dtype: str, fraction_bits: int, zero: int) -> float:
    """One fused dot-product-add of a tensor core."""
    if not all(map(math.isfinite, [acc, *a, *b])):
        terms = [acc] + [x * y for x, y in zip(a, b, strict=True)]
        if any(map(math.isnan, terms)) or (math.inf in terms and -math.inf in terms):
            return math.nan
        return math.inf if math.inf in terms else -math.inf
    terms, exponents = [], []
    for x, y in zip(a, b, strict=True):
        terms.append(exact(x) * exact(y) >> UNIT)
        exponents.append(zero if x == 0 or y == 0 else exponent(x, dtype) + exponent(y, dtype))
    terms.append(exact(acc))
    exponents.append(zero if acc == 0 else exponent(acc, "f32"))
    lost = max(exponents) - fraction_bits + UNIT
    total = sum((abs(t) >> lost) * (1 if t > 0 else -1) for t in terms) << lost
    return round_to(total, "f32", toward_zero=True) or 0.0  # a zero is +0


def fma(a: float, b: float, c: float) -> float:
    """IEEE 754 f32 fused multiply-add, RNE."""
    if not all(map(math.isfinite, (a, b, c))):
        product = math.nan if math.isnan(a) or math.isnan(b) else a * b
        return product + c
    product = exact(a) * exact(b) >> UNIT
    if product + exact(c) == 0:
        # An exact zero is -0 only if both addends are negative zeros, or underflow exactly to them.
        negative = math.copysign(1, a) * math.copysign(1, b) < 0
        both_zero = product == 0 and c == 0
        return -0.0 if both_zero and negative and math.copysign(1, c) < 0 else 0.0
    return round_to(product + exact(c), "f32")


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


def segmented(terms: list[tuple[float, float]], contract: str, dtype: str, segments: int) -> float:
    """The accumulator of a plain sum in this number of segments."""
    if segments == 1:
        return chain([terms], contract, dtype)
    half = len(terms) // 2
    left, right = (segmented(part, contract, dtype, segments // 2) for part in (terms[:half], terms[half:]))
    return add(left, right)


def add(x: float, y: float) -> float:
    """The sum of two f32 values by RNE."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    negative_zeros = x == y == 0 and math.copysign(1, x) + math.copysign(1, y) == -2
    return round_to(exact(x) + exact(y), "f32", negative_zero=negative_zeros)


def finish(acc: float, out: str, bias: float | None = None) -> int:
    """The bits of the result in the output format."""
    if bias is not None:
        acc = add(acc, bias)
    if math.isnan(acc):
        return 0x7FFFFFFF if out == "f32" else 0x7FFF
    if math.isfinite(acc):
        acc = round_to(exact(acc), out, negative_zero=acc == 0 and math.copysign(1, acc) < 0)
    if out == "f16":
        return int(struct.unpack("<H", struct.pack("<e", acc))[0])
    f32 = int(struct.unpack("<I", struct.pack("<f", acc))[0])
    return f32 if out == "f32" else f32 >> 16


# ---- log-probabilities: arithmetic of two f32 values is numpy's (rounded once), fma is the one above

E = [float.fromhex(x) for x in ("0x1p+0", "0x1p+0", "0x1.fffffap-2", "0x1.55549p-3", "0x1.555a6ap-5")]
E += [float.fromhex(x) for x in ("0x1.123b28p-7", "0x1.693ea6p-10")]
L = [float.fromhex(x) for x in ("-0x1p-1", "0x1.555554p-2", "-0x1.000226p-2", "0x1.99a008p-3")]
L += [float.fromhex(x) for x in ("-0x1.547244p-3", "0x1.22da1cp-3", "-0x1.0d8542p-3", "0x1.055b72p-3")]
L += [float.fromhex("-0x1.38b59p-4")]
LOG2E, LN2, LN2_LOW = (float.fromhex(x) for x in ("0x1.715476p+0", "0x1.62e43p-1", "-0x1.05c61p-29"))
f32 = np.float32
INF = f32(np.inf)


def fma32(a: float, b: float, c: float) -> np.float32:
    return f32(fma(float(a), float(b), float(c)))


def bits32(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def from_bits32(x: int) -> np.float32:
    return f32(struct.unpack("<f", struct.pack("<I", x & 0xFFFFFFFF))[0])


@functools.cache
def exp32(x: np.float32) -> np.float32:
    if np.isnan(x):
        return x
    x = max(x, f32(-88))
    t = fma32(x, LOG2E, 12583039)
    n = t - f32(12583039)
    f = fma32(n, -LN2_LOW, fma32(n, -LN2, x))
    q = f32(E[6])
    for i in range(5, -1, -1):
        q = fma32(q, f, E[i])
    return f32(q * from_bits32(bits32(t) << 23))


def log32(x: np.float32) -> np.float32:
    if np.isnan(x):
        return x
    if x == 0:
        return -INF
    i = bits32(x) - 0x3F3504F3
    k = i >> 23
    f = from_bits32((i & 0x7FFFFF) + 0x3F3504F3) - f32(1)
    q = f32(L[8])
    for c in reversed(L[:8]):
        q = fma32(q, f, c)
    return fma32(k, LN2, fma32(k, LN2_LOW, fma32(q, f * f, f)))


def by_halves(x: list[np.float32]) -> np.float32:
    while len(x) > 1:
        half = len(x) // 2
        x = [f32(a + b) for a, b in zip(x[:half], x[half:], strict=True)]
    return x[0]


def largest(x: list[np.float32]) -> np.float32:
    return f32(np.nan) if any(map(np.isnan, x)) else max(x)


@functools.cache
def softmax_row(z: tuple[np.float32, ...]) -> tuple[np.float32, np.float32, np.float32]:
    """R, logS and entropy of a row of logits."""
    m, s, u = [], [], []
    for v in range(0, len(z), 128):
        block = [*z[v : v + 128], *[-INF] * (v + 128 - len(z))]
        m.append(largest(block))
        d = [f32(x - (f32(0) if m[-1] == -INF else m[-1])) for x in block]
        e = [exp32(x) for x in d]
        s.append(by_halves(e))
        u.append(by_halves([f32(0) if y == 0 else f32(x * y) for x, y in zip(d, e, strict=True)]))
    largest_m = largest(m)
    shift = f32(0) if largest_m == -INF else largest_m
    s_chains, u_chains = [f32(0)] * 32, [f32(0)] * 32
    for b in range(len(m)):
        a = f32(m[b] - shift)
        w = exp32(a)
        s_chains[b % 32] = fma32(s[b], w, s_chains[b % 32])
        if w != 0:
            u_chains[b % 32] = fma32(fma32(a, s[b], u[b]), w, u_chains[b % 32])
    total = by_halves(s_chains)
    log_sum = log32(total)
    return shift, log_sum, f32(log_sum - f32(by_halves(u_chains) / total))


def logp(z: list[float], target: int, temperature: float = 1.0) -> tuple[np.float32, np.float32]:
    """The log-probability of `target`, and the entropy."""
    with np.errstate(all="ignore"):
        row = tuple(f32(f32(x) * f32(1 / temperature)) for x in z)
        shift, log_sum, entropy = softmax_row(row)
        return f32(f32(row[target] - shift) - log_sum), entropy


def grad_logits(
    z: list[float], target: int, g: float, h: float | None = None, temperature: float = 1.0
) -> list[np.float32]:
    """dz in f32; `h` is the gradient of the entropy, if there is one."""
    with np.errstate(all="ignore"):
        scale = f32(1 / temperature)
        row = tuple(f32(f32(x) * scale) for x in z)
        shift, log_sum, entropy = softmax_row(row)
        g = f32(f32(g) * scale)
        h = None if h is None else f32(f32(h) * scale)
        out = []
        for v, x in enumerate(row):
            y = f32(f32(x - shift) - log_sum)
            p = exp32(y)
            k = g
            if h is not None:
                k = fma32(h, f32(0) if p == 0 else f32(y + entropy), g)
            out.append(fma32(-k, p, g if v == target else f32(0)))
        return out
