"""A second implementation of docs/contract.md, "Row reductions", on lists of floats."""

from __future__ import annotations

import numpy as np

from tests.support.naive import INF, by_halves, exp32, f32, fma32, largest, log32

Row = list[float]


def row_sum(x: Row) -> np.float32:
    chains = [f32(0)] * 32
    for b, v in enumerate(range(0, len(x), 128)):
        block = [f32(t) for t in x[v : v + 128]]
        chains[b % 32] = f32(chains[b % 32] + by_halves(block + [f32(0)] * (128 - len(block))))
    return by_halves(chains)


def mean(x: Row) -> np.float32:
    return f32(row_sum(x) / f32(len(x)))


def statistics(z: Row) -> tuple[np.float32, np.float32]:
    """R and S."""
    row = [f32(x) for x in z]
    m = largest(row)
    r = f32(0) if m == -INF else m
    chains = [f32(0)] * 32
    for b, v in enumerate(range(0, len(row), 128)):
        block = row[v : v + 128] + [-INF] * (128 - len(row[v : v + 128]))
        m_b = largest(block)
        r_b = f32(0) if m_b == -INF else m_b
        s_b = by_halves([exp32(f32(x - r_b)) for x in block])
        chains[b % 32] = fma32(s_b, exp32(f32(m_b - r)), chains[b % 32])
    return r, by_halves(chains)


def deviation(x: Row, correction: float, *, root: bool) -> np.float32:
    mean_x = mean(x)
    d = [f32(f32(v) - mean_x) for v in x]
    variance = f32(row_sum([f32(v * v) for v in d]) / f32(max(0, len(x) - correction)))
    return f32(np.sqrt(variance)) if root else variance


def deviation_backward(g: float, x: Row, y: float, correction: float, *, root: bool) -> Row:
    mean_x, count = mean(x), f32(max(0, len(x) - correction))
    if root:
        factor = f32(0) if y == 0 else f32(f32(g) / f32(f32(y) * count))
    else:
        factor = f32(f32(f32(g) * f32(2)) / count)
    return [float(f32(f32(f32(v) - mean_x) * factor)) for v in x]


def vector_norm(x: Row) -> np.float32:
    return f32(np.sqrt(row_sum([f32(f32(v) * f32(v)) for v in x])))


def vector_norm_backward(g: float, x: Row, y: float) -> Row:
    factor = f32(0) if y == 0 else f32(f32(g) / f32(y))
    return [float(f32(f32(v) * factor)) for v in x]


def logsumexp(z: Row) -> np.float32:
    r, s = statistics(z)
    return r if r == INF else f32(r + log32(s))


def logsumexp_backward(g: float, z: Row) -> Row:
    return [float(f32(f32(g) * f32(p))) for p in softmax(z)]


def softmax(z: Row) -> Row:
    r, s = statistics(z)
    return [float(f32(exp32(f32(f32(x) - r)) / s)) for x in z]


def log_softmax(z: Row) -> Row:
    r, s = statistics(z)
    return [float(f32(f32(f32(x) - r) - log32(s))) for x in z]


def softmax_backward(g: Row, p: Row) -> Row:
    d = row_sum([0.0 if b == 0 else f32(f32(b) * f32(a)) for a, b in zip(g, p, strict=True)])
    return [0.0 if b == 0 else float(f32(f32(b) * f32(f32(a) - d))) for a, b in zip(g, p, strict=True)]


def log_softmax_backward(g: Row, y: Row) -> Row:
    total = row_sum(g)
    return [float(fma32(-exp32(f32(b)), total, a)) for a, b in zip(g, y, strict=True)]


def normalised(x: Row, eps: float, *, centred: bool) -> tuple[list[np.float32], np.float32]:
    """y before weight and bias, and r."""
    mu = mean(x) if centred else None
    d = [f32(f32(t) - mu) if centred else f32(t) for t in x]
    r = f32(f32(1) / np.sqrt(f32(mean([f32(t * t) for t in d]) + f32(eps))))
    return [f32(t * r) for t in d], r


def norm(x: Row, weight: Row | None, bias: Row | None, eps: float, *, centred: bool) -> Row:
    y, _ = normalised(x, eps, centred=centred)
    if weight and bias:
        return [float(fma32(*t)) for t in zip(y, weight, bias, strict=True)]
    if weight:
        return [float(f32(a * f32(b))) for a, b in zip(y, weight, strict=True)]
    return (
        [float(a) for a in y] if not bias else [float(f32(a + f32(b))) for a, b in zip(y, bias, strict=True)]
    )


def norm_backward(g: Row, x: Row, weight: Row | None, eps: float, *, centred: bool) -> Row:
    y, r = normalised(x, eps, centred=centred)
    h = [f32(f32(a) * f32(b)) for a, b in zip(g, weight, strict=True)] if weight else [f32(a) for a in g]
    c = mean([f32(a * b) for a, b in zip(h, y, strict=True)])
    m = mean(h) if centred else None
    return [float(f32(r * fma32(-b, c, f32(a - m) if centred else a))) for a, b in zip(h, y, strict=True)]


def norm_columns(g: list[Row], x: list[Row], eps: float, *, centred: bool) -> tuple[Row, Row]:
    """Gradients of weight and bias."""
    ys = [normalised(row, eps, centred=centred)[0] for row in x]
    weight, bias = [f32(0)] * len(x[0]), [f32(0)] * len(x[0])
    for grads, y in zip(g, ys, strict=True):
        weight = [fma32(a, b, acc) for a, b, acc in zip(grads, y, weight, strict=True)]
        bias = [f32(acc + f32(a)) for a, acc in zip(grads, bias, strict=True)]
    return [float(f32(acc + f32(0))) for acc in weight], [float(a) for a in bias]


def column_sum(g: list[Row]) -> Row:
    total = [f32(0)] * len(g[0])
    for row in g:
        total = [f32(acc + f32(a)) for a, acc in zip(row, total, strict=True)]
    return [float(a) for a in total]


def cumulated(x: Row, product: bool = False) -> Row:
    """Every entry takes the one that is 1, 2, 4, … before it."""
    total, step = [f32(v) for v in x], 1
    while step < len(total):
        pairs = zip(total[step:], total, strict=False)
        total = total[:step] + [f32(a * b) if product else f32(a + b) for a, b in pairs]
        step *= 2
    return [float(v) for v in total]


def added_at(x: Row, places: list[int], terms: Row) -> Row:
    """Chains from +0 over the entries of `x` and the terms that are sent to them."""
    total = [f32(f32(0) + f32(v)) for v in x]
    for place, term in zip(places, terms, strict=True):
        total[place] = f32(total[place] + f32(term))
    return [float(v) for v in total]
