"""Row reductions as in ``docs/contract.md``, and chains over tokens for every column.

Every function works on rows (or columns) ``first <= i < last`` of float32 arrays.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, void
from numba import float32 as f32
from numba import int64 as i64

from samebits.backends.reference.kernels import _njit, fma
from samebits.backends.reference.logp_kernels import _maximum, _shift, _sum_by_halves, exp, log
from samebits.functions import CHAINS, VOCAB_BLOCK

_ROWS = f32[:, :]
_ROW = f32[:]
_SPAN = (i64, i64)
_ZERO, _ONE, _INF = np.float32(0), np.float32(1), np.float32(np.inf)


@_njit(f32(f32[::1], f32[::1], f32[::1]))
def _row_sum(terms, block, chains):
    """The sum of a row's terms. `block` and `chains` are scratch memory."""
    chains[:] = _ZERO
    for v in range(0, len(terms), VOCAB_BLOCK):
        count = min(VOCAB_BLOCK, len(terms) - v)
        block[:count] = terms[v : v + count]
        block[count:] = _ZERO
        chains[v // VOCAB_BLOCK % CHAINS] += _sum_by_halves(block)
    return _sum_by_halves(chains)


@_njit(void(_ROWS, _ROW, boolean, *_SPAN))
def row_sum(x, out, mean, first, last):
    """Sums, or with `mean` sums divided by the number of terms."""
    count = x.shape[1]
    terms, block = np.empty(count, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    chains = np.empty(CHAINS, np.float32)
    for row in range(first, last):
        terms[:] = x[row]
        total = _row_sum(terms, block, chains)
        out[row] = total / np.float32(count) if mean else total


@_njit(void(_ROWS, _ROWS, boolean, *_SPAN))
def softmax(z, out, logarithm, first, last):
    """exp(z - R) / S, or with `logarithm` (z - R) - log S."""
    count = z.shape[1]
    block, chains = np.empty(VOCAB_BLOCK, np.float32), np.empty(CHAINS, np.float32)
    for row in range(first, last):
        largest = -_INF
        for v in range(count):
            largest = z[row, v] if z[row, v] > largest or z[row, v] != z[row, v] else largest
            if largest != largest:
                break
        r = _shift(largest)
        chains[:] = _ZERO
        for v in range(0, count, VOCAB_BLOCK):
            n = min(VOCAB_BLOCK, count - v)
            block[:n] = z[row, v : v + n]
            block[n:] = -_INF
            m = _maximum(block)
            shift = _shift(m)
            for i in range(VOCAB_BLOCK):
                block[i] = exp(z[row, v + i] - shift) if i < n else _ZERO
            chain = v // VOCAB_BLOCK % CHAINS
            chains[chain] = fma(_sum_by_halves(block), exp(m - r), chains[chain])
        total = _sum_by_halves(chains)
        if logarithm:
            log_sum = log(total)
            for v in range(count):
                out[row, v] = z[row, v] - r - log_sum
        else:
            for v in range(count):
                out[row, v] = exp(z[row, v] - r) / total


@_njit(void(_ROWS, _ROWS, _ROWS, *_SPAN))
def softmax_backward(grad, p, out, first, last):
    """p * (grad - D), with D the row's sum of p * grad. +0 where p is +0."""
    count = grad.shape[1]
    terms, block = np.empty(count, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    chains = np.empty(CHAINS, np.float32)
    for row in range(first, last):
        for v in range(count):
            terms[v] = _ZERO if p[row, v] == _ZERO else p[row, v] * grad[row, v]
        total = _row_sum(terms, block, chains)
        for v in range(count):
            q = p[row, v]
            out[row, v] = _ZERO if q == _ZERO else q * (grad[row, v] - total)


@_njit(void(_ROWS, _ROWS, _ROWS, *_SPAN))
def log_softmax_backward(grad, y, out, first, last):
    """grad - exp(y) * D, with D the row's sum of grad."""
    count = grad.shape[1]
    terms, block = np.empty(count, np.float32), np.empty(VOCAB_BLOCK, np.float32)
    chains = np.empty(CHAINS, np.float32)
    for row in range(first, last):
        terms[:] = grad[row]
        total = _row_sum(terms, block, chains)
        for v in range(count):
            out[row, v] = fma(-exp(y[row, v]), total, grad[row, v])


@_njit(void(_ROWS, _ROW, _ROW, f32, boolean, _ROWS, _ROW, _ROW, *_SPAN))
def norm(x, weight, bias, eps, centred, out, means, scales, first, last):
    """Layer norm, or RMS norm without `centred`. `weight` and `bias` may be empty."""
    count = x.shape[1]
    d, terms = np.empty(count, np.float32), np.empty(count, np.float32)
    block, chains = np.empty(VOCAB_BLOCK, np.float32), np.empty(CHAINS, np.float32)
    for row in range(first, last):
        d[:] = x[row]
        if centred:
            means[row] = _row_sum(d, block, chains) / np.float32(count)
            for i in range(count):
                d[i] = x[row, i] - means[row]
        for i in range(count):
            terms[i] = d[i] * d[i]
        scales[row] = _ONE / np.sqrt(_row_sum(terms, block, chains) / np.float32(count) + eps)
        for i in range(count):
            y = d[i] * scales[row]
            if weight.size:
                y = fma(y, weight[i], bias[i]) if bias.size else y * weight[i]
            elif bias.size:
                y = y + bias[i]
            out[row, i] = y


@_njit(f32(f32, _ROW, f32, i64))
def _normalised(x, means, scale, row):
    return (x - means[row]) * scale if means.size else x * scale


@_njit(void(_ROWS, _ROWS, _ROW, _ROW, _ROW, _ROWS, *_SPAN))
def norm_backward(grad, x, weight, means, scales, out, first, last):
    """dx of `norm`. `means` is empty for an RMS norm."""
    count = x.shape[1]
    g, terms = np.empty(count, np.float32), np.empty(count, np.float32)
    block, chains = np.empty(VOCAB_BLOCK, np.float32), np.empty(CHAINS, np.float32)
    for row in range(first, last):
        scale = scales[row]
        for i in range(count):
            g[i] = grad[row, i] * weight[i] if weight.size else grad[row, i]
            terms[i] = g[i] * _normalised(x[row, i], means, scale, row)
        along = _row_sum(terms, block, chains) / np.float32(count)
        mean = _row_sum(g, block, chains) / np.float32(count) if means.size else _ZERO
        for i in range(count):
            centred = g[i] - mean if means.size else g[i]
            out[row, i] = scale * fma(-_normalised(x[row, i], means, scale, row), along, centred)


@_njit(void(_ROWS, _ROWS, _ROW, _ROW, _ROW, _ROW, *_SPAN))
def norm_columns(grad, x, means, scales, weight_grad, bias_grad, first, last):
    """Gradients of `norm`'s weight and bias for some columns: chains over the rows."""
    weight_grad[first:last], bias_grad[first:last] = _ZERO, _ZERO
    for row in range(x.shape[0]):
        scale = scales[row]
        for i in range(first, last):
            y = _normalised(x[row, i], means, scale, row)
            weight_grad[i] = fma(grad[row, i], y, weight_grad[i])
            bias_grad[i] += grad[row, i]
    for i in range(first, last):
        weight_grad[i] += _ZERO


@_njit(void(_ROWS, _ROW, *_SPAN))
def column_sum(x, out, first, last):
    """Sums of some columns: chains over the rows."""
    out[first:last] = _ZERO
    for row in range(x.shape[0]):
        for i in range(first, last):
            out[i] += x[row, i]


@_njit(void(_ROWS, i64[:], i64, _ROWS, *_SPAN))
def embedding_backward(grad, ids, padding, out, first, last):
    """Some columns of an embedding's gradient: chains over the tokens with each row's id."""
    out[:, first:last] = _ZERO
    for token in range(grad.shape[0]):
        row = ids[token]
        if row != padding:
            for i in range(first, last):
                out[row, i] += grad[token, i]
