"""What recurrent layers do beside chains: steps of a row, and blocks in which each channel decays.

Arrays are ``[heads, ...]``, float32. Every function works on heads ``first <= h < last``.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, void
from numba import float32 as f32
from numba import int64 as i64

from samebits.backends.reference.attention_kernels import _exp2
from samebits.backends.reference.kernels import _njit, fma

_MATRIX, _ARRAY, _SPAN = f32[:, :], f32[:, :, :], (i64, i64)


@_njit(void(_MATRIX, _ARRAY, _MATRIX, i64, i64, i64, *_SPAN))
def take_out(weights, rows, x, start, stop, step, first, last):
    """``x[h, e] = fma(-weights[h, j], rows[h, j, e], x[h, e])`` for j from `start` to `stop`, by `step`."""
    for h in range(first, last):
        for j in range(start, stop, step):
            weight = -weights[h, j]
            for e in range(x.shape[1]):
                x[h, e] = fma(weight, rows[h, j, e], x[h, e])


@_njit(void(_ARRAY, _ARRAY, _ARRAY, _ARRAY, _ARRAY, i64, boolean, *_SPAN))
def own_scores(x, keys, decays, key_decays, out, offset, interpolate, first, last):
    """``out[h, i, j]``: chains over d of x[i] * keys[j] and the decay from j to i, for ``j <= i + offset``.

    One decay for each channel: ``exp2(decays[i, d] - key_decays[j, d])``.
    """
    for h in range(first, last):
        for i in range(x.shape[1]):
            for j in range(min(i + offset + 1, keys.shape[1])):
                acc = np.float32(0)
                for d in range(x.shape[2]):
                    decay = _exp2(decays[h, i, d] - key_decays[h, j, d], interpolate)
                    acc = fma(x[h, i, d] * keys[h, j, d], decay, acc)
                out[h, i, j] = acc


@_njit(void(_ARRAY, _ARRAY, _ARRAY, _ARRAY, _ARRAY, boolean, boolean, *_SPAN))
def own_gradients(weights, x, decays, x_decays, out, of_keys, interpolate, first, last):
    """Adds to ``out[h, i]`` what the scores of its own block give, over the x[j] in ascending order.

    `weights` are gradients of the scores ``[h, i, j]`` of rows i and of keys ``j <= i``. With `of_keys` it is
    the keys that get them: ``[h, j, i]``, ``i <= j``.
    """
    for h in range(first, last):
        for i in range(out.shape[1]):
            for j in range(x.shape[1]):
                if (i > j) if of_keys else (j > i):
                    continue
                weight = weights[h, j, i] if of_keys else weights[h, i, j]
                for d in range(out.shape[2]):
                    difference = decays[h, i, d] - x_decays[h, j, d]
                    decay = _exp2(-difference if of_keys else difference, interpolate)
                    out[h, i, d] = fma(weight, x[h, j, d] * decay, out[h, i, d])
