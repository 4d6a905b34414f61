"""Selective state spaces, token after token: ``docs/contract.md``, "State spaces".

A unit of work is a sequence and a block of channels of one group. LLVM vectorizes the loops over the channels
of a block. All arrays are float32.
"""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int64 as i64
from numba import void

from samebits.backends.reference.kernels import _njit, fma
from samebits.backends.reference.logp_kernels import _sum_by_halves, exp
from samebits.functions import CHANNEL_BLOCK, STATE_PIECE

_ZERO, _ONE = np.float32(0), np.float32(1)
_M, _C = f32[:, ::1], f32[:, :, ::1]


@_njit()
def _decay(x):
    """e**x for x of both signs."""
    return _ONE / exp(-x) if x > _ZERO else exp(x)


@_njit()
def _power_of_two(n):
    power = 1
    while power < n:
        power *= 2
    return power


@_njit()
def _four_rows():
    rows = np.zeros((4, CHANNEL_BLOCK), np.float32)
    return rows[0], rows[1], rows[2], rows[3]


@_njit()
def _add_pieces(pieces, out):
    """Rows of `pieces`, a power of two of them, added by halves."""
    half = pieces.shape[0] // 2
    while half:
        for i in range(half):
            for c in range(CHANNEL_BLOCK):
                pieces[i, c] += pieces[half + i, c]
        half //= 2
    out[:] = pieces[0]


@_njit()
def _load(unit, blocks, channels, groups, offsets):
    """The sequence, its tokens, and the channels, group and place within the group's blocks of a unit."""
    sequence, block = unit // (blocks * groups), unit % (blocks * groups)
    group, block = block // blocks, block % blocks
    of_group = channels // groups
    channel = group * of_group + block * CHANNEL_BLOCK
    width = min(CHANNEL_BLOCK, of_group - block * CHANNEL_BLOCK)
    return sequence, offsets[sequence], offsets[sequence + 1], channel, width, group, block


@_njit()
def _step(t, n, channel, width, x, steps, decays, row, a, v):
    """The decays a of a token and the state n, and v = u x."""
    if n == 0:
        for c in range(width):
            v[c] = steps[t, channel + c] * x[t, channel + c]
    for c in range(width):
        row[c] = steps[t, channel + c] * decays[channel + c, n]
    for c in range(CHANNEL_BLOCK):
        a[c] = _decay(row[c])


