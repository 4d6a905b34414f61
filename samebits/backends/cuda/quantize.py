"""Quantization of CUDA tensors to FP8: ``kernels/quantize.cu``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.products.tensor_core_sm90 import EPILOGUE_TYPES
from samebits.contract import SCALE_BLOCK

_THREADS = 256
_BLOCKS_AT_ONCE = 64
"""Blocks of 1 x 128 that a block of threads takes."""


def kernel_spec(x: torch.dtype, values: torch.dtype, *, square: bool, vector: bool) -> compiler.KernelSpec:
    """The kernel of ``quantize.cu``."""
    constants = {
        "IN": EPILOGUE_TYPES[x],
        "E5M2": int(values == torch.float8_e5m2),
        "SQUARE": int(square),
        "VECTOR": int(vector),
    }
    return compiler.KernelSpec(
        "quantize.cu", "quantize", "PPPqqii", tuple(constants.items()), block=_THREADS, oldest=(9, 0)
    )


@functools.cache
def _kernel(x: torch.dtype, values: torch.dtype, square: bool, vector: bool, device: int) -> runtime.Kernel:
    return runtime.load(kernel_spec(x, values, square=square, vector=vector), device)


def quantize(x: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales of ``x[M, K]`` in blocks of `rows` x 128, for 1 or 128 rows."""
    device, (m, k) = x.get_device(), x.shape
    x = x if x.stride(1) == 1 or k == 1 else x.contiguous()
    blocks, square = -(-k // SCALE_BLOCK), rows != 1
    values = runtime.empty((m, k), dtype, device)
    scale = runtime.empty((-(-m // rows), blocks), torch.float32, device)
    if values.numel() == 0:
        return values, scale
    row = x.stride(0) if m > 1 else k
    vector = x.data_ptr() % 16 == row * x.element_size() % 16 == k % 8 == 0
    grid = scale.numel() if square else -(-scale.numel() // _BLOCKS_AT_ONCE)
    _kernel(x.dtype, dtype, square, vector, device).launch(
        (grid, 1, 1), x.data_ptr(), values.data_ptr(), scale.data_ptr(), row, m, k, blocks
    )
    return values, scale
