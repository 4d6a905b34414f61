"""A second implementation of docs/contract.md, "exp2" and "Attention": one sequence, on lists of floats.

The constants of exp2 are read from the page.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.support import ROOT
from tests.support.naive import (
    INF,
    LN2,
    LOG2E,
    bits32,
    chain,
    exact,
    f32,
    fma32,
    from_bits32,
    log32,
    round_to,
)
from tests.support.naive_rows import row_sum

Row = list[float]
Matrix = list[Row]

_PAGE = (ROOT / "docs" / "contract.md").read_text().partition("## exp2")[2].partition("## Attention")[0]
P = [f32(float.fromhex(x)) for x in re.findall(r"\| P\d \| `([^`]+)`", _PAGE)]
NUMBERS = [tuple(map(int, numbers)) for numbers in re.findall(r"\b(\d{8}) (\d{5}) (\d{3})\b", _PAGE)]
EXP2 = {"FMA": "POLYNOMIAL", "AMPERE": "POLYNOMIAL", "HOPPER": "INTERPOLATION"}


@functools.cache
def exp2(x: float, model: str) -> Any:
    x = f32(x)
    if math.isnan(x):
        return x
    if model == "POLYNOMIAL":
        x = min(max(x, f32(-127)), f32(128))
        t = f32(x + f32(12583039))
        f = f32(x - f32(t - f32(12583039)))
        q = P[5]
        for c in (*P[4::-1], 1.0):
            q = fma32(q, f, c)
        return f32(q * from_bits32(bits32(t) << 23))
    if x == -INF or x == INF:
        return f32(0) if x < 0 else INF
    if abs(x) < 2**-30:
        return f32(1)
    fraction = Fraction(float(x)) * 2**23
    q = math.trunc(fraction)
    n = q // 2**23
    i = q - n * 2**23
    k = i if x > 0 else max(i - 1, 0)
    g, y = divmod(k, 2**17)
    s = sum(((y % 2**a) >> (18 - a)) + 2 ** (2 * a - 19) for a in range(10, 17) if y // 2**a % 2)
    c0, c1, c2 = NUMBERS[g]
    significand = (c0 * 2**13 + 6114 + c1 * y + c2 * s) >> 15
    if n >= 128:
        return INF
    return f32(math.ldexp(significand, n - 23)) if n >= -126 else f32(0)


def tanh(y: float, model: str) -> Any:
    e = exp2(f32(abs(f32(y)) * f32(-2 * LOG2E)), model)
    return f32(math.copysign(f32(f32(1 - e) / f32(1 + e)), y))


@dataclass(eq=False)
class Naive:
    """A head of k and v, and the heads of q that share it, in one sequence.

    Attributes:
        q, g: ``[group][queries]`` rows. g is the gradient of the output.
        k, v: ``[keys]`` rows.
        visible: ``[group][queries][keys]``, with windows and masks.
        bias: the same for a float mask.
        sinks: one for each of the group.
        shown: ``[group][queries][keys]``, what a mask shows; None without one.
        offset: position of the first query's own key.
        own: whether queries have own keys.
        contract: "FMA" or a family.
        dtype: "f32", "bf16" or "f16".
    """

    q: list[Matrix]
    k: Matrix
    v: Matrix
    g: list[Matrix]
    visible: list[list[list[bool]]]
    scale: float
    contract: str
    dtype: str
    softcap: float = 0.0
    bias: list[Matrix] | None = None
    sinks: Row | None = None
    shown: list[list[list[bool]]] | None = None
    offset: int = 0
    own: bool = True

    def round16(self, x: float, *, result: bool = False) -> float:
        if (self.contract == "FMA" and not result) or not math.isfinite(x):
            return float(x)
        return round_to(exact(float(x)), self.dtype, negative_zero=math.copysign(1, x) < 0)

    def chain(self, a: Row, b: Row, acc: float = 0.0) -> float:
        return chain([list(zip(a, b, strict=True))], self.contract, self.dtype, acc=float(acc))

    def exp2(self, x: float) -> Any:
        return exp2(float(x), EXP2[self.contract])

    @functools.cache  # noqa: B019
    def score(self, h: int, i: int, j: int) -> tuple[Any, Any, Any]:
        """a, c and what the mask adds."""
        a, c = f32(self.chain(self.q[h][i], self.k[j])), f32(f32(self.scale) * f32(LOG2E))
        if self.softcap:
            a = tanh(f32(a * f32(f32(self.scale) / f32(self.softcap))), EXP2[self.contract])
            c = f32(f32(self.softcap) * f32(LOG2E))
        bias = f32(0) if self.bias is None else f32(f32(self.bias[h][i][j]) * f32(LOG2E))
        return (a if self.visible[h][i][j] and not bias <= -(2**13) else -INF), c, bias

    def ranked(self, h: int, i: int) -> list[int]:
        """The keys of a query; their positions are their indices."""
        return [j for j in range(len(self.k)) if self.shown is None or self.shown[h][i][j]]

    def places(self, h: int) -> list[list[int | None]]:
        """The queries of a head's chain over queries, in groups of 16 places."""
        queries = range(len(self.q[h]))
        groups: dict[tuple[int, int], list[int | None]] = {}

        def put(i: int, restarts: int, place: int) -> None:
            groups.setdefault((restarts, place // 16), [None] * 16)[place % 16] = i

        if self.shown is None or not self.own:
            for i in queries:
                put(i, 0, i + self.offset)
            return list(groups.values())
        restarts, place, others = 0, None, []
        owns = [i + self.offset for i in queries]
        main = [own < 0 or (own < len(self.k) and self.shown[h][i][own]) for i, own in enumerate(owns)]
        for i, own in enumerate(owns):
            before = self.shown[h][i][:own] if own > 0 else []
            if not main[i]:
                if not any(self.shown[h][i]):
                    continue
                if not any(main) or any(main[i:]):
                    others.append(i)
                    continue
                place += 1
            elif own >= 0 and not any(before):
                restarts, place = restarts + 1, 0
            elif place is None:
                place = own if own < 0 else sum(before)
            else:
                place += 1
            put(i, restarts, place)
        for n, i in enumerate(others):
            put(i, restarts + 1, n)
        return list(groups.values())

    @functools.cache  # noqa: B019
    def forward(self, h: int, i: int) -> tuple[Row, Any, Any]:
        """out (rounded to the dtype), lse and lse2 of a query."""
        size = len(self.v[0])
        total, shift, values = f32(0), -INF, [f32(0)] * size

        def merge(n: Any, weight: Any, o: Row) -> None:
            nonlocal total, shift, values
            larger = max(shift, n)
            r = f32(0) if larger == -INF else larger
            x, y = self.exp2(f32(shift - r)), self.exp2(f32(n - r))
            total = fma32(total, x, f32(weight * y))
            values = [fma32(a, x, f32(f32(b) * y)) for a, b in zip(values, o, strict=True)]
            shift = larger

        ranked = self.ranked(h, i)
        for segment in range(0, len(ranked), 512):
            n, lanes, o = -INF, [f32(0)] * 8, [0.0] * size
            for block in range(segment, min(segment + 512, len(ranked)), 128):
                keys = ranked[block : min(block + 128, segment + 512)]
                scores = [self.score(h, i, j) for j in keys]
                sums = [-INF if a == -INF else fma32(a, c, bias) for a, c, bias in scores]
                above = max((x for x in sums if not math.isnan(x)), default=-INF)
                n_next = max(n, f32(math.ceil(above)) if math.isfinite(above) else above)
                r = f32(0) if n_next == -INF else n_next
                alpha = self.exp2(f32(n - r))
                p = [f32(0) if a == -INF else self.exp2(fma32(a, c, f32(bias - r))) for a, c, bias in scores]
                p += [f32(0)] * (128 - len(p))
                lanes = [fma32(lanes[e], alpha, p[e]) for e in range(8)]
                for u in range(1, 16):
                    lanes = [f32(lanes[e] + p[8 * u + e]) for e in range(8)]
                p16 = [self.round16(x) for x in p[: len(keys)]]
                o = [
                    self.chain(p16, [self.v[j][d] for j in keys], f32(f32(o[d]) * alpha)) for d in range(size)
                ]
                n = n_next
            pairs = [f32(lanes[e] + lanes[e + 1]) for e in (0, 2, 4, 6)]
            merge(n, f32(f32(pairs[0] + pairs[1]) + f32(pairs[2] + pairs[3])), o)
        if self.sinks is not None:
            logit = self.sink(h)
            n = f32(math.ceil(logit)) if math.isfinite(logit) else logit
            merge(n, self.exp2(f32(logit - (f32(0) if n == -INF else n))), [0.0] * size)
        if total == 0:
            return [0.0] * size, -INF, -INF
        out = [self.round16(f32(f32(x + f32(0)) * f32(f32(1) / total)), result=True) for x in values]
        logarithm = log32(total)
        return out, fma32(shift, LN2, logarithm), f32(shift + f32(logarithm * f32(LOG2E)))

    def sink(self, h: int) -> Any:
        assert self.sinks is not None
        return f32(f32(self.sinks[h]) * f32(LOG2E))

    def gradients(self) -> tuple[list[Matrix], Matrix, Matrix, list[Matrix], Matrix]:
        """dq, dk, dv before they are rounded to the dtype; u, and what every query adds to its sink's."""
        group, queries, keys = len(self.q), len(self.q[0]), len(self.k)
        p, u, ds = ([[[f32(0)] * keys for _ in range(queries)] for _ in range(group)] for _ in range(3))
        sinks = [[f32(0)] * queries for _ in range(group)]
        for h in range(group):
            for i in range(queries):
                out, _, lse2 = self.forward(h, i)
                g = self.g[h][i]
                d = row_sum([f32(f32(x) * f32(y)) for x, y in zip(g, out, strict=True)])
                if self.sinks is not None and lse2 != -INF:
                    sinks[h][i] = -f32(self.exp2(f32(self.sink(h) - lse2)) * d)
                for j in range(keys):
                    a, c, bias = self.score(h, i, j)
                    if a == -INF or lse2 == -INF:
                        continue
                    p[h][i][j] = self.exp2(fma32(a, c, f32(bias - lse2)))
                    dp = f32(self.chain(g, self.v[j]))
                    u[h][i][j] = ds[h][i][j] = f32(p[h][i][j] * f32(dp - d))
                    if self.softcap:
                        ds[h][i][j] = f32(u[h][i][j] * fma32(-a, a, 1.0))
        scale = f32(self.scale)
        places = [self.places(h) for h in range(group)]

        def over_queries(w: list[Matrix], x: list[Matrix], j: int, d: int) -> Any:
            acc = 0.0
            for h in range(group):
                for members in places[h]:
                    weights = [0.0 if i is None else self.round16(w[h][i][j]) for i in members]
                    acc = self.chain(weights, [0.0 if i is None else x[h][i][d] for i in members], acc)
            return f32(f32(acc) + f32(0))

        dv = [[over_queries(p, self.g, j, d) for d in range(len(self.v[0]))] for j in range(keys)]
        dk = [
            [f32(over_queries(ds, self.q, j, d) * scale) for d in range(len(self.k[0]))] for j in range(keys)
        ]
        dq = [[self._dq(ds[h][i], self.ranked(h, i)) for i in range(queries)] for h in range(group)]
        return dq, dk, dv, u, sinks

    def _dq(self, ds: Row, ranked: list[int]) -> Row:
        weights = [self.round16(ds[j]) for j in ranked]
        columns = ([self.k[j][d] for j in ranked] for d in range(len(self.k[0])))
        return [f32(f32(f32(self.chain(weights, k)) + f32(0)) * f32(self.scale)) for k in columns]