@_njit(void(_M, _M, _M, _C, _C, _C, f32[::1], i64[::1], _M, i64, i64))
def scan(x, steps, decays, b, c_, states, skip, offsets, out, first, last):
    """Outputs of units ``first <= i < last``. `states` are those before, and then those after."""
    channels, groups, size = x.shape[1], b.shape[1], b.shape[2]
    blocks = (channels // groups + CHANNEL_BLOCK - 1) // CHANNEL_BLOCK
    s = np.empty((size, CHANNEL_BLOCK), np.float32)
    pieces = np.empty((_power_of_two((size + STATE_PIECE - 1) // STATE_PIECE), CHANNEL_BLOCK), np.float32)
    a, v, row, y = _four_rows()
    for unit in range(first, last):
        sequence, start, stop, channel, width, group, _ = _load(unit, blocks, channels, groups, offsets)
        s[:] = _ZERO
        for i in range(width):
            for n in range(size):
                s[n, i] = states[sequence, channel + i, n]
        for t in range(start, stop):
            pieces[:] = _ZERO
            for n in range(size):
                _step(t, n, channel, width, x, steps, decays, row, a, v)
                bn, cn, piece = b[t, group, n], c_[t, group, n], pieces[n // STATE_PIECE]
                for i in range(CHANNEL_BLOCK):
                    s[n, i] = fma(a[i], s[n, i], v[i] * bn)
                    piece[i] = fma(s[n, i], cn, piece[i])
            _add_pieces(pieces, y)
            for i in range(width):
                d = skip[channel + i] * x[t, channel + i] if len(skip) else _ZERO
                out[t, channel + i] = y[i] + d if len(skip) else y[i]
        for i in range(width):
            for n in range(size):
                states[sequence, channel + i, n] = s[n, i]


@_njit(
    void(
        *(_M, _M, _M, _M, _C, _C, _C, _C, i64[::1]),
        *(_M, _M, f32[:, :, :, ::1], f32[:, :, :, ::1], _C, i64, i64),
    )
)
def scan_backward(grad, x, steps, decays, b, c_, states, adjoints, offsets, dv, dw, db, dc, da, first, last):
    """Gradients from `grad` of outputs, and from that of the states after, which is in `adjoints`.

    `adjoints` are then those of the states before. dv and dw ``[tokens, channels]`` are what gradients of x
    and steps are made of; db and dc ``[tokens, groups, blocks, size]`` are sums over the channels of a block;
    da is ``[sequences, channels, size]``.
    """
    channels, groups, size = x.shape[1], b.shape[1], b.shape[2]
    blocks = (channels // groups + CHANNEL_BLOCK - 1) // CHANNEL_BLOCK
    count = _power_of_two((size + STATE_PIECE - 1) // STATE_PIECE)
    v_pieces = np.empty((count, CHANNEL_BLOCK), np.float32)
    w_pieces = np.empty((count, CHANNEL_BLOCK), np.float32)
    a, v, row, g = _four_rows()
    of_v, of_w, of_b, of_c = _four_rows()
    for unit in range(first, last):
        sequence, start, stop, channel, width, group, block = _load(unit, blocks, channels, groups, offsets)
        before = np.zeros((max(stop - start, 0) + 1, size, CHANNEL_BLOCK), np.float32)
        carried = np.zeros((size, CHANNEL_BLOCK), np.float32)
        sums = np.zeros((size, CHANNEL_BLOCK), np.float32)
        for i in range(width):
            for n in range(size):
                before[0, n, i] = states[sequence, channel + i, n]
                carried[n, i] = adjoints[sequence, channel + i, n]
        v[:], a[:], row[:], g[:] = _ZERO, _ZERO, _ZERO, _ZERO
        for t in range(start, stop):
            for n in range(size):
                _step(t, n, channel, width, x, steps, decays, row, a, v)
                for i in range(CHANNEL_BLOCK):
                    before[t - start + 1, n, i] = fma(a[i], before[t - start, n, i], v[i] * b[t, group, n])
        for t in range(stop - 1, start - 1, -1):
            v_pieces[:], w_pieces[:] = _ZERO, _ZERO
            for i in range(width):
                g[i] = grad[t, channel + i]
            for n in range(size):
                _step(t, n, channel, width, x, steps, decays, row, a, v)
                bn, cn = b[t, group, n], c_[t, group, n]
                v_piece, w_piece = v_pieces[n // STATE_PIECE], w_pieces[n // STATE_PIECE]
                for i in range(CHANNEL_BLOCK):
                    r = fma(g[i], cn, carried[n, i])
                    of_c[i] = g[i] * before[t - start + 1, n, i]
                    of_b[i] = r * v[i]
                    v_piece[i] = fma(r, bn, v_piece[i])
                    carried[n, i] = a[i] * r
                for i in range(width):
                    q = carried[n, i] * before[t - start, n, i]
                    w_piece[i] = fma(q, decays[channel + i, n], w_piece[i])
                    sums[n, i] = fma(q, steps[t, channel + i], sums[n, i])
                for i in range(width, CHANNEL_BLOCK):
                    of_b[i], of_c[i] = _ZERO, _ZERO
                db[t, group, block, n] = _sum_by_halves(of_b)
                dc[t, group, block, n] = _sum_by_halves(of_c)
            _add_pieces(v_pieces, of_v)
            _add_pieces(w_pieces, of_w)
            dv[t, channel : channel + width] = of_v[:width]
            dw[t, channel : channel + width] = of_w[:width]
        for i in range(width):
            for n in range(size):
                adjoints[sequence, channel + i, n] = carried[n, i]
                da[sequence, channel + i, n] = sums[n, i]
