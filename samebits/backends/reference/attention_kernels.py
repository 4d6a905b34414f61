"""What attention of ``docs/contract.md`` does between its chains: weights, merges, gradients of scores.

A row is a query of one head. Arrays ``[heads, rows, ...]`` have for each head of k and v the rows of its
group: row r is query ``r // group`` of the group's head ``r % group``. Every function works on rows
``first <= i < last`` of all heads together.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, void
from numba import float32 as f32
from numba import int64 as i64

from samebits.backends.attention import HIDES, LANES
from samebits.backends.reference.kernels import _njit, f32_to_bits, fma
from samebits.backends.reference.logp_kernels import NAN, _canonical, _shift, bits_to_f32, log
from samebits.backends.reference.rows_kernels import _row_sum
from samebits.functions import CHAINS, CONSTANTS, EX2_SM90, VOCAB_BLOCK

_P1, _P2, _P3, _P4, _P5, _P6 = (np.float32(CONSTANTS[f"P{i}"]) for i in range(1, 7))
_LOG2E, _LN2 = (np.float32(CONSTANTS[name]) for name in ("LOG2E", "LN2"))
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)
_LOWEST, _HIGHEST = np.float32(-127), np.float32(128)
_TO_INTEGER = np.float32(1.5 * 2**23 + 127)
_MINUS_TWO_LOG2E = np.float32(-2) * _LOG2E
_C0, _C1, _C2 = (np.array(numbers, np.int64) for numbers in EX2_SM90[:3])
_CONSTANT = EX2_SM90[3]
_ALMOST_ZERO = np.float32(2.0**-30)
_HIDES = np.float32(HIDES)

_ARRAY = f32[:, :, :]
_PER_ROW = f32[:, :]
_SPAN = (i64, i64)


@_njit(f32(f32))
def exp2_polynomial(x):
    """2**x: the model POLYNOMIAL."""
    x = _LOWEST if x < _LOWEST else _HIGHEST if x > _HIGHEST else x
    t = x + _TO_INTEGER
    f = x - (t - _TO_INTEGER)
    q = fma(_P6, f, _P5)
    q = fma(q, f, _P4)
    q = fma(q, f, _P3)
    q = fma(q, f, _P2)
    q = fma(q, f, _P1)
    q = fma(q, f, _ONE)
    return q * bits_to_f32(np.uint32(f32_to_bits(t) << np.uint32(23)))


@_njit(f32(f32))
def exp2_interpolation(x):
    """2**x: the model INTERPOLATION."""
    if x != x:
        return NAN
    if abs(x) < _ALMOST_ZERO:
        return _ONE
    if x >= _HIGHEST:
        return _INF
    if x < np.float32(-126):
        return _ZERO
    q = np.int64(np.float64(x) * 8388608.0)  # toward zero
    n, k = q >> 23, q & 0x7FFFFF
    if x < _ZERO:
        k = max(k - 1, 0)
    g, y = k >> 17, k & 0x1FFFF
    square = 0
    for a in range(10, 17):
        if y >> a & 1:
            square += ((y & ((1 << a) - 1)) >> (18 - a)) + (1 << (2 * a - 19))
    significand = (_C0[g] * 8192 + _CONSTANT + _C1[g] * y + _C2[g] * square) >> 15
    return bits_to_f32(np.uint32(significand + ((n + 126) << 23)))


@_njit(f32(f32, boolean))
def _exp2(x, interpolate):
    return exp2_interpolation(x) if interpolate else exp2_polynomial(x)


@_njit(f32(f32, boolean))
def tanh(y, interpolate):
    """The hyperbolic tangent that a softcap takes."""
    e = _exp2(abs(y) * _MINUS_TWO_LOG2E, interpolate)
    t = (_ONE - e) / (_ONE + e)
    return -t if f32_to_bits(y) >> np.uint32(31) else t


@_njit(void(f32[:], f32[:], boolean, *_SPAN))
def exp2(x, out, interpolate, first, last):
    """exp2 of every element, for tests."""
    for i in range(first, last):
        out[i] = _exp2(x[i], interpolate)


_SCALES = (f32, f32)  # c, and scale / softcap or 0
_VISIBLE = (i64, i64[:], i64[:], i64)  # first key, each query's first and last key, group
_MASKS = (boolean[:, :, :, :], f32[:, :, :, :])  # [heads, queries, group, keys]; one or both are empty


@_njit()
def _score(a, cap, interpolate, h, query, member, key, first_seen, last_seen, hides, adds):
    """The accumulator, perhaps capped, or -inf where the key is invisible; and what the mask adds."""
    t = tanh(a * cap, interpolate) if cap != _ZERO else a
    seen = first_seen[query] <= key < last_seen[query]
    if seen and hides.size and not hides[h, query, member, key]:
        seen = False
    bias = adds[h, query, member, key] * _LOG2E if adds.size and seen else _ZERO
    return (t if seen and not bias <= _HIDES else -_INF), bias


@_njit(void(_ARRAY, *_SCALES, boolean, *_VISIBLE, *_MASKS, _PER_ROW, _ARRAY, _ARRAY, *_SPAN))
def forward_block(
    a, c, cap, interpolate, key0, first_seen, last_seen, group, hides, adds, n, lanes, o, first, last
):
    """Turn a block's accumulators into weights, add them to `lanes`, and rescale `lanes` and `o`."""
    rows, keys = a.shape[1], a.shape[2]
    biases = np.empty(keys, np.float32)
    for i in range(first, last):
        h, row = i // rows, i % rows
        query, member = row // group, row % group
        largest = -_INF
        for j in range(keys):
            t, biases[j] = _score(
                *(a[h, row, j], cap, interpolate, h, query, member, key0 + j),
                *(first_seen, last_seen, hides, adds),
            )
            a[h, row, j] = t
            s = -_INF if t == -_INF else fma(t, c, biases[j])
            if s > largest:
                largest = s
        n_next = np.ceil(largest)
        if not n_next > n[h, row]:
            n_next = n[h, row]
        r = _shift(n_next)
        alpha = _exp2(n[h, row] - r, interpolate)
        for j in range(keys):
            t = a[h, row, j]
            a[h, row, j] = _ZERO if t == -_INF else _exp2(fma(t, c, biases[j] - r), interpolate)
        for e in range(LANES):
            lanes[h, row, e] = fma(lanes[h, row, e], alpha, a[h, row, e] if e < keys else _ZERO)
        for j in range(LANES, keys):
            lanes[h, row, j % LANES] += a[h, row, j]
        for d in range(o.shape[2]):
            o[h, row, d] *= alpha
        n[h, row] = n_next


