"""Kernels that do to a product what must not be done to it, for the tests to find."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def trap(a, b, out, k, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of ``a[BLOCK, k] @ b[k, BLOCK]``; `WHAT` names what is wrong with it."""
    rows, columns, ks = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, 64)
    even = tl.zeros([BLOCK, BLOCK], tl.float32)
    odd = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k0 in range(0, k, 128):
        x = tl.load(a + rows * k + k0 + ks[None, :])
        y = tl.load(b + (k0 + ks)[:, None] * BLOCK + columns)
        if WHAT == "promoted":
            x, y = x.to(tl.float32), y.to(tl.float32)
        even = tl.dot(x, y, even)
        x = tl.load(a + rows * k + k0 + 64 + ks[None, :])
        y = tl.load(b + (k0 + 64 + ks)[:, None] * BLOCK + columns)
        if WHAT == "two chains":
            odd = tl.dot(x, y, odd)
        elif WHAT == "by multiplications":
            even = tl.dot(x.to(tl.float32), y.to(tl.float32), even, input_precision="ieee")
        else:
            even = tl.dot(x, y, even)
    tl.store(out + rows * BLOCK + columns, even + odd if WHAT == "two chains" else even)
