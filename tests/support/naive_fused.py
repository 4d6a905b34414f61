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
TANH_SLOPE, DENSITY = map(float.fromhex, ("0x1.12ba9cp-3", "0x1.988454p-2"))


def erf(x: float) -> np.float32:
    t = f32(min(abs(x), 4.0)) if not math.isnan(x) else f32(x)
    q = f32(float.fromhex(G[8]))
    for i in range(7, -1, -1):
        q = fma32(float(q), float(t), float.fromhex(G[i]))
    return np.copysign(f32(f32(1) - exp32(f32(q * t))), f32(x)) if x else f32(0)


def tanh(x: float) -> np.float32:
    e = exp32(f32(f32(abs(x)) * f32(-2)))
    return np.copysign(f32(f32(1) - f32(f32(e + e) / f32(f32(1) + e))), f32(x)) if x else f32(0)


def tanh_of_gelu(a: float) -> np.float32:
    x = f32(a)
    cube = f32(f32(x * x) * x)
    return tanh(float(f32(f32(TANH_SCALE) * fma32(TANH_CUBE, float(cube), a))))


def activated(a: float, activation: str) -> float:
    """An activation in f32."""
    if activation == "silu":
        return silu(a)
    x = f32(a)
    if activation.startswith("relu"):
        x = x if x > 0 or math.isnan(a) else f32(0)
        return float(f32(x * x) if activation == "relu2" else x)
    if activation == "sigmoid":
        return float(f32(1) / one_and_exp_minus(a))
    if activation == "gelu":
        return float(f32(f32(x * f32(0.5)) * f32(f32(1) + erf(float(f32(x * f32(HALF_ROOT)))))))
    return float(f32(f32(f32(0.5) * x) * f32(f32(1) + tanh_of_gelu(a))))


def of_sigmoid(g: float, y: float) -> np.float32:
    return f32(f32(f32(g) * f32(f32(1) - f32(y))) * f32(y))


def gradient(g: float, a: float, activation: str, dtype: str) -> float:
    """The gradient of an activation before its last rounding, given that of the result."""
    x, of_result = f32(a), f32(g)
    if activation == "sigmoid":
        return float(of_sigmoid(g, rounded(activated(a, "sigmoid"), dtype)))
    if activation.startswith("relu"):
        if a <= 0:
            return 0.0
        return float(of_result * f32(rounded(float(f32(x + x)), dtype))) if activation == "relu2" else g
    if activation == "silu":
        y = f32(activated(a, "sigmoid"))
        return float(f32(f32(of_result * y) * fma32(a, float(f32(f32(1) - y)), 1.0)))
    if activation == "gelu":
        below = f32(f32(0.5) * f32(f32(1) + erf(float(f32(x * f32(HALF_ROOT))))))
        density = f32(f32(DENSITY) * exp32(f32(f32(x * x) * f32(-0.5))))
        return float(f32(of_result * fma32(a, float(density), float(below))))
    y = tanh_of_gelu(a)
    slope = f32(f32(TANH_SCALE) * fma32(TANH_SLOPE, float(f32(x * x)), 1.0))
    of_tanh = f32(f32(f32(f32(0.5) * x) * fma32(float(-y), float(y), 1.0)) * slope)
    return float(f32(of_result * f32(f32(f32(0.5) * f32(f32(1) + y)) + of_tanh)))


def gated(
    a: float, b: float, activation: str, limit: float | None, alpha: float, dtype: str, once: bool
) -> float:
    """One entry before its last rounding."""
    a, b = _limited(a, b, limit, dtype)
    gate, factor = _parts(a, b, activation, alpha, "f32" if once else dtype)
    return float(f32(f32(gate) * f32(factor)))


def gated_backward(
    g: float, a: float, b: float, activation: str, limit: float | None, alpha: float, dtype: str, once: bool
) -> tuple[float, float]:
    """The gradients of a gate and its factor before their last roundings."""
    within = a, b
    a, b = _limited(a, b, limit, dtype)
    between = "f32" if once else dtype
    gate, factor = _parts(a, b, activation, alpha, between)
    of_factor = float(f32(f32(g) * f32(gate)))
    of_gate = rounded(float(f32(f32(g) * f32(factor))), between)
    if activation == "gpt_oss":
        weight = rounded(activated(rounded(float(f32(f32(a) * f32(alpha))), dtype), "sigmoid"), dtype)
        of_weight = rounded(float(f32(f32(of_gate) * f32(a))), dtype)
        of_scaled = rounded(float(of_sigmoid(of_weight, weight)), dtype)
        direct, other = (
            rounded(float(f32(f32(x) * f32(y))), dtype) for x, y in ((of_gate, weight), (of_scaled, alpha))
        )
        of_gate = float(f32(f32(direct) + f32(other)))
    else:
        of_gate = gradient(of_gate, a, activation, between)
    if limit is None:
        return of_gate, of_factor
    bound = rounded(float(f32(limit)), dtype)
    return of_gate if within[0] <= bound else 0.0, of_factor if -bound <= within[1] <= bound else 0.0


def _limited(a: float, b: float, limit: float | None, dtype: str) -> tuple[float, float]:
    if limit is None:
        return a, b
    bound = rounded(float(f32(limit)), dtype)
    return a if math.isnan(a) else min(a, bound), b if math.isnan(b) else max(min(b, bound), -bound)


def _parts(a: float, b: float, activation: str, alpha: float, dtype: str) -> tuple[float, float]:
    """The gate's activation and the factor, rounded."""
    if activation != "gpt_oss":
        return rounded(activated(a, activation), dtype), b
    scaled = rounded(float(f32(f32(a) * f32(alpha))), dtype)
    weight = rounded(activated(scaled, "sigmoid"), dtype)
    return rounded(float(f32(f32(a) * f32(weight))), dtype), rounded(float(f32(f32(b) + f32(1))), dtype)
