"""Log-probabilities as in ``docs/contract.md``: exp, log, and the loops over blocks of the vocabulary.

LLVM vectorizes the loops over the 128 entries of a block.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import boolean, types, void
from numba import float32 as f32
from numba import int64 as i64

from samebits.backends.reference.kernels import _bitcast, _njit, f32_to_bits, fma
from samebits.functions import CHAINS, CONSTANTS, VOCAB_BLOCK

_LOG2E, _LN2, _LN2_LOW = (np.float32(CONSTANTS[name]) for name in ("LOG2E", "LN2", "LN2_LOW"))
_E2, _E3, _E4, _E5, _E6 = (np.float32(CONSTANTS[f"E{i}"]) for i in range(2, 7))
_L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (np.float32(CONSTANTS[f"L{i}"]) for i in range(1, 10))
_ONE, _ZERO, _INF = np.float32(1), np.float32(0), np.float32(np.inf)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_TWO = np.float32(2)
_LOWEST, _NEAR_NOTHING, _PAST_LARGEST = np.float32(-88), np.float32(-64), np.float32(89)
_ONE_EXPONENT = np.uint32(1 << 23)
_TO_INTEGER = np.float32(1.5 * 2**23 + 127)
_SQRT_HALF = np.uint32(0x3F3504F3)

bits_to_f32 = _bitcast(types.uint32, types.float32, ir.FloatType())


@_njit()
def _exp_parts(x):
    """q and the bits of 2**n, with e**x = q * 2**n."""
    t = fma(x, _LOG2E, _TO_INTEGER)
    n = t - _TO_INTEGER
    f = fma(n, -_LN2, x)
    f = fma(n, -_LN2_LOW, f)
    q = fma(_E6, f, _E5)
    q = fma(q, f, _E4)
    q = fma(q, f, _E3)
    q = fma(q, f, _E2)
    q = fma(q, f, _ONE)
    q = fma(q, f, _ONE)
    return q, np.uint32(f32_to_bits(t) << np.uint32(23))


@_njit(f32(f32))
def exp(x):
    """e**x for x <= 0 or NaN, with an error of at most 1 ulp. +0 below -87.7."""
    q, power = _exp_parts(_LOWEST if x < _LOWEST else x)
    return q * bits_to_f32(power)


@_njit()
def one_and_exp_minus(a):
    """``1 + e**-a``, by an e**x for x of both signs. No e**x below 2**-92 would change the sum."""
    x = -a
    x = _NEAR_NOTHING if x < _NEAR_NOTHING else _PAST_LARGEST if x > _PAST_LARGEST else x
    q, power = _exp_parts(x)
    half = q * bits_to_f32(np.uint32(power - _ONE_EXPONENT))
    return _ONE + half * _TWO


@_njit(f32(f32))
def silu(a):
    return a / one_and_exp_minus(a)


@_njit(f32(f32))
def log(x):
    """The natural logarithm of a normal x > 0, of +0 and of NaN, with an error of at most 1 ulp."""
    i = np.int32(f32_to_bits(x) - _SQRT_HALF)
    k = np.float32(i >> 23)
    f = bits_to_f32(np.uint32(i & 0x7FFFFF) + _SQRT_HALF) - _ONE
    q = fma(_L9, f, _L8)
    q = fma(q, f, _L7)
    q = fma(q, f, _L6)
    q = fma(q, f, _L5)
    q = fma(q, f, _L4)
    q = fma(q, f, _L3)
    q = fma(q, f, _L2)
    q = fma(q, f, _L1)
    y = fma(k, _LN2, fma(k, _LN2_LOW, fma(q, f * f, f)))
    return y if x > _ZERO else -_INF if x == _ZERO else x


@_njit(f32(f32[::1]))
def _sum_by_halves(x):
    """The sum of 2**j values, which it overwrites."""
    half = len(x) // 2
    while half:
        for i in range(half):
            x[i] += x[half + i]
        half //= 2
    return x[0]


@_njit(f32(f32[::1]))
def _maximum(x):
    """The largest of 2**j values, which it overwrites; NaN if one is NaN."""
    half = len(x) // 2
    while half:
        for i in range(half):
            a, b = x[i], x[half + i]
            x[i] = a if a > b or a != a else b
        half //= 2
    return x[0]


@_njit(f32(f32))
def _shift(maximum):
    """The value that is subtracted from logits with this maximum."""
    return _ZERO if maximum == -_INF else maximum


@_njit(f32(f32))
def _canonical(x):
    return NAN if x != x else x


_ROWS = f32[:, :]
_ROW = f32[:]


@_njit(void(_ROWS, f32, i64, _ROWS, _ROWS, _ROWS, boolean, i64, i64))
def block_statistics(logits, scale, block, m, s, u, entropy, first, last):
    """``m, s, u[row, block + i]`` of the i-th block that `logits` holds, for rows ``first <= row < last``."""
    width = logits.shape[1]
    z, d = np.empty(VOCAB_BLOCK, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    e, x = np.empty(VOCAB_BLOCK, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    for row in range(first, last):
        for v in range(0, width, VOCAB_BLOCK):
            count, b = min(VOCAB_BLOCK, width - v), block + v // VOCAB_BLOCK
            for i in range(count):
                z[i] = logits[row, v + i] * scale
            z[count:] = -_INF
            x[:] = z
            m[row, b] = _maximum(x)
            shift = _shift(m[row, b])
            for i in range(VOCAB_BLOCK):
                d[i] = z[i] - shift
                e[i] = exp(d[i])
            x[:] = e
            s[row, b] = _sum_by_halves(x)
            if entropy:
                for i in range(VOCAB_BLOCK):
                    x[i] = _ZERO if e[i] == _ZERO else d[i] * e[i]
                u[row, b] = _sum_by_halves(x)


@_njit(void(_ROWS, _ROWS, _ROWS, _ROW, _ROW, _ROW, boolean))
def combine(m, s, u, shift, log_sum, entropies, entropy):
    """Every row's R, logS and entropy from the statistics of its blocks."""
    rows, blocks = m.shape
    s_chain, u_chain = np.empty(CHAINS, np.float32), np.empty(CHAINS, np.float32)
    for row in range(rows):
        largest = m[row, 0]
        for b in range(1, blocks):
            largest = largest if largest > m[row, b] or largest != largest else m[row, b]
        r = _shift(largest)
        s_chain[:], u_chain[:] = _ZERO, _ZERO
        for b in range(blocks):
            a = m[row, b] - r
            w, chain = exp(a), b % CHAINS
            s_chain[chain] = fma(s[row, b], w, s_chain[chain])
            if entropy and w != _ZERO:
                u_chain[chain] = fma(fma(a, s[row, b], u[row, b]), w, u_chain[chain])
        total = _sum_by_halves(s_chain)
        shift[row], log_sum[row] = _canonical(r), _canonical(log(total))
        if entropy:
            entropies[row] = _canonical(log_sum[row] - _sum_by_halves(u_chain) / total)


