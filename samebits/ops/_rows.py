"""Helpers of row reductions: a tensor as rows over some dimensions, and the backend that reduces them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, module_for
from samebits.backends.replay import viewed
from samebits.ops._checks import are_plain, check_device, check_operands, shape


def backend(t: Tensor) -> Any:
    """The module that reduces rows on the device of `t`."""
    return module_for("rows", t)[0]


def check_rows(op: str, x: Tensor, **vectors: Tensor | None) -> bool:
    """Refuse what the operation `op` on rows of `x` does not take. `vectors` may have dtypes of their own.

    Returns:
        Whether :func:`samebits.ops._operator.bypasses_dispatcher` is known to hold for all.
    """
    given = {name: t for name, t in vectors.items() if t is not None}
    if isinstance(x, Tensor) and are_plain([x, *given.values()]):
        chosen_backend("cuda" if x.is_cuda else "cpu", op)
        return True
    for name, t in {"x": x, **given}.items():
        check_operands(op, None, {name: t}, autocast=False)
        check_device(op, name, t, "x", x)
    return False


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
    if len(given) == 1 and x.ndim > 1 and type(given[0]) is int and given[0] in (-1, x.ndim - 1):
        lead = x.shape[:-1]  # rows lie as they are, which takes a fifth of the time
        rows = x if x.ndim == 2 else viewed(x, Tensor.reshape, (math.prod(lead), x.shape[-1]))
        return rows, [*lead, 1] if keepdim else list(lead)
    ndim = max(x.ndim, 1)  # a 0-D tensor has one dimension here, as in PyTorch
    if not all(-ndim <= d < ndim for d in given):
        raise IndexError(f"samebits.{op}: dim: expected dimensions of a {x.ndim}-D tensor, got {dim}")
    dims = {d % ndim for d in given}
    if len(dims) < len(given):
        raise IndexError(f"samebits.{op}: dim: expected every dimension once, got {dim}")
    kept = [d for d in range(x.ndim) if d not in dims]
    shape = [x.shape[d] for d in kept]
    summed = [d for d in range(x.ndim) if d in dims]
    ordered = viewed(x, Tensor.permute, [*kept, *summed])
    rows = viewed(ordered, Tensor.reshape, (math.prod(shape), math.prod([x.shape[d] for d in summed])))
    return rows, [1 if d in dims else x.shape[d] for d in range(x.ndim)] if keepdim else shape


def row_dim(op: str, x: Tensor, dim: int) -> int:
    """`dim` as a negative index. An IndexError names `op` if `x` has no such dimension."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise IndexError(f"samebits.{op}: dim: expected a dimension of x {shape(x)}, got {dim!r}")
    return dim % x.ndim - x.ndim