@_njit()
def _merge(n_all, n, interpolate):
    """The larger of two exponents, and the factors of what goes by either."""
    larger = n if n > n_all else n_all
    r = _shift(larger)
    return larger, _exp2(n_all - r, interpolate), _exp2(n - r, interpolate)


@_njit(void(_PER_ROW, _ARRAY, _ARRAY, _PER_ROW, _ARRAY, _ARRAY, boolean, *_SPAN))
def merge_segment(n_all, l_all, o_all, n, lanes, o, interpolate, first, last):
    """Add a segment to those before it, and empty it."""
    rows = n.shape[1]
    for i in range(first, last):
        h, row = i // rows, i % rows
        n_all[h, row], x, y = _merge(n_all[h, row], n[h, row], interpolate)
        x0, x1, x2, x3, x4, x5, x6, x7 = lanes[h, row]
        total = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
        l_all[h, row, 0] = fma(l_all[h, row, 0], x, total * y)
        for d in range(o.shape[2]):
            o_all[h, row, d] = fma(o_all[h, row, d], x, o[h, row, d] * y)
        n[h, row], lanes[h, row], o[h, row] = -_INF, _ZERO, _ZERO


@_njit(void(_PER_ROW, _ARRAY, _ARRAY, _PER_ROW, i64, boolean, _PER_ROW, _PER_ROW, *_SPAN))
def finish(n_all, l_all, o_all, sinks, group, interpolate, lse, lse2, first, last):
    """Add `sinks`, if there are any, then divide `o_all` and write the log-sum-exps."""
    rows = n_all.shape[1]
    for i in range(first, last):
        h, row = i // rows, i % rows
        n, total = n_all[h, row], l_all[h, row, 0]
        if sinks.size:
            logit = sinks[h, row % group] * _LOG2E
            own = np.ceil(logit)
            weight = _exp2(logit - _shift(own), interpolate)
            n, x, y = _merge(n, own, interpolate)
            total = fma(total, x, weight * y)
            for d in range(o_all.shape[2]):
                o_all[h, row, d] = fma(o_all[h, row, d], x, _ZERO * y)
        empty = total == _ZERO
        inverse = _ONE / total
        for d in range(o_all.shape[2]):
            o_all[h, row, d] = _ZERO if empty else (o_all[h, row, d] + _ZERO) * inverse
        logarithm = log(total)
        lse[h, row] = -_INF if empty else _canonical(fma(n, _LN2, logarithm))
        lse2[h, row] = -_INF if empty else _canonical(n + logarithm * _LOG2E)