@_njit(void(_ROW, _ROW, _ROW, _ROW))
def select(target_logit, shift, log_sum, out):
    """``log softmax(z)[t]`` from z[t]."""
    for row in range(len(out)):
        out[row] = _canonical(target_logit[row] - shift[row] - log_sum[row])


@_njit(void(_ROWS, f32, i64[:], boolean[:], _ROW, _ROW, _ROW, _ROW, _ROW, _ROWS, i64, i64))
def grad_logits(logits, scale, target, counts, shift, log_sum, entropy, grad, grad_entropy, out, first, last):
    """dz of rows ``first <= row < last``.

    `grad` and `grad_entropy` (may be empty) are scaled already. `target` counts from the first of these
    logits. dz is zero where `counts` is false.
    """
    for row in range(first, last):
        g, r, log_s = grad[row], shift[row], log_sum[row]
        if not counts[row]:
            out[row] = _ZERO
        elif grad_entropy.size:
            h, mean = grad_entropy[row], entropy[row]
            for v in range(logits.shape[1]):
                y = logits[row, v] * scale - r - log_s
                p = exp(y)
                k = fma(h, _ZERO if p == _ZERO else y + mean, g)
                out[row, v] = fma(-k, p, g if v == target[row] else _ZERO)
        else:
            for v in range(logits.shape[1]):
                y = logits[row, v] * scale - r - log_s
                out[row, v] = fma(-g, exp(y), g if v == target[row] else _ZERO)
