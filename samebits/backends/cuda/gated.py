"""Gated activations, and activations alone, on CUDA tensors: ``kernels/gated.cu``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import TYPES

_THREADS = 256
_NO_LIMIT = float("inf")


def kernel_spec(
    dtype: torch.dtype, activation: str, form: str, vector: int, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of ``gated.cu``."""
    constants = (("IN", TYPES[dtype]), ("ACTIVATION", activation.upper()), ("FORM", form), ("VECTOR", vector))
    return compiler.KernelSpec(
        "gated.cu", "gated", "PPPqqqqiff", constants, block=_THREADS, programmatic=programmatic
    )


@functools.lru_cache(maxsize=256)
def _kernel(dtype: torch.dtype, activation: str, form: str, vector: int, device: int) -> runtime.Kernel:
    programmatic = devices.device_info(device).arch.copies_tiles
    return runtime.load(kernel_spec(dtype, activation, form, vector, programmatic=programmatic), device)


def gated(gate: Tensor, up: Tensor | None, activation: str, limit: float, alpha: float) -> Tensor:
    """``activation(gate) * up``, contiguous. Without `up`, a row of `gate` has both, one after the other."""
    size = gate.shape[-1] // (2 if up is None else 1)
    out = runtime.empty((*gate.shape[:-1], size), gate.dtype, gate.get_device())
    gated_into(gate, up, out, activation, limit, alpha)
    return out


def gated_into(
    gate: Tensor, up: Tensor | None, out: Tensor, activation: str, limit: float, alpha: float
) -> None:
    """The same into `out`, which may be an operand."""
    if out.numel() == 0:
        return
    if up is not None and _alternate(gate, up) and (rows := _matrix(gate)).data_ptr() == gate.data_ptr():
        return _launch("ALTERNATING", rows, 0, 0, out, activation, limit, alpha)
    rows = _rows(gate)
    if up is None:
        other, step = rows.data_ptr() + out.shape[-1] * out.itemsize, rows.stride(0)
    else:
        up = _rows(up)
        other, step = up.data_ptr(), up.stride(0)
    return _launch("APART", rows, other, step, out, activation, limit, alpha)


def activation(x: Tensor, name: str) -> Tensor:
    """silu or a form of gelu alone, rounded, contiguous."""
    out = runtime.empty(x.shape, x.dtype, x.get_device())
    if out.numel():
        x, flat = x.contiguous().view(1, -1), out.view(1, -1)
        _launch("ALONE", x, 0, 0, flat, name, _NO_LIMIT, 0.0)
    return out


def _launch(
    form: str, gate: Tensor, up: int, up_row: int, out: Tensor, activation: str, limit: float, alpha: float
) -> None:
    """Run the kernel on rows of gates. `up` is an address."""
    to = _rows(out)
    (rows, n), size, vector = to.shape, to.itemsize, 16 // to.itemsize
    gate_row, out_row = gate.stride(0), to.stride(0)
    low = gate.data_ptr() | up | to.data_ptr()
    if rows > 1:
        low |= (gate_row | up_row | out_row) * size
    if low & 15 or n % vector:
        vector = 1
    count = rows * (n // vector)
    _kernel(gate.dtype, activation, form, vector, gate.get_device()).launch(
        (-(-count // _THREADS), 1, 1),
        *(gate.data_ptr(), up, to.data_ptr(), gate_row, up_row, out_row),
        *(count, n // vector, limit, alpha),
    )
    if to.data_ptr() != out.data_ptr():
        out.copy_(to.view(out.shape))


def _alternate(gate: Tensor, up: Tensor) -> bool:
    """Whether both are in turns in one tensor, the gate first."""
    return (
        gate.stride(-1) == 2
        and gate.stride() == up.stride()
        and up.data_ptr() == gate.data_ptr() + gate.itemsize
    )


def _rows(x: Tensor) -> Tensor:
    """`x` as a matrix with contiguous rows: a view if there is one, else a copy."""
    return _matrix(x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous())


def _matrix(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
