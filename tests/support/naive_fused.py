"""A second implementation of docs/contract.md, "Fused layers", on lists of floats."""

from __future__ import annotations

from tests.support.naive import f32
from tests.support.naive_fp8 import rounded
from tests.support.naive_rows import Row, normalised


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
