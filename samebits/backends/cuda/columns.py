"""Sums over tokens, for every column, on CUDA tensors: ``kernels/columns{,_few}.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows

_FEW = 6144  # columns with which shared memory has room to copy further ahead
FEW_TOKENS = 32
"""Up to which :func:`few_sums` takes them."""
_THREADS = 256  # of its blocks
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


def few_spec(
    grad: torch.dtype, out: torch.dtype, vector: int, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of columns_few.cu."""
    constants = ("GRAD", TYPES[grad]), ("OUT", TYPES[out]), ("VECTOR", vector)
    of = "columns_few.cu", "few_column_sums", "PPqqqqq", constants
    return compiler.KernelSpec(*of, block=_THREADS, programmatic=programmatic)


_few_kernel = runtime.loader(few_spec)


def few_sums(grad: Tensor, out: Tensor) -> None:
    """Sums over the first dimension of `grad`, of few tokens, into `out`, contiguous."""
    if out.numel() == 0:
        return
    runs = _runs(grad)
    if runs is None:
        grad = grad.contiguous()
        runs = 0, out.numel()
    step, size = runs
    token, tokens, item = grad.stride(0), grad.shape[0], grad.itemsize
    low = grad.data_ptr() | out.data_ptr() | (step | token | size) * item
    vector = 1 if low & 15 else 16 // item
    count = out.numel() // vector
    _few_kernel(grad.get_device(), grad.dtype, out.dtype, vector).launch(
        (-(-count // _THREADS), 1, 1),
        *(grad.data_ptr(), out.data_ptr(), token, step, count, size // vector, tokens),
    )


def _runs(grad: Tensor) -> tuple[int, int] | None:
    """From one run of a token's entries to the next, and a run's size. None: they lie in another way."""
    step, size = 0, 1  # of what is one run so far
    outer = 0  # entries of the dimensions outside of it
    for n, stride in zip(reversed(grad.shape[1:]), reversed(grad.stride()[1:]), strict=True):
        if n == 1:
            continue
        if not outer and stride == size:
            size *= n
        elif not outer:
            step, outer = stride, n
        elif stride == step * outer:
            outer *= n
        else:
            return None
    return step, size
