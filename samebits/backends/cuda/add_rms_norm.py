"""A residual sum and an RMS norm on CUDA tensors: ``kernels/add_rms_norm{,_backward}.cu``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from samebits.backends.cuda import rows, runtime
from samebits.backends.cuda.operands import address, in_lines, with_rows


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    dtype: torch.dtype,
    *,
    schedule: rows.RowSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm in `dtype` of the rows of `x`, or of their sums with `residual`, and these sums."""
    device = x.get_device()
    out = runtime.empty(x.shape, dtype, device)
    total = runtime.empty((0,) if residual is None else x.shape, x.dtype, device)
    into = out, total if residual is not None else None
    add_rms_norm_into(x, residual, weight, *into, eps, offset, once, schedule=schedule)
    return out, total


def add_rms_norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    *,
    schedule: rows.RowSchedule | None = None,
) -> None:
    """The same into `out` and `total`, which may be operands."""
    if x.numel() == 0:
        return
    rows_in_all, n = x.numel() // x.shape[-1], x.shape[-1]
    if weight is not None and n > 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    given, steps, inner = in_lines(x, residual, out, total)
    low = address(weight)
    for t, (outer, step) in zip(given, steps, strict=True):
        low |= 0 if t is None else t.data_ptr() | (outer | step) * t.itemsize
    operands = address(given[0]), address(given[1]), address(weight), *map(address, given[2:])
    types = x.dtype, out.dtype, torch.float32 if weight is None else weight.dtype
    rows.launch(
        "add_rms_norm",
        rows_in_all,
        n,
        x.get_device(),
        types,
        schedule,
        low,
        *operands,
        *(*itertools.chain(*steps), rows_in_all, inner, n, eps, offset, int(once)),
    )
    for written, into in zip(given[2:], (out, total), strict=True):
        if into is not None and written is not None and written.data_ptr() != into.data_ptr():
            into.copy_(written.view(into.shape))


def add_rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    weighted: bool,
    *,
    schedule: rows.RowSchedule | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of x and residual; and, if `weighted`, what is summed over rows for that of the weight."""
    n, device = s.shape[-1], s.get_device()
    out = runtime.empty(s.shape, s.dtype, device)
    weighted = weighted and weight is not None
    terms = runtime.empty(s.shape if weighted else (0,), torch.float32 if once else grad.dtype, device)
    if s.numel() == 0:
        return out, terms
    if weight is not None and n > 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    x, g, more = (None if t is None else with_rows(t.reshape(-1, n)) for t in (s, grad, grad_sum))
    low, steps = address(weight), []
    for t in (x, g, more):
        steps.append(0 if t is None else t.stride(0))
        low |= 0 if t is None else t.data_ptr() | steps[-1] * t.itemsize
    count = s.numel() // n
    types = s.dtype, grad.dtype, torch.float32 if weight is None else weight.dtype
    rows.launch(
        "add_rms_norm_backward",
        count,
        n,
        device,
        types,
        schedule,
        low,
        *(address(x), address(g), address(more), address(weight), out.data_ptr()),
        *(terms.data_ptr() if weighted else 0, *steps, count, n, eps, offset, 1 / n, int(once)),
    )
    return out, terms
