"""Tensors as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TYPES", "address", "in_lines", "with_rows"]

TYPES = {None: "NONE", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The macros of ``convert.cuh``."""


def address(t: Tensor | None) -> int:
    """Of a tensor that may be missing: then 0."""
    return 0 if t is None else t.data_ptr()


def with_rows(x: Tensor) -> Tensor:
    """The matrix, contiguous along rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def in_lines(x: Tensor, *others: Tensor | None) -> tuple[list[Tensor | None], list[tuple[int, int]], int]:
    """Tensors of the shape of `x` with rows in at most two dimensions, and contiguous ones.

    Returns:
        views if there are some, else copies; the steps from row to row of each, in both dimensions; and how
        many rows the inner one has.
    """
    given = [None if t is None else _in_lines(t) for t in (x, *others)]
    steps: list[tuple[int, ...]] = [(0, 0) if t is None else t.stride()[:-1] for t in given]
    if x.ndim < 3:
        return given, [(of[0] if of else 0, 0) for of in steps], 1
    inner = x.shape[-2]
    if all(outer == inner * step for outer, step in steps):  # then the rows lie in equal steps
        return given, [(step, 0) for _, step in steps], 1
    return given, [(outer, step) for outer, step in steps], inner


def _in_lines(t: Tensor) -> Tensor:
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        t = t.contiguous()
    return t if t.ndim < 4 else t.reshape(-1, *t.shape[-2:])
