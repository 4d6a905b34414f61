"""Memory formats: which results of PyTorch's have their channels last, in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._prims_common import (
    compute_elementwise_output_logical_to_physical_perm,
    suggest_memory_format,
)

__all__ = ["as_laid_out", "in_memory_order", "memory_format"]


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """That which PyTorch gives the result of a function of these: the first that has its channels last."""
    with _untracked(*tensors):
        found = [suggest_memory_format(t) for t in tensors]
    return next((f for f in found if f != torch.contiguous_format), torch.contiguous_format)


def _untracked(*tensors: Tensor) -> AbstractContextManager[object]:
    """Strides of symbols are compared, not traced: a tracer may know nothing of tensors beside its graph."""
    if not any(isinstance(stride, torch.SymInt) for t in tensors for stride in t.stride()):
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def as_laid_out(result: Tensor, like: Tensor) -> Tensor:
    """`result` in the memory format of `like`, PyTorch's result on a meta device."""
    return result.contiguous(memory_format=memory_format(like))


def in_memory_order(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of an elementwise function that is contiguous, laid out in memory as PyTorch's is."""
    if x.is_contiguous():
        return function(x)
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    back = sorted(range(len(order)), key=order.__getitem__)
    return function(x.permute(order)).permute(back)
