"""``samebits.bmm``: batched matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.replay import viewed
from samebits.contract import Contract
from samebits.ops._checks import check_operands, check_out_dtype, check_segments, shape
from samebits.ops._products import product


def bmm(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, contract: Contract | None = None
) -> Tensor:
    """A batch of matrix products, as :func:`torch.bmm`. Either operand may broadcast over the batch.

    ``out[i, m, n] = sum over k of a[i, m, k] * b[i, k, n]``

    Args:
        a: ``[batch, M, K]``, or ``[1, M, K]`` or ``[M, K]`` for every element of the batch.
        b: ``[batch, K, N]``, or ``[1, K, N]`` or ``[K, N]``.
        out_dtype: as in :func:`samebits.matmul`.
        contract: as in :func:`samebits.matmul`.

    Returns:
        ``[batch, M, N]``. No element depends on the batch's size or on its neighbours.

    Gradients: as in :func:`samebits.matmul`. The gradient of an operand that broadcasts is one chain, which
    continues from one element of the batch to the next.

    Raises:
        TypeError: as in :func:`samebits.matmul`.
        ValueError: shapes or devices do not match.
    """
    (a, b), key, bypass = check_operands("bmm", contract, {"a": a, "b": b})
    dtype = check_out_dtype("bmm", out_dtype, a.dtype)
    if {a.ndim, b.ndim} not in ({3}, {2, 3}):
        raise ValueError(
            "samebits.bmm: a, b: expected 3-D, or one 3-D and one 2-D that broadcasts, got shapes"
            f" {shape(a)} and {shape(b)}"
        )
    a3, b3 = (t if t.ndim == 3 else viewed(t, Tensor.unsqueeze, 0) for t in (a, b))
    if a3.shape[0] != b3.shape[0] and 1 not in (a3.shape[0], b3.shape[0]):
        raise ValueError(
            f"samebits.bmm: a, b: batch sizes must be equal or 1, got shapes {shape(a)} and {shape(b)}"
        )
    if a3.shape[2] != b3.shape[1]:
        raise ValueError(
            "samebits.bmm: a, b: inner dimensions must be equal, got"
            f" {a3.shape[2]} and {b3.shape[1]} of shapes {shape(a)} and {shape(b)}"
        )
    over = b3.shape[2] if a3.shape[0] == max(a3.shape[0], b3.shape[0]) else 0  # or a chain over the batch
    check_segments("bmm", contract, ("a, b: K", a3.shape[2]), a, ("b: N", over))
    return product(a3, b3, None, dtype, key, bypass=bypass)  # type: ignore[no-any-return]
