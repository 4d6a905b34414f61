"""What operations on rows share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samebits.backends import UnavailableError, on_gpu
from samebits.ops._library import shape


def backend(t: Tensor) -> Any:
    """The module that reduces rows on the device of `t`."""
    if t.is_cuda:
        return on_gpu("rows", "", t.get_device())[0]
    from samebits.backends.reference import rows as reference

    return reference


def refuse_triton(op: str, key: str) -> None:
    """Triton reduces no rows yet, and an explicit choice never falls back; `key` says what was chosen."""
    if key.endswith("@triton"):
        raise UnavailableError(f"samebits.{op}: backend triton does not compute it yet; choose backend cuda")


def row_dim(op: str, x: Tensor, dim: int) -> int:
    """`dim`, counted from the end of a tensor that has it."""
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise IndexError(f"samebits.{op}: dim: expected a dimension of x {shape(x)}, got {dim!r}")
    return dim % x.ndim - x.ndim
