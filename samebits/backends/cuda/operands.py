"""Tensors as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TYPES", "address", "with_rows"]

TYPES = {None: "NONE", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The macros of ``convert.cuh``."""


def address(t: Tensor | None) -> int:
    """Of a tensor that may be missing: then 0."""
    return 0 if t is None else t.data_ptr()


def with_rows(x: Tensor) -> Tensor:
    """The matrix, contiguous along rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
