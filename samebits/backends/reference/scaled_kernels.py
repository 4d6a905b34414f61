"""Blocks of FP8 and their scales: scalar loops, as ``docs/contract.md`` has them."""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int64 as i64
from numba import uint32 as u32
from numba import void

from samebits.backends.reference.kernels import _njit, f32_to_bits, fma
from samebits.backends.reference.logp_kernels import silu
from samebits.contract import SCALE_BLOCK

_SMALLEST = np.float32(2.0**-126)


@_njit(void(f32[:, :], f32[:, :], f32[:], f32[:]))
def add_scaled(acc, chain, of_rows, of_columns):
    """``acc = fma(chain, s, acc)``, with s the rounded product of a row's and a column's scale."""
    for i in range(acc.shape[0]):
        for j in range(acc.shape[1]):
            acc[i, j] = fma(chain[i, j], of_rows[i] * of_columns[j], acc[i, j])


@_njit(void(f32[:, :], f32[:, :]))
def silu_all(x, out):
    """``out = silu(x)``, element by element."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = silu(x[i, j])


@_njit(void(f32[:, :], i64, f32, u32[:, :], f32[:, :]))
def scale_blocks(x, rows, largest, scale, scaled):
    """``scaled = x * (1 / scale)`` in blocks of `rows` x 128, and the bits of the blocks' scales."""
    for block_row in range(scale.shape[0]):
        for block in range(scale.shape[1]):
            top, bottom = block_row * rows, min((block_row + 1) * rows, x.shape[0])
            left, right = block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, x.shape[1])
            m, finite = np.float32(0), True
            for i in range(top, bottom):
                for j in range(left, right):
                    magnitude = abs(x[i, j])
                    finite = finite and magnitude < np.inf
                    m = max(m, magnitude)
            s = max(m / largest, _SMALLEST)
            scale[block_row, block] = f32_to_bits(s) if finite else np.uint32(0x7FFFFFFF)
            reciprocal = np.float32(1) / s if finite else np.float32(np.nan)
            for i in range(top, bottom):
                for j in range(left, right):
                    scaled[i, j] = x[i, j] * reciprocal
