"""Checks of tensors' memory: whether they have any, whether two overlap, and what may be written in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import TransformType

from samebits.ops._checks import check_device
from samebits.ops._operator import transform


def has_memory(*tensors: Tensor) -> bool:
    """Whether all have elements at real addresses. Traced, transformed, fake and meta tensors do not."""
    return (
        not torch.compiler.is_compiling()
        and transform() is None
        and all(
            type(t).__torch_dispatch__ is Tensor.__torch_dispatch__ and (t.is_cpu or t.is_cuda)
            for t in tensors
        )
    )


def capturing(t: Tensor) -> bool:
    """Whether a CUDA graph captures the current stream of `t`'s device, which need not be current."""
    if not t.is_cuda:
        return False
    if torch._C._cuda_getDevice() == t.get_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(t.device):
        return torch.cuda.is_current_stream_capturing()


def refuse_vmap(op: str, name: str) -> None:
    """Raise under ``torch.vmap``. PyTorch cannot batch operators that write, and its error is unclear."""
    if not torch.compiler.is_compiling() and transform() == TransformType.Vmap:
        raise NotImplementedError(
            f"samebits.{op}: {name}: torch.vmap is not implemented for what is written in place; use a loop"
        )


def check_accumulator(op: str, name: str, acc: Tensor, lead_name: str, lead: Tensor) -> None:
    """Refuse anything but a dense float32 tensor on the device of ``lead``, not negated or of inference."""
    check_written(op, name, acc, torch.float32, lead_name, lead)


def check_written(op: str, name: str, t: Tensor, dtype: torch.dtype, lead_name: str, lead: Tensor) -> None:
    """Refuse anything but a dense tensor of `dtype` on the device of `lead`, not negated or of inference."""
    expected = f"samebits.{op}: {name}: expected a dense {str(dtype).removeprefix('torch.')} tensor"
    if not isinstance(t, Tensor) or t.dtype != dtype:
        raise TypeError(f"{expected}, got {t.dtype if isinstance(t, Tensor) else type(t).__name__}")
    if t.layout is not torch.strided or t.is_nested:
        raise TypeError(f"{expected}, got layout {t.layout}")
    if not torch.compiler.is_compiling():
        if t.is_neg():
            raise TypeError(
                f"samebits.{op}: {name}: expected a plain tensor, got a view with negated elements"
            )
        if t.is_inference() and not torch.is_inference_mode_enabled():
            raise TypeError(f"samebits.{op}: {name}: expected a plain tensor, got one made in inference mode")
    check_device(op, name, t, lead_name, lead)


# numpy's effort limit. Layouts that need more count as overlapping. `Any`, because numpy's stub takes only
# its two named limits.
_OVERLAP_WORK: Any = 1 << 20


def refuse_overlap(op: str, called: str, acc: Tensor, **operands: Tensor) -> None:
    """Refuse an accumulator, the argument `called`, that overlaps itself or an operand in memory."""
    if acc.numel() == 0:
        return
    extent = 1
    for stride, size in sorted(zip(acc.stride(), acc.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"samebits.{op}: {called}: expected elements that do not overlap, got shape"
                    f" {tuple(acc.shape)} with strides {acc.stride()}"
                )
            extent += stride * (size - 1)
    start, end = _addresses(acc)
    for name, t in operands.items():
        if t.data_ptr() >= end or _addresses(t)[1] <= start:
            continue
        try:
            overlaps = np.shares_memory(_memory(acc), _memory(t), max_work=_OVERLAP_WORK)
        except np.exceptions.TooHardError:
            overlaps = True
        if overlaps:
            raise ValueError(
                f"samebits.{op}: {called}: expected memory of its own, got memory that {name} shares"
            )


def _addresses(t: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one past its last."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (reach + 1) * t.element_size()


def _memory(t: Tensor) -> Any:
    """A numpy array over the addresses of `t`, on any device. It must never be read."""
    size = t.element_size()
    strides = tuple(s * size for s in t.stride())
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(t.shape),
        "strides": strides,
        "data": (t.data_ptr(), True),
    }
    holder = type("Addresses", (), {"__array_interface__": interface})
    return np.asarray(holder())