@_njit(void(_PER_ROW, _ARRAY, _ARRAY, *_SPAN))
def dots(d, grad, out, first, last):
    """D of every row: the row's sum of grad * out."""
    rows, size = grad.shape[1], grad.shape[2]
    terms, block = np.empty(size, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    chains = np.empty(CHAINS, np.float32)
    for i in range(first, last):
        h, row = i // rows, i % rows
        for e in range(size):
            terms[e] = grad[h, row, e] * out[h, row, e]
        d[h, row] = _row_sum(terms, block, chains)


@_njit(
    void(_ARRAY, _ARRAY, *_SCALES, boolean, *_VISIBLE, *_MASKS, _PER_ROW, _PER_ROW, f32[:, :, :, :], *_SPAN)
)
def backward_block(
    a, dp, c, cap, interpolate, key0, first_seen, last_seen, group, hides, adds, lse2, d, dmask, first, last
):
    """Turn a block's accumulators `a` into the weights p, and `dp` into ds; fill `dmask`, unless empty."""
    rows, keys = a.shape[1], a.shape[2]
    for i in range(first, last):
        h, row = i // rows, i % rows
        query, member = row // group, row % group
        shift = lse2[h, row]
        for j in range(keys):
            t, bias = _score(
                *(a[h, row, j], cap, interpolate, h, query, member, key0 + j),
                *(first_seen, last_seen, hides, adds),
            )
            if t == -_INF or shift == -_INF:
                a[h, row, j], dp[h, row, j] = _ZERO, _ZERO
                continue
            p = _exp2(fma(t, c, bias - shift), interpolate)
            ds = p * (dp[h, row, j] - d[h, row])
            if dmask.size:
                dmask[h, query, member, key0 + j] = _canonical(ds)
            a[h, row, j] = p
            dp[h, row, j] = ds * fma(-t, t, _ONE) if cap != _ZERO else ds


@_njit(void(_PER_ROW, _PER_ROW, _PER_ROW, _PER_ROW, i64, boolean, *_SPAN))
def sink_terms(out, lse2, d, sinks, group, interpolate, first, last):
    """What every row adds to the gradient of its head's sink."""
    rows = lse2.shape[1]
    for i in range(first, last):
        h, row = i // rows, i % rows
        weight = _exp2(sinks[h, row % group] * _LOG2E - lse2[h, row], interpolate)
        out[h, row] = _ZERO if lse2[h, row] == -_INF else -(weight * d[h, row])
