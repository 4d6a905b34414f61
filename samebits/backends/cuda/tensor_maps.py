"""Tensor maps, which describe tensors to Hopper's copy engine (TMA)."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch

from samebits.backends.cuda import driver
from samebits.backends.product import Matrix

__all__ = ["Maps", "Side", "operand_maps", "tensor_map"]


_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAP_BYTES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_BYTES = {0: 0, 64: 1, 128: 2, 256: 3}
_MAP_SIZES = struct.Struct("@5Q4Q5I5I")  # shape, strides, box, element strides


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
    l2_promotion: int = 256,
) -> bytes:
    """The ``CUtensorMap`` of a tiled tensor: 128 bytes for a ``128s`` member. Elements outside read as zero.

    Args:
        address: address of the first element, a multiple of 16.
        dtype: float16, bfloat16 or float32.
        shape: sizes in elements, innermost dimension first.
        strides: strides in bytes, multiples of 16, of every dimension except the innermost (which is
            contiguous).
        box: the tile's sizes, innermost first.
        swizzle: 0, 32, 64 or 128 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
    """
    buffer, rank = driver.buffer, len(shape)
    more = (0,) * (5 - rank)
    _MAP_SIZES.pack_into(
        buffer.memory, buffer.offset + 128, *shape, *more, *strides, *more, *box, *more, *(1,) * rank, *more
    )
    sizes = buffer.config + 128
    arguments = (
        *(buffer.config, _MAP_DTYPES[dtype], rank, address),
        *(sizes, sizes + 40, sizes + 72, sizes + 92),
        *(0, _MAP_BYTES[swizzle], _L2_BYTES[l2_promotion], 0),
    )
    result = driver.library().cuTensorMapEncodeTiled(*arguments)
    if result == driver.INVALID_CONTEXT:  # for example a thread of autograd's
        driver.make_context_current(torch._C._cuda_getDevice())
        result = driver.library().cuTensorMapEncodeTiled(*arguments)
    if result:
        what = f"{address:#x}, {dtype}, shape {shape}, strides {strides}, box {box}, swizzle {swizzle}"
        raise driver.LaunchError(f"cuTensorMapEncodeTiled({what}): {driver.error_name(result)}")
    return ctypes.string_at(buffer.config, 128)


@dataclass(frozen=True, slots=True)
class Side:
    """One operand: its sizes, and its strides in elements (of the batch, of a row, of k)."""

    rows: int
    k: int
    batch: int
    row_stride: int
    k_stride: int

    @classmethod
    def of(cls, x: Matrix, row_dim: int, k_dim: int) -> Side:
        batch = x.strides[0] if x.ndim == 3 and x.shape[0] > 1 else 0
        return cls(x.shape[row_dim], x.shape[k_dim], batch, x.strides[row_dim], x.strides[k_dim])

    @property
    def k_major(self) -> bool | None:
        """Whether the operand is contiguous along k (or along its rows); None if TMA cannot read it."""
        rows, k = self.rows, self.k
        if (self.k_stride == 1 or k == 1) and (
            rows == 1 or (self.row_stride > 0 and self.row_stride % 8 == 0)
        ):
            return True
        if (self.row_stride == 1 or rows == 1) and (k == 1 or (self.k_stride > 0 and self.k_stride % 8 == 0)):
            return False
        return None


_MOST_MAPS = 4096


class Maps(dict[int, bytes]):
    """The tensor maps of one geometry, by address."""

    __slots__ = ("_recipe",)

    def __init__(self, *recipe: Any) -> None:
        self._recipe = recipe  # the arguments of tensor_map after the address

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_MAPS:
            self.clear()
        made = self[address] = tensor_map(address, *self._recipe)
        return made


def operand_maps(
    dtype: torch.dtype,
    side: Side,
    batch: int,
    mn: bool,
    block: int,
    depth: int,
    sharers: int,
    folded: bool,
    l2_promotion: int,
) -> Maps:
    """The tensor maps of one operand."""
    inner, outer, stride = (side.rows, side.k, side.k_stride) if mn else (side.k, side.rows, side.row_stride)
    stride = stride if outer > 1 else -(-inner // 8) * 8
    batch = batch if side.batch else 1
    batch_stride = side.batch or -(-stride * outer // 8) * 8
    columns = depth // 64
    if folded and not mn and columns % sharers == 0:
        shape = (64, outer, inner // 64, batch)
        strides = (stride * 2, 128, batch_stride * 2)
        return Maps(dtype, shape, strides, (64, block, columns // sharers, 1), 128, l2_promotion)
    strides = (stride * 2, batch_stride * 2, batch_stride * 2)
    width = 32 if mn and block % 64 else 64
    box = (width, (depth if mn else block) // sharers, 1, 1)
    return Maps(dtype, (inner, outer, 1, batch), strides, box, width * 2, l2_promotion)
