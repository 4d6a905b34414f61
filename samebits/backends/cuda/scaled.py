"""Block-scaled products of FP8 matrices on CUDA tensors: ``products/scaled_sm90.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.cuda import devices, runtime
from samebits.backends.cuda.products import scaled_sm90
from samebits.backends.cuda.products.scaled_sm90 import Launch, Scaled, ScaledSchedule
from samebits.backends.cuda.products.schedule_sm90 import round_up

__all__ = ["scaled_mm"]

_MOST_PLANS = 4096
_plans: dict[tuple[Scaled, ScaledSchedule | None], Launch] = {}


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    schedule: ScaledSchedule | None = None,
) -> Tensor:
    """``a @ b.T`` with scales, for arguments that an operation has checked.

    Args:
        a: ``[M, K]`` in FP8, with K > 0.
        b: ``[N, K]`` in FP8.
        scale_a: ``[M, ceil(K / 128)]`` or ``[M, 1]``, float32.
        scale_b: ``[ceil(N / 128), ceil(K / 128)]``, ``[N, ceil(K / 128)]`` or ``[N, 1]``, float32. Of one
            row of b both have the same meaning.
        bias: ``[N]``, contiguous.
        out_dtype: float32, bfloat16 or float16.
        schedule: replaces the default choice. It never changes a bit.

    Raises:
        UnavailableError: the GPU's FP8 arithmetic is not known to be the contract's.
    """
    device = a.get_device()
    info = devices.device_info(device)
    if info.capability != (9, 0):
        raise UnavailableError(
            f"samebits: FP8 products on {info.name}: expected a GPU of compute capability 9.0 (Hopper), whose"
            f" FP8 arithmetic is specified; got {info.capability[0]}.{info.capability[1]}"
        )
    (m, k), n = a.shape, b.shape[0]
    out = runtime.empty((m, n), out_dtype, device)
    if out.numel() == 0:
        return out
    a, b = _readable(a), _readable(b)
    bias_dtype = None if bias is None else bias.dtype
    p = Scaled(
        device,
        *(m, n, a.shape[1]),
        a.dtype,
        b.dtype,
        *(_row_stride(a), _row_stride(b)),
        _strides(scale_a, k),
        _strides(scale_b, k),
        scale_b.shape[0] == n,
        out_dtype,
        *(n, out.data_ptr() % 16),
        bias_dtype,
    )
    launch = _plans.get((p, schedule))
    if launch is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        launch = _plans[p, schedule] = scaled_sm90.plan(p, schedule)
    at_bias = 0 if bias is None else bias.data_ptr()
    at = [t.data_ptr() for t in (a, b, scale_a, scale_b, out)]
    launch(at[0], at[1], at[2], at[3], at[4], at_bias)
    return out


def _strides(scale: Tensor, k: int) -> tuple[int, int]:
    """Strides along rows and blocks of k. A scale for all of k is that of every block."""
    return scale.stride(0), 0 if scale.shape[1] == 1 and k > scaled_sm90.BLOCK else scale.stride(1)


def _row_stride(x: Tensor) -> int:
    """Elements from one row to the next. One row alone may have any."""
    return x.stride(0) if x.shape[0] > 1 else round_up(x.shape[1], 16)


def _readable(x: Tensor) -> Tensor:
    """`x` so that the copy engine can read it: rows at multiples of 16 bytes. Zeros after k add nothing."""
    k = x.shape[1]
    aligned = x.data_ptr() % 16 == 0 and k % 2 == 0 and (x.stride(1) == 1 or k == 1)
    if aligned and (x.shape[0] == 1 or (x.stride(0) > 0 and x.stride(0) % 16 == 0)):
        return x
    padded = runtime.zeros((x.shape[0], round_up(k, 16)), torch.uint8, x.get_device())
    padded[:, :k] = x.view(torch.uint8)
    return padded.view(x.dtype)
