"""The check of sequence offsets without waiting for the GPU: host side of ``kernels/assert_spans.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime


def spec(dtype: torch.dtype) -> compiler.KernelSpec:
    """The kernel for offsets of ``dtype``, int32 or int64."""
    bound = "long long" if dtype == torch.int64 else "int"
    return compiler.KernelSpec("assert_spans.cu", "assert_spans", "Pqqi", (("BOUND", bound),), block=256)


def assert_spans(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise a device-side assert unless ``cu_seqlens`` rises from 0 to ``tokens`` and never decreases."""
    kernel = runtime.load(spec(cu_seqlens.dtype), cu_seqlens.get_device())
    sequences = cu_seqlens.shape[0] - 1
    kernel.launch((1, 1, 1), cu_seqlens.data_ptr(), cu_seqlens.stride(0), tokens, sequences)
