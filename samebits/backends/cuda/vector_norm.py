"""The gradient of 2-norms of rows on CUDA tensors: ``kernels/vector_norm.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, with_rows

_THREADS = 256


def kernel_spec(dtype: torch.dtype) -> compiler.KernelSpec:
    """The kernel of ``vector_norm.cu``."""
    constants = (("VALUE", TYPES[dtype]),)
    return compiler.KernelSpec(
        "vector_norm.cu", "vector_norm_backward", "PPPPqqqqq", constants, block=_THREADS
    )


_kernel = runtime.loader(kernel_spec)


def backward(grad: Tensor, x: Tensor, norms: Tensor) -> Tensor:
    """The gradient of ``x[rows, n]`` from that of its rows' norms. All have one dtype."""
    x = with_rows(x)
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if out.numel():
        _kernel(x.get_device(), x.dtype).launch(
            (-(-out.numel() // _THREADS), 1, 1),
            *(t.data_ptr() for t in (grad, x, norms, out)),
            *(grad.stride(0), x.stride(0), norms.stride(0), out.numel(), x.shape[1]),
        )
    return out
