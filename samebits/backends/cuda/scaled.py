"""Block-scaled products of FP8 matrices on CUDA tensors, also of groups: ``products/scaled*_sm90.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.cuda import devices, runtime
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.plans import Plans
from samebits.backends.cuda.products import scaled_sm90
from samebits.backends.cuda.products.plan import CudaPlan
from samebits.backends.cuda.products.scaled_grouped_sm90 import SCALED_GROUPED_SM90, ScaledGrouped
from samebits.backends.cuda.products.scaled_sm90 import SCALED_SM90, Scaled, ScaledSchedule
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.contract import FP8
from samebits.remedies import see

__all__ = ["scaled_grouped_mm", "scaled_mm"]

_plans: Plans[CudaPlan] = Plans(4096)
_grouped: Plans[CudaPlan] = Plans(4096)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    contract: str = FP8.key,
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
        contract: FP8, the only one.
        schedule: replaces the default choice. It never changes a bit.

    Raises:
        UnavailableError: the GPU's FP8 arithmetic is not known to be the contract's.
    """
    device = _hopper(a)
    out = runtime.empty((a.shape[0], b.shape[0]), out_dtype, device)
    if out.numel() == 0:
        return out
    k, a, b = a.shape[1], _readable(a), _readable(b)
    p = _product(a, b, scale_a, scale_b, k, scale_b.shape[0] == b.shape[0], bias, out)
    plan = _plans.get((p, schedule))
    if plan is None:
        plan = _plans.keep((p, schedule), SCALED_SM90.plan(p, schedule))
    at_bias = address(bias)
    at = [t.data_ptr() for t in (a, b, scale_a, scale_b, out)]
    plan.launch(at[0], at[1], at[2], at[3], at[4], at_bias)
    return out


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    contract: str = FP8.key,
    schedule: ScaledSchedule | None = None,
) -> Tensor:
    """``a[t] @ b[g].T`` with scales for the rows t of every group g, and +0 for rows of none.

    Args:
        a: ``[T, K]`` in FP8; or ``[G, M, K]``, of whose group g the first ``offs[g]`` rows count.
        b: ``[G, N, K]`` in FP8, with K > 0.
        scale_a: ``[..., ceil(K / 128)]`` or ``[..., 1]``, float32, with a row for each of a.
        scale_b: ``[G, ...]``: for each matrix as :func:`scaled_mm` takes it.
        offs: the groups' ends, or with ``a[G, M, K]`` the numbers of their rows: int32 ``[G]``.
        bias: ``[G, N]``, contiguous.
        out_dtype, contract, schedule: as of :func:`scaled_mm`.

    Raises:
        UnavailableError: the GPU's FP8 arithmetic is not known to be the contract's, or G is above 1,024.
    """
    device, (groups, n, k) = _hopper(a), b.shape
    out = runtime.empty((*a.shape[:-1], n), out_dtype, device)
    if out.numel() == 0:
        return out
    if groups == 0:
        return out.zero_()
    masked = a.ndim == 3
    if masked:
        a, scale_a = a.reshape(-1, k), scale_a.reshape(-1, scale_a.shape[-1])
    a, b, offs = _readable(a), _readable(b), offs.contiguous()
    rows = _product(a, b[0], scale_a, scale_b[0], k, scale_b.shape[1] == n, bias, out)
    p = ScaledGrouped(rows, groups, masked, b.stride(0), scale_b.stride(0))
    plan = _grouped.get((p, schedule))
    if plan is None:
        plan = _grouped.keep((p, schedule), SCALED_GROUPED_SM90.plan(p, schedule))
    at_bias = address(bias)
    at = [t.data_ptr() for t in (a, b, scale_a, scale_b, out, offs)]
    plan.launch(at[0], at[1], at[2], at[3], at[4], at_bias, at[5])
    return out


def _hopper(a: Tensor) -> int:
    """The device of `a`, if it is a Hopper GPU."""
    device = a.get_device()
    info = devices.device_info(device)
    if info.arch.fp8 is None:
        raise UnavailableError(
            f"samebits: FP8 products on {info.name}: expected a GPU of compute capability 9.0 (Hopper), whose"
            f" FP8 arithmetic is specified; got {info.capability[0]}.{info.capability[1]}" + see("fp8")
        )
    return device


def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    k: int,
    b_rows: bool,
    bias: Tensor | None,
    out: Tensor,
) -> Scaled:
    """The product of readable operands, whose scales are those of `k` terms, into contiguous rows."""
    n = b.shape[0]
    return Scaled(
        a.get_device(),
        # Of two readable operands the shorter one has all terms: what is beyond them may be anything.
        *(a.shape[0], n, min(a.shape[1], b.shape[1])),
        a.dtype,
        b.dtype,
        *(_row_stride(a), _row_stride(b)),
        _strides(scale_a, k),
        _strides(scale_b, k),
        b_rows,
        out.dtype,
        *(n, out.data_ptr() % 16),
        None if bias is None else bias.dtype,
    )


def _strides(scale: Tensor, k: int) -> tuple[int, int]:
    """Strides along rows and blocks of k. A scale for all of k is that of every block."""
    return scale.stride(0), 0 if scale.shape[1] == 1 and k > scaled_sm90.BLOCK else scale.stride(1)


def _row_stride(x: Tensor) -> int:
    """Elements from one row to the next. One row alone may have any."""
    return x.stride(0) if x.shape[0] > 1 else round_up(x.shape[1], 16)


def _readable(x: Tensor) -> Tensor:
    """`x` so that the copy engine can read it: rows at multiples of 16 bytes. Zeros after k add nothing."""
    k = x.shape[-1]
    aligned = x.data_ptr() % 16 == 0 and k % 2 == 0 and (x.stride(-1) == 1 or k == 1)
    between = [x.stride(i) for i in range(x.ndim - 1) if x.shape[i] > 1]
    if aligned and all(stride > 0 and stride % 16 == 0 for stride in between):
        return x
    padded = runtime.zeros((*x.shape[:-1], round_up(k, 16)), torch.uint8, x.get_device())
    padded[..., :k] = x.view(torch.uint8)
    return padded.view(x.dtype)
