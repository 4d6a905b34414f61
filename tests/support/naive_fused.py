"""A second implementation of docs/contract.md, "Fused layers", on lists of floats."""

from __future__ import annotations

import math

import numpy as np

from tests.support.naive import exp32, f32, fma32
from tests.support.naive_fp8 import one_and_exp_minus, rounded, silu
from tests.support.naive_rows import Row, normalised, row_sum


def add_rms_norm(
    x: Row, residual: Row | None, weight: Row | None, eps: float, offset: float, once: bool, dtype: str
) -> tuple[Row, Row]:
    """The result before its last rounding, and the sum."""
    s = x
    if residual is not None:
        s = [rounded(float(f32(f32(a) + f32(b))), dtype) for a, b in zip(x, residual, strict=True)]
    y = [float(v) for v in normalised(s, eps, centred=False)[0]]
    if not once:
        y = [rounded(v, dtype) for v in y]
    if weight is not None:
        factors = [f32(f32(offset) + f32(w)) if offset else f32(w) for w in weight]
        y = [float(f32(f32(v) * w)) for v, w in zip(y, factors, strict=True)]
    return y, s


def add_rms_norm_backward(
    g: Row,
    of_sum: Row,
    s: Row,
    weight: Row | None,
    eps: float,
    offset: float,
    once: bool,
    dtype: str,
) -> Row:
    """The gradient of the sum before its last rounding. The weight has the same dtype."""
    _, r = normalised(s, eps, centred=False)
    of_y = [f32(v) for v in g]
    if weight is not None:
        factors = [f32(f32(offset) + f32(w)) if offset else f32(w) for w in weight]
        of_y = [f32(v * w) for v, w in zip(of_y, factors, strict=True)]
        if not once:
            of_y = [f32(rounded(float(v), dtype)) for v in of_y]
    along = row_sum([f32(v * f32(h)) for v, h in zip(of_y, s, strict=True)])
    of_squares = f32(f32(f32(f32(-0.5) * along) * f32(f32(r * r) * r)) * f32(1 / len(s)))
    found = []
    for v, h, more in zip(of_y, s, of_sum, strict=True):
        first, second = f32(v * r), f32(of_squares * f32(f32(2) * f32(h)))
        if dtype == "f32":
            found.append(float(f32(f32(f32(more) + first) + second)))
        else:
            found.append(float(f32(f32(more) + f32(rounded(float(f32(first + second)), dtype)))))
    return found


def rotary(head: Row, cos: Row, sin: Row, dim: int, layout: str, between: str) -> Row:
    """A head before its last rounding. `between` is the dtype of products and sums."""
    pairs = dim // 2

    def times(a: float, b: float) -> float:
        return rounded(float(f32(f32(a) * f32(b))), between)

    out = list(head)
    for i in range(pairs):
        first, second = (2 * i, 2 * i + 1) if layout.startswith("pairs") else (i, i + pairs)
        to = (2 * i, 2 * i + 1) if layout == "pairs" else (i, i + pairs)
        at = (i, i) if len(cos) == pairs else to
        a, b = head[first], head[second]
        out[to[0]] = rounded(float(f32(f32(times(a, cos[at[0]])) - f32(times(b, sin[at[0]])))), between)
        out[to[1]] = rounded(float(f32(f32(times(b, cos[at[1]])) + f32(times(a, sin[at[1]])))), between)
    return out


def rotary_backward(head: Row, cos: Row, sin: Row, dim: int, layout: str, between: str, split: bool) -> Row:
    """The gradient of a head, given that of the result, before its last rounding."""
    pairs = dim // 2
    zero = -0.0 if split else 0.0

    def times(a: float, b: float) -> float:
        return rounded(float(f32(f32(a) * f32(b))), between)

    out = [float(f32(f32(g) + f32(zero))) for g in head]
    for i in range(pairs):
        first, second = (2 * i, 2 * i + 1) if layout == "pairs" else (i, i + pairs)
        to = (2 * i, 2 * i + 1) if layout.startswith("pairs") else (i, i + pairs)
        at = (i, i) if len(cos) == pairs else (first, second)
        g, h = head[first], head[second]
        a = rounded(float(f32(f32(times(g, cos[at[0]])) + f32(times(h, sin[at[1]])))), between)
        b = rounded(float(f32(f32(times(h, cos[at[1]])) - f32(times(g, sin[at[0]])))), between)
        out[to[0]], out[to[1]] = (float(f32(f32(v) + f32(zero))) for v in (a, b))
    return out


G = (
    *("-0x1.20dd78p+0", "-0x1.45f28cp-1", "-0x1.a510c8p-4", "0x1.3ada8ap-6", "0x1.ed1856p-15"),
    *("-0x1.9d5694p-10", "0x1.344168p-11", "-0x1.bcb54p-14", "0x1.0de7eap-17"),
)
HALF_ROOT, TANH_SCALE, TANH_CUBE = map(float.fromhex, ("0x1.6a09e6p-1", "0x1.988454p-1", "0x1.6e4e26p-5"))


def erf(x: float) -> np.float32:
    t = f32(min(abs(x), 4.0)) if not math.isnan(x) else f32(x)
    q = f32(float.fromhex(G[8]))
    for i in range(7, -1, -1):
        q = fma32(float(q), float(t), float.fromhex(G[i]))
    return np.copysign(f32(f32(1) - exp32(f32(q * t))), f32(x)) if x else f32(0)


def tanh(x: float) -> np.float32:
    e = exp32(f32(f32(abs(x)) * f32(-2)))
    return np.copysign(f32(f32(1) - f32(f32(e + e) / f32(f32(1) + e))), f32(x)) if x else f32(0)


def activated(a: float, activation: str) -> float:
    """An activation in f32."""
    if activation == "silu":
        return silu(a)
    x = f32(a)
    if activation == "sigmoid":
        return float(f32(1) / one_and_exp_minus(a))
    if activation == "gelu":
        return float(f32(f32(x * f32(0.5)) * f32(f32(1) + erf(float(f32(x * f32(HALF_ROOT)))))))
    cube = f32(f32(x * x) * x)
    y = tanh(float(f32(f32(TANH_SCALE) * fma32(TANH_CUBE, float(cube), a))))
    return float(f32(f32(f32(0.5) * x) * f32(f32(1) + y)))


def gated(a: float, b: float, activation: str, limit: float | None, alpha: float, dtype: str) -> float:
    """One entry before its last rounding."""
    if limit is not None:
        bound = rounded(float(f32(limit)), dtype)
        a = a if math.isnan(a) else min(a, bound)
        b = b if math.isnan(b) else max(min(b, bound), -bound)
    if activation == "gpt_oss":
        scaled = rounded(float(f32(f32(a) * f32(alpha))), dtype)
        weight = rounded(activated(scaled, "sigmoid"), dtype)
        gate = rounded(float(f32(f32(a) * f32(weight))), dtype)
        return float(f32(f32(rounded(float(f32(f32(b) + f32(1))), dtype)) * f32(gate)))
    return float(f32(f32(rounded(activated(a, activation), dtype)) * f32(b)))
