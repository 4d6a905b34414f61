"""Tensor maps: what the copy engine (TMA) is told of a tensor, for operands of Hopper's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from samebits.backends.cuda import runtime
from samebits.backends.product import Matrix

__all__ = ["Maps", "Side", "operand_maps"]


@dataclass(frozen=True, slots=True)
class Side:
    """One operand: sizes, and strides in elements (of the batch, of a row, of k)."""

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
        """Whether it is contiguous along k (or else along its rows); None if TMA cannot read it."""
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
        self._recipe = recipe  # what runtime.tensor_map takes after the address

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_MAPS:
            self.clear()
        made = self[address] = runtime.tensor_map(address, *self._recipe)
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
    """One operand as the kernel's tensor map sees it."""
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
