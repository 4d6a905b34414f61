"""Steps of Mamba 2 on CUDA tensors: ``kernels/ssd_steps.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address

_THREADS = 256


def kernel_spec(dt: torch.dtype, bias: torch.dtype, skip: torch.dtype, softplus: bool) -> compiler.KernelSpec:
    """The kernel of ``ssd_steps.cu``."""
    constants = (
        *(("DT", TYPES[dt]), ("BIAS", TYPES[bias]), ("SKIP", TYPES[skip])),
        ("SOFTPLUS", int(softplus)),
    )
    return compiler.KernelSpec(
        "ssd_steps.cu", "ssd_steps", "P" * 7 + "q" * 6 + "iiff", constants, block=_THREADS
    )


_kernel = runtime.loader(kernel_spec)


def ssd_steps(
    dt: Tensor,
    bias: Tensor | None,
    a: Tensor,
    d: Tensor | None,
    size: int,
    softplus: bool,
    lowest: float,
    highest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps and decays ``[tokens, heads]``, and `d` for each column ``[heads, size]``, in float32."""
    device, heads = dt.get_device(), dt.shape[1]
    steps, decays = (runtime.empty(dt.shape, torch.float32, device) for _ in range(2))
    skip = runtime.empty((0,) if d is None else (heads, size), torch.float32, device)
    of_bias, of_skip = (torch.float32 if t is None else t.dtype for t in (bias, d))
    of_d = (0, 0) if d is None else (d.stride(0), d.stride(1) if d.ndim == 2 else 0)
    if count := steps.numel() + skip.numel():
        _kernel(device, dt.dtype, of_bias, of_skip, softplus).launch(
            (-(-count // _THREADS), 1, 1),
            *(dt.data_ptr(), address(bias), a.data_ptr(), address(d)),
            *(steps.data_ptr(), decays.data_ptr(), skip.data_ptr()),
            *(*dt.stride(), 0 if bias is None else bias.stride(0), *of_d),
            *(steps.numel(), heads, size, lowest, highest),
        )
    return steps, decays, skip
