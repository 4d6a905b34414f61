"""Short causal convolutions on CUDA tensors: ``kernels/causal_conv1d.cu``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address

_THREADS = 256


def kernel_spec(
    dtype: torch.dtype,
    taps: int,
    vector: int,
    of_channels: bool,
    silu: bool,
    state: bool,
    *,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``causal_conv1d.cu``."""
    constants = (
        *(("VALUE", TYPES[dtype]), ("TAPS", taps), ("VECTOR", vector)),
        *(("OF_CHANNELS", int(of_channels)), ("SILU", int(silu)), ("STATE", int(state))),
    )
    return compiler.KernelSpec(
        "causal_conv1d.cu",
        "causal_conv1d",
        "P" * 7 + "q" * 14 + "iii",
        constants,
        block=_THREADS,
        programmatic=programmatic,
    )


_kernel = runtime.loader(kernel_spec)


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, at: Tensor | None, silu: bool
) -> Tensor:
    """The tokens of ``x[batch, channels, tokens]``; the result has its strides, if it is dense."""
    out = torch.empty_like(x)
    _launch(x, weight, bias, before, at, out, None, silu)
    return out


def move_on(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The tokens of `x` behind those of ``state[batch, channels, kept]``, which is moved on."""
    out = torch.empty_like(x)
    before = state[..., state.shape[2] - weight.shape[1] + 1 :]
    _launch(x, weight, bias, before, None, out, state, silu)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    at: Tensor | None,
    out: Tensor,
    state: Tensor | None,
    silu: bool,
) -> None:
    if not x.numel():
        return
    batch, channels, tokens = x.shape
    weight = weight.contiguous()
    bias, at = (None if t is None else t.contiguous() for t in (bias, at))
    of_channels = state is None and x.stride(1) == out.stride(1) == 1 and channels > 1
    vector, size = 16 // x.itemsize, channels if of_channels else tokens
    beside = of_channels or (x.stride(2) == 1 and out.stride(2) == 1)
    steps = [s for t in (x, out) for d, s in enumerate(t.stride()) if d != (1 if of_channels else 2)]
    low = x.data_ptr() | out.data_ptr() | functools.reduce(int.__or__, steps) * x.itemsize
    if state is not None or not beside or size % vector or low & 15:
        vector = 1
    threads = batch * channels if state is not None else x.numel() // vector
    before_strides = (0, 0, 0) if before is None else before.stride()
    state_strides = (0, 0, 0) if state is None else state.stride()
    _kernel(x.get_device(), x.dtype, weight.shape[1], vector, of_channels, silu, state is not None).launch(
        (-(-threads // _THREADS), 1, 1),
        *(address(t) for t in (x, weight, bias, before, out, state, at)),
        *(*x.stride(), *out.stride(), *before_strides, *state_strides, weight.stride(0)),
        *(threads, channels, tokens, 0 if state is None else state.shape[2]),
    )
