"""Short causal convolutions on CUDA tensors: ``kernels/causal_conv1d{,_step,_sums}.cu``."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES, address

_THREADS, _OF_STEP = 128, 64  # of blocks
_CHANNELS = 4  # of a thread, side by side
_RUNS = 64, 32, 16, 8, 4  # tokens of such a thread
_ENOUGH = 1536  # threads for a multiprocessor
_PIECES = 4
_MOST_KEPT = 16  # inputs of a state that registers have room for

Result = Literal["SUM", "SILU", "SILU_GRADIENT"]
"""What becomes of a sum: a macro of ``causal_conv1d.cuh``."""


def _of_sums(
    dtype: torch.dtype, taps: int, result: str, fast_silu: bool
) -> tuple[tuple[str, int | str], ...]:
    fast = fast_silu and result == "SILU" and dtype == torch.bfloat16
    return ("VALUE", TYPES[dtype]), ("TAPS", taps), ("RESULT", "FAST_SILU" if fast else result)


def kernel_spec(
    dtype: torch.dtype,
    taps: int,
    vector: int,
    of_channels: bool,
    result: Result,
    backwards: bool = False,
    packed: bool = False,
    lanes: int = 1,
    *,
    fast_silu: bool = False,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``causal_conv1d.cu``."""
    constants = (
        *(*_of_sums(dtype, taps, result, fast_silu), ("VECTOR", vector), ("OF_CHANNELS", int(of_channels))),
        *(("BACKWARDS", int(backwards)), ("PACKED", int(packed)), ("LANES", lanes)),
    )
    return compiler.KernelSpec(
        *("causal_conv1d.cu", "causal_conv1d", "P" * 7 + "q" * 9 + "Iiii", constants),
        block=_THREADS,
        programmatic=programmatic,
    )


def step_spec(
    dtype: torch.dtype,
    taps: int,
    vector: int,
    kept: int,
    silu: bool,
    *,
    fast_silu: bool = False,
    programmatic: bool = False,
) -> compiler.KernelSpec:
    """The kernel of ``causal_conv1d_step.cu``. `kept` counts where `vector` is more than 1."""
    of = _of_sums(dtype, taps, "SILU" if silu else "SUM", fast_silu)
    return compiler.KernelSpec(
        *("causal_conv1d_step.cu", "causal_conv1d_step", "P" * 5 + "q" * 9 + "Iiii"),
        (*of, ("VECTOR", vector), ("KEPT", kept)),
        block=_OF_STEP,
        programmatic=programmatic,
    )


def sums_spec(
    dtype: torch.dtype, taps: int, vector: int, of_channels: bool, packed: bool, channels: int
) -> compiler.KernelSpec:
    """The kernel of ``causal_conv1d_sums.cu``, with so many channels of a block."""
    size, depth = dtype.itemsize, 4
    tokens, side = 128 // size, 16 // size
    entries = tokens * channels if of_channels else channels * (tokens // side | 1) * side
    stage = 2 * entries * size + 4 * (tokens if packed else 4)
    constants = (
        *(("VALUE", TYPES[dtype]), ("TAPS", taps), ("VECTOR", vector), ("OF_CHANNELS", int(of_channels))),
        *(("PACKED", int(packed)), ("CHANNELS", channels), ("TOKENS", tokens), ("DEPTH", depth)),
    )
    return compiler.KernelSpec(
        *("causal_conv1d_sums.cu", "causal_conv1d_sums", "P" * 6 + "q" * 9 + "iii", constants),
        block=2 * channels,
        smem=depth * stage,
    )


_kernel = runtime.loader(kernel_spec)
_step_kernel = runtime.loader(step_spec)
_sums_kernel = runtime.loader(sums_spec)


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, at: Tensor | None, silu: bool
) -> Tensor:
    """The tokens of ``x[batch, channels, tokens]``; the result has its strides, if it is dense."""
    return _convolved(x, weight, bias, before, at, "SILU" if silu else "SUM")


