"""Products of FP8 with scales on CPU tensors, also of groups, and the quantization of their operands."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samebits.backends.reference import scaled_kernels as kernels
from samebits.backends.reference.matmul import (
    _array,
    carry_on,
    finished,
    require_subnormals,
)
from samebits.contract import SCALE_BLOCK


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    """``a[M, K] @ b[N, K].T (+ bias[N])``: in each block of 128 k, a chain times both scales.

    `scale_a` is ``[M, blocks]`` or ``[M, 1]``; `scale_b` is ``[N, blocks]``, ``[ceil(N / 128), blocks]`` or
    ``[N, 1]``.
    """
    require_subnormals()
    (M, K), N = a.shape, b.shape[0]
    blocks = -(-K // SCALE_BLOCK)
    of_rows = _array(scale_a.detach().expand(M, blocks), np.float32)
    if scale_b.shape[0] != N:
        scale_b = scale_b.repeat_interleave(SCALE_BLOCK, 0)[:N]
    of_columns = _array(scale_b.detach().expand(N, blocks), np.float32)
    acc = np.zeros((M, N), np.float32)
    for block in range(blocks):
        start, stop = SCALE_BLOCK * block, min(SCALE_BLOCK * (block + 1), K)
        chain = np.zeros((1, M, N), np.float32)
        terms = a[None, None, :, start:stop], b.mT[None, None, start:stop]
        carry_on(*terms, chain, np.array([[0, 0, stop - start]]), contract, closing_zero=False)
        kernels.add_scaled(acc, chain[0], of_rows[:, block], of_columns[:, block])
    return finished(acc, bias, out_dtype)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    """``a[t] @ b[g, N, K].T (+ bias[g, N])`` for the rows t of every group g, and +0 for rows of none.

    Groups of ``a[T, K]`` lie between the ends `offs`; of ``a[G, M, K]`` each has its first ``offs[g]`` rows.
    """
    out = torch.zeros((*a.shape[:-1], b.shape[1]), dtype=out_dtype)
    ends = offs.tolist()
    for g, end in enumerate(ends):
        rows = (slice(0 if g == 0 else ends[g - 1], end),) if a.ndim == 2 else (g, slice(0, end))
        out[rows] = scaled_mm(
            *(a[rows], b[g], scale_a[rows], scale_b[g]),
            bias=None if bias is None else bias[g],
            out_dtype=out_dtype,
            contract=contract,
        )
    return out


def quantize(x: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales of ``x[M, K]`` in blocks of `rows` x 128."""
    require_subnormals()
    M, K = x.shape
    wide = _array(x.detach().to(torch.float32), np.float32)
    scale = torch.empty((-(-M // rows), -(-K // SCALE_BLOCK)), dtype=torch.float32)
    scaled = torch.empty((M, K), dtype=torch.float32)
    largest = np.float32(torch.finfo(dtype).max)
    kernels.scale_blocks(wide, rows, largest, _array(scale, np.uint32), _array(scaled, np.float32))
    values = scaled.to(dtype)  # rounds to nearest even, and nothing overflows
    codes = values.view(torch.uint8)
    codes[scaled.isnan()] = 0x7F
    return values, scale


def silu_mul_quantize(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales in blocks of 1 x 128 of ``silu(gate) * up``, both rounded to their dtype."""
    require_subnormals()
    wide = _array(gate.detach().to(torch.float32), np.float32)
    activated = torch.empty(gate.shape, dtype=torch.float32)
    kernels.silu_all(wide, _array(activated, np.float32))
    product = activated.to(gate.dtype).to(torch.float32) * up.detach().to(torch.float32)
    return quantize(product.to(gate.dtype), 1, dtype)
