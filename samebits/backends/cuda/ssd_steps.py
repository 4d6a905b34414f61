"""Steps of Mamba 2 on CUDA tensors: ``kernels/ssd_steps.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.delta import Steps

PARAMS = "4P5q2f"
"""``struct Steps`` of kernels."""
_THREADS = 256
Form = tuple[torch.dtype, torch.dtype, torch.dtype, bool]


def form_of(x: Steps) -> Form:
    """What kernels are compiled for: types of dt, of its bias and of D, and whether steps are a softplus."""
    bias, d = (torch.float32 if t is None else t.dtype for t in (x.bias, x.d))
    return x.dt.dtype, bias, d, x.softplus


def constants_of(
    dt: torch.dtype, bias: torch.dtype, d: torch.dtype, softplus: bool
) -> tuple[tuple[str, int | str], ...]:
    """Macros of ``include/ssd_steps.cuh``."""
    return (
        *(("DT", TYPES[dt]), ("BIAS", TYPES[bias]), ("SKIP", TYPES[d])),
        ("SOFTPLUS", int(softplus)),
    )


def values_of(x: Steps) -> tuple[int | float, ...]:
    """The members of ``struct Steps``."""
    of_d = (0, 0) if x.d is None else (x.d.stride(0), x.d.stride(1) if x.d.ndim == 2 else 0)
    strides = *x.dt.stride(), 0 if x.bias is None else x.bias.stride(0), *of_d
    return *map(address, (x.dt, x.bias, x.a, x.d)), *strides, x.lowest, x.highest


def kernel_spec(*form: *Form) -> compiler.KernelSpec:
    """The kernel of ``ssd_steps.cu``."""
    constants = constants_of(*form)
    return compiler.KernelSpec("ssd_steps.cu", "ssd_steps", PARAMS + "3Pqii", constants, block=_THREADS)


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
    given = Steps(dt, bias, a, d, softplus, lowest, highest)
    if count := steps.numel() + skip.numel():
        _kernel(device, *form_of(given)).launch(
            (-(-count // _THREADS), 1, 1),
            *values_of(given),
            *(steps.data_ptr(), decays.data_ptr(), skip.data_ptr()),
            *(steps.numel(), heads, size),
        )
    return steps, decays, skip
