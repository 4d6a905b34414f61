"""``samebits.matmul``: matrix products with ``torch.matmul``'s shapes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.backends import broadcast
from samebits.backends.replay import viewed
from samebits.contract import Contract
from samebits.ops._checks import check_operands, check_out_dtype, check_segments, shape
from samebits.ops._operator import reshaped
from samebits.ops._products import product


def matmul(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, contract: Contract | None = None
) -> Tensor:
    """The matrix product of two tensors. Every output element is one chain over ascending k.

    ``out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n]``

    Shapes follow :func:`torch.matmul`: 1-D operands are vectors, and leading dimensions are batches that
    broadcast. An output row depends only on the same row of ``a``, and on ``b``.

    Args:
        a: ``[..., M, K]`` or ``[K]``; bfloat16, float16 or float32, any strides.
        b: ``[..., K, N]`` or ``[K]``; same dtype and device.
        out_dtype: the input dtype (default) or ``torch.float32``. Results are rounded to it once.
        contract: ``samebits.TENSOR_CORE`` (default for bfloat16 and float16) or ``samebits.FMA`` (default
            for float32), or one of them with :meth:`samebits.Contract.segmented`: then K must be a multiple
            of its segments, and N, too, if ``a`` needs a gradient.

    Gradients:
        * of ``a``: a chain over n.
        * of ``b``: a chain over the rows m, in order. Every matrix of a batch starts a new group of 16. If
          ``b`` is broadcast, the chain continues from one matrix of the batch to the next. With 2-D ``b`` the
          rows of ``a[B, ..., K]`` are B sequences, as in :func:`samebits.linear`.
        * of a broadcast ``a``: a chain over the batch, likewise.

        A float32 output gradient of 16-bit operands is first rounded to their dtype under ``TENSOR_CORE``.
        It is used as it is under ``FMA``.

    Raises:
        TypeError: an operand is not a dense bfloat16, float16 or float32 tensor, dtypes differ, or
            ``out_dtype`` or ``contract`` do not fit them.
        ValueError: shapes or devices do not match, or the contract's segments do not divide them.
    """
    (a, b), key, bypass = check_operands("matmul", contract, {"a": a, "b": b})
    dtype = check_out_dtype("matmul", out_dtype, a.dtype)
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        check_segments("matmul", contract, ("a, b: K", a.shape[1]), a, ("b: N", b.shape[1]))
        return product(a, b, None, dtype, key, bypass=bypass)  # type: ignore[no-any-return]
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(
            f"samebits.matmul: a, b: expected at least 1-D, got shapes {shape(a)} and {shape(b)}"
        )
    rows = a if a.ndim > 1 else viewed(a, Tensor.unsqueeze, 0)
    columns = b if b.ndim > 1 else viewed(b, Tensor.unsqueeze, 1)
    if rows.shape[-1] != columns.shape[-2]:
        raise ValueError(
            "samebits.matmul: a, b: inner dimensions must be equal, got"
            f" {rows.shape[-1]} and {columns.shape[-2]} of shapes {shape(a)} and {shape(b)}"
        )
    for i, j in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        if i != j and i != 1 and j != 1:
            raise ValueError(
                "samebits.matmul: a, b: batch dimensions must be equal or 1,"
                f" got shapes {shape(a)} and {shape(b)}"
            )
    broadcasts = columns.ndim > 2 and broadcast(rows.shape[:-2], columns.shape[:-2]) != rows.shape[:-2]
    over = 0 if broadcasts else columns.shape[-1]  # then a's gradient is a chain over the batch
    check_segments("matmul", contract, ("a, b: K", rows.shape[-1]), a, ("b: N", over))
    leading = rows.shape[:-1]
    if columns.ndim == 2 and rows.ndim > 3:
        rows = viewed(rows, Tensor.reshape, (leading[0], math.prod(leading[1:]), rows.shape[-1]))
    out: Tensor = product(rows, columns, None, dtype, key, bypass=bypass)
    wanted = [*(leading if columns.ndim == 2 else out.shape[:-1]), columns.shape[-1]]
    if a.ndim == 1:
        del wanted[-2]
    if b.ndim == 1:
        del wanted[-1]
    return reshaped(out, wanted)