def move_on(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The tokens of `x` behind those of ``state[batch, channels, kept]``, which is moved on."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    weight, bias = _aligned(weight), None if bias is None else bias.contiguous()
    (batch, channels, tokens), kept, vector = x.shape, state.shape[2], 16 // x.itemsize
    beside = x.stride(1) == out.stride(1) == 1 and state.stride(1) == kept and state.stride(2) == 1
    low = _low(1, x, out) | state.data_ptr() | address(bias)
    if batch > 1:
        low |= state.stride(0) * x.itemsize
    if tokens > 1 or not beside or not 0 < kept <= _MOST_KEPT or channels % vector or low & 15:
        vector = 1
    count = batch * channels // vector
    kernel = _step_kernel(
        *(x.get_device(), x.dtype, weight.shape[1], vector, kept if vector > 1 else 0, silu)
    )
    kernel.launch(
        (-(-count // _OF_STEP), 1, 1),
        *(address(t) for t in (x, weight, bias, out, state)),
        *(*x.stride(), *out.stride(), *state.stride(), count, channels, tokens, kept),
    )
    return out


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    at: Tensor | None,
    silu: bool,
    of_x: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of the sums, given those of the results; of x, weight and bias, empty if not needed."""
    to = torch.empty_like(x)
    if grad.stride() != to.stride():
        grad = to.copy_(grad)
    if silu:
        grad = _convolved(x, weight, bias, before, at, "SILU_GRADIENT", grad)
    none = x.new_empty(0)
    found = _convolved(grad, weight, None, None, at, "SUM", backwards=True) if of_x else none
    sums = (
        x.new_empty(weight.shape) if of_weight else none,
        x.new_empty(weight.shape[0]) if of_bias else none,
    )
    if of_weight or of_bias:
        _sum(grad, x, before, at, weight.shape[1], *sums)
    return grad, found, *sums


def _aligned(weight: Tensor) -> Tensor:
    """Dense, from a multiple of 16 bytes on: kernels read a channel's weights together."""
    weight = weight.contiguous()
    return weight.clone() if weight.data_ptr() & 15 else weight


def _low(beside: int, *tensors: Tensor) -> int:
    """Bits of addresses, and of strides in bytes but for that of the dimension `beside`."""
    found = 0
    for t in tensors:
        strides = (s for d, s in enumerate(t.stride()) if d != beside and t.shape[d] > 1)
        found |= functools.reduce(int.__or__, strides, 0) * t.itemsize | t.data_ptr()
    return found


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    at: Tensor | None,
    result: Result,
    grad: Tensor | None = None,
    *,
    backwards: bool = False,
) -> Tensor:
    """Of `x`; the gradient of the sum, given that of its silu; or that of `x`, given that of the sum."""
    out = torch.empty_like(x)
    if not x.numel():
        return out
    batch, channels, tokens = x.shape
    weight = _aligned(weight)
    bias, at = (None if t is None else t.contiguous() for t in (bias, at))
    of_channels = x.stride(1) == out.stride(1) == 1 and channels > 1
    vector, size = (_CHANNELS, channels) if of_channels else (16 // x.itemsize, tokens)
    beside = of_channels or x.stride(2) == out.stride(2) == 1
    low = _low(1 if of_channels else 2, *(t for t in (x, out, grad) if t is not None))
    low &= vector * x.itemsize - 1
    if not beside or size % vector or low or address(bias) & 15:
        vector = 1
    device, run, lanes = x.get_device(), 0, 1
    if of_channels:
        of_token = batch * channels // vector
        enough = _ENOUGH * devices.device_info(device).sm_count
        run = next((n for n in _RUNS if of_token * -(-tokens // n) >= enough), _RUNS[-1])
        count = of_token * -(-tokens // run)
    else:
        lanes = 1 if tokens <= vector * _PIECES else 32
        count = batch * channels * -(-tokens // (lanes * vector * _PIECES))
    kernel = _kernel(
        *(device, x.dtype, weight.shape[1], vector, of_channels, result, backwards, at is not None, lanes)
    )
    kernel.launch(
        (-(-count * lanes // _THREADS), 1, 1),
        *(address(t) for t in (x, weight, bias, before, grad, out, at)),
        *(*x.stride(), *out.stride(), *((0, 0, 0) if before is None else before.stride())),
        *(count, channels, tokens, run),
    )
    return out


def _sum(
    grad: Tensor,
    x: Tensor,
    before: Tensor | None,
    at: Tensor | None,
    taps: int,
    of_weight: Tensor,
    of_bias: Tensor,
) -> None:
    """Sums over tokens into gradients of weights and of biases, or into empty tensors, which are left out."""
    rows, channels, tokens = x.shape
    if not channels:
        return
    at = None if at is None else at.contiguous()
    of_channels = x.stride(1) == grad.stride(1) == 1 and channels > 1
    vector, size = 16 // x.itemsize, channels if of_channels else tokens
    beside = of_channels or x.stride(2) == grad.stride(2) == 1
    if not beside or size % vector or _low(1 if of_channels else 2, x, grad) & 15:
        vector = 1
    device = x.get_device()
    block = 32 if -(-channels // 32) <= devices.device_info(device).sm_count else 64
    _sums_kernel(device, x.dtype, taps, vector, of_channels, at is not None, block).launch(
        (-(-channels // block), 1, 1),
        *(address(t) for t in (grad, x, before, at)),
        *(t.data_ptr() if t.numel() else 0 for t in (of_weight, of_bias)),
        *(*grad.stride(), *x.stride(), *((0, 0, 0) if before is None else before.stride())),
        *(rows, channels, tokens),
    )
