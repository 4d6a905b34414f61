"""Helpers of row reductions: a tensor as rows over some dimensions, and the backend that reduces them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, UnavailableError, on_gpu, unpack_key
from samebits.ops._checks import shape


def backend(t: Tensor) -> Any:
    """The module that reduces rows on the device of `t`."""
    if t.is_cuda:
        return on_gpu("rows", "", t.get_device())[0]
    from samebits.backends.reference import rows as reference

    return reference


def refuse_triton(op: str, key: Key) -> None:
    """Refuse the Triton backend, if `key` has it as an explicit choice: it does not reduce rows yet."""
    if unpack_key(key)[1] == "triton":
        raise UnavailableError(f"samebits.{op}: backend triton does not compute it yet; choose backend cuda")


_CANONICAL_NAN = {torch.float32: (torch.int32, 0x7FFFFFFF)} | dict.fromkeys(
    (torch.bfloat16, torch.float16), (torch.int16, 32767)
)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 results, rounded once to `dtype`. Every NaN becomes the canonical one."""
    integers, bits = _CANONICAL_NAN[dtype]
    nan = torch.full((), bits, dtype=integers, device=x.device).view(dtype)
    out = x.to(dtype)
    return torch.where(out.isnan(), nan, out)


def as_rows(op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> tuple[Tensor, list[int]]:
    """The elements over `dim` as rows, in row-major order, and the shape of the reduced result.

    `dim` is one or several dimensions. None, or an empty sequence, means all of them.

    Raises:
        IndexError: there is no such dimension, or it is named twice.
    """
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        dim = tuple(range(x.ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    ndim = max(x.ndim, 1)  # a 0-D tensor has one dimension here, as in PyTorch
    if not all(-ndim <= d < ndim for d in given):
        raise IndexError(f"samebits.{op}: dim: expected dimensions of a {x.ndim}-D tensor, got {dim}")
    dims = {d % ndim for d in given}
    if len(dims) < len(given):
        raise IndexError(f"samebits.{op}: dim: expected every dimension once, got {dim}")
    kept = [d for d in range(x.ndim) if d not in dims]
    shape = [x.shape[d] for d in kept]
    summed = [d for d in range(x.ndim) if d in dims]
    rows = x.permute([*kept, *summed]).reshape(math.prod(shape), math.prod([x.shape[d] for d in summed]))
    return rows, [1 if d in dims else x.shape[d] for d in range(x.ndim)] if keepdim else shape


def row_dim(op: str, x: Tensor, dim: int) -> int:
    """`dim` as a negative index. An IndexError names `op` if `x` has no such dimension."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise IndexError(f"samebits.{op}: dim: expected a dimension of x {shape(x)}, got {dim!r}")
    return dim % x.ndim - x.ndim
