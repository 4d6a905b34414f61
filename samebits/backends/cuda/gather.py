"""Rows of a table by their numbers, on CUDA tensors: ``kernels/gather.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import OLDEST
from samebits.backends.cuda import compiler, runtime

_NUMBERS = {torch.int64: "i64", torch.int32: "int"}
_UNITS = {16: "uint4", 4: "u32", 2: "u16", 1: "unsigned char"}  # by their bytes
_WARPS, _PART = 8, 128  # warps of a block, and units that a warp copies


def kernel_spec(numbers: torch.dtype, unit: int) -> compiler.KernelSpec:
    """The kernel for numbers of this dtype that copies so many bytes at a time."""
    constants = ("NUMBER", _NUMBERS[numbers]), ("UNIT", _UNITS[unit])
    return compiler.KernelSpec(
        *("gather.cu", "gather", "PPPqqqqq", constants), block=32 * _WARPS, oldest=OLDEST
    )


_kernel = runtime.loader(kernel_spec)


def rows_of(table: Tensor, numbers: Tensor) -> Tensor:
    """``table[numbers]``. A number out of range ends in a device-side assert."""
    count, width = table.shape
    if table.stride(1) != 1 and width > 1:
        return torch.embedding(table, numbers)  # it copies no table
    numbers = numbers.contiguous()
    out = runtime.empty((*numbers.shape, width), table.dtype, table.get_device())
    if out.numel():
        size, step = width * table.itemsize, table.stride(0) * table.itemsize
        unit = next(n for n in _UNITS if (table.data_ptr() | size | step) % n == 0)
        parts = -(-size // (unit * _PART))
        _kernel(table.get_device(), numbers.dtype, unit).launch(
            (-(-numbers.numel() * parts // _WARPS), 1, 1),
            *(table.data_ptr(), numbers.data_ptr(), out.data_ptr()),
            *(numbers.numel(), parts, count, size // unit, step // unit),
        )
    return out
