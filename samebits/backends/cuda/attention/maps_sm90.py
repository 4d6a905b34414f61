"""Operands of attention as Hopper's copy engine reads them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samebits.backends.cuda.tensor_maps import Maps

__all__ = [
    "Layout",
    "copyable_mask",
    "layout",
    "mask_maps",
    "query_maps",
    "readable",
    "shared_matrices",
    "tile_maps",
]

_LARGEST_STRIDE = 1 << 38


def readable(x: Tensor) -> bool:
    """Whether the copy engine can read ``x[..., tokens, heads, size]``."""
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    tokens = x.stride(-3) if x.shape[-3] > 1 else x.shape[-1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s % 8 == 0 and s < _LARGEST_STRIDE for s in strides)
        and tokens
        >= x.shape[-1]  # one matrix may serve all heads or all of the batch, but rows do not overlap
    )


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of ``x[batch, tokens, heads, size]``; strides of sizes 1 are 0."""


def layout(x: Tensor) -> Layout:
    """Of a tensor; a packed one has a batch of 1."""
    shape, strides = tuple(x.shape), x.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    return shape, tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=256)
def tile_maps(dtype: torch.dtype, of: Layout, lines: int, width: int, l2_promotion: int) -> Maps:
    """Tensor maps of tiles of so many tokens of a head; with one matrix where it serves a whole dimension."""
    (batch, tokens, heads, size), (of_batch, of_token, of_head, _) = of
    sizes = (size, tokens, heads if of_head else 1, batch if of_batch else 1)
    strides = tuple(2 * s or 16 for s in (of_token, of_head, of_batch))
    return Maps(dtype, sizes, strides, (width, lines, 1, 1), width * 2, l2_promotion)


def query_maps(dtype: torch.dtype, of: Layout, height: int, members: int) -> Maps:
    (batch, tokens, heads, size), (of_batch, of_token, of_head, _) = of
    sizes = (size, heads if of_head else 1, tokens, batch if of_batch else 1)
    strides = tuple(2 * s or 16 for s in (of_head, of_token, of_batch))
    return Maps(dtype, sizes, strides, (64, members, height, 1), 128)


def copyable_mask(mask: Tensor) -> bool:
    """Whether the copy engine can read a float mask ``[batch, heads, queries, keys]``."""
    item = mask.itemsize
    strides = [s * item for n, s in zip(mask.shape[:3], mask.stride()[:3], strict=True) if n > 1]
    rows = mask.shape[2] == 1 or mask.stride(2) >= mask.shape[3]
    aligned = mask.data_ptr() % 16 == 0 and all(s % 16 == 0 and s < 2 * _LARGEST_STRIDE for s in strides)
    return mask.stride(3) == 1 and rows and aligned


@functools.lru_cache(maxsize=256)
def mask_maps(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], lines: int) -> Maps:
    """Tensor maps of so many queries of a float mask, by 128 bytes of keys."""
    batch, heads, queries, keys = shape
    of_batch, of_head, of_query, _ = strides
    sizes = (keys, queries, heads if of_head else 1, batch if of_batch else 1)
    used = (of_query if queries > 1 else 0, of_head if heads > 1 else 0, of_batch if batch > 1 else 0)
    steps = tuple(dtype.itemsize * s or 16 for s in used)
    return Maps(dtype, sizes, steps, (128 // dtype.itemsize, lines, 1, 1), 128)


def shared_matrices(layouts: tuple[Layout, ...]) -> int:
    """Bits of the operands that have one matrix for all of the batch, then of those that do for all heads."""
    n = len(layouts)
    return sum((s[0] == 0) << i | (s[2] == 0) << i + n for i, (_, s) in enumerate(layouts))
