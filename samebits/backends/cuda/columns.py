"""Sums over tokens, for every column, on CUDA tensors: ``kernels/columns.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows

_FEW = 6144  # columns with which shared memory has room to copy further ahead
_ALONE = 160 << 10  # bytes of shared memory of a block that has a multiprocessor to itself


def kernel_spec(
    grad: torch.dtype,
    out: torch.dtype,
    x: torch.dtype | None = None,
    *,
    vector: int = 1,
    depth: int = 1,
    columns: int = 16,
    tokens: int = 32,
) -> compiler.KernelSpec:
    """The kernel of columns.cu."""
    types = ("GRAD", TYPES[grad]), ("X", TYPES[x]), ("OUT", TYPES[out])
    of_x, chains = (0, columns) if x is None else (x.itemsize, 2 * columns)
    copied = columns * (grad.itemsize + of_x) + (0 if x is None else 8)  # of a token; its mean and scale
    producers = 8 if max(grad.itemsize, of_x) == 2 else 6  # what fits into shared memory several times
    block, smem = 32 * (producers + 1), producers * (depth * tokens * copied + chains * (tokens + 4) * 4)
    constants = *types, ("VECTOR", vector), ("PRODUCERS", producers), ("DEPTH", depth), ("COLUMNS", columns)
    return compiler.KernelSpec(
        *("columns.cu", "column_sums", "PPPPPPqqqq", (*constants, ("TOKENS", tokens))),
        block=block,
        smem=smem,
    )


_kernel = runtime.loader(kernel_spec)


def sums(
    grad: Tensor,
    out: Tensor,
    x: Tensor | None = None,
    means: Tensor | None = None,
    scales: Tensor | None = None,
    product: Tensor | None = None,
) -> None:
    """Sums of columns of ``grad[tokens, n]`` into `out`; those of grad * normalised x into `product`."""
    grad = with_rows(grad)
    count, n = grad.shape
    if n == 0:
        return
    x_at, x_row, x_bytes = (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.itemsize)
    at, row, size = grad.data_ptr(), grad.stride(0), grad.itemsize
    low = at | x_at | (row | n) * size | (x_row | n) * x_bytes
    x_dtype = None if x is None else x.dtype
    device = grad.get_device()
    columns, tokens = _shape_of_block(n, 32 if x is None else 16, device)
    kernel = _kernel(
        *(device, grad.dtype, out.dtype, x_dtype),
        vector=1 if low & 15 else 16 // size,
        depth=1 + (n <= _FEW),
        columns=columns,
        tokens=tokens,
    )
    kernel.launch(
        (-(-n // columns), 1, 1),
        *(at, x_at, address(means), address(scales), address(product), out.data_ptr()),
        *(row, x_row, count, n),
    )


def _shape_of_block(n: int, most: int, device: int) -> tuple[int, int]:
    """The columns of a block, and the tokens of a stage: more where blocks have a multiprocessor each."""
    info = devices.device_info(device)
    if info.max_smem >= _ALONE:
        for columns in (8, 16, 32):
            if columns <= most and -(-n // columns) <= info.sm_count:
                return columns, 64
    return most, 32
