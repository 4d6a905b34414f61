"""Layers of several elementwise steps, as in ``docs/contract.md``, "Fused layers", on CPU tensors.

Single sums, products and roundings are PyTorch's, which are those of IEEE 754.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.reference import rows
from samebits.backends.reference.matmul import require_subnormals, rounded


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """RMS norm in `dtype` of the rows of `x`, or of their sums with `residual`, and these sums."""
    require_subnormals()
    total = x if residual is None else _rounded(_wide(x) + _wide(residual), x.dtype)
    lines = total.reshape(-1, total.shape[-1]) if total.numel() else total.reshape(0, 0)
    y = rows.norm(lines.to(torch.float32) if once else lines, None, None, eps, False)[0].view(x.shape)
    if weight is not None:
        factor = _wide(weight) if offset == 0 else offset + _wide(weight)
        y = _wide(y) * factor
    return _rounded(_wide(y), dtype), total if residual is not None else x.new_empty(0)


def add_rms_norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
) -> None:
    """The same into `out` and `total`, which may be operands."""
    y, found = add_rms_norm(x, residual, weight, eps, offset, once, out.dtype)
    out.copy_(y)
    if total is not None:
        total.copy_(found)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once to `dtype`, in the shape of `x`. Every NaN becomes the canonical one."""
    return rounded(x.reshape(1, -1), dtype).view(x.shape)
