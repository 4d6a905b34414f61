"""Reciprocal square roots on CUDA tensors: ``kernels/rsqrt.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES

_THREADS = 256


def kernel_spec(dtype: torch.dtype) -> compiler.KernelSpec:
    """The kernel of ``rsqrt.cu``."""
    return compiler.KernelSpec(
        "rsqrt.cu", "reciprocal_root", "PPq", (("VALUE", TYPES[dtype]),), block=_THREADS
    )


_kernel = runtime.loader(kernel_spec)


def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``, contiguous."""
    x = x if x.is_contiguous() else x.contiguous()
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if count := out.numel():
        _kernel(x.get_device(), x.dtype).launch(
            (-(-count // _THREADS), 1, 1), x.data_ptr(), out.data_ptr(), count
        )
    return out
