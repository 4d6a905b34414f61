"""Rows over their 2-norms on CUDA tensors: ``kernels/l2norm.cu``."""

from __future__ import annotations

import itertools

from torch import Tensor

from samebits.backends.cuda import rows, runtime
from samebits.backends.cuda.operands import address, in_lines


def l2norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x ** 2) + eps)`` for each row, contiguous."""
    return _launch("l2norm", x, None, eps)


def l2norm_backward(x: Tensor, grad: Tensor, eps: float) -> Tensor:
    """The gradient of `x` from that of the result."""
    return _launch("l2norm_backward", x, grad, eps)


def _launch(entry: str, x: Tensor, grad: Tensor | None, eps: float) -> Tensor:
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if x.numel() == 0:
        return out
    count, n = x.numel() // x.shape[-1], x.shape[-1]
    given, steps, inner = in_lines(x, grad)
    low = out.data_ptr() | n * x.itemsize
    for t, (outer, step) in zip(given, steps, strict=True):
        low |= address(t) | (outer | step) * x.itemsize
    rows.launch(
        *(entry, count, n, x.get_device(), (x.dtype, x.dtype, x.dtype), None, low),
        *(*map(address, given), out.data_ptr(), *itertools.chain(*steps), count, inner, n, eps),
    )
    return out
