"""Quantization of CUDA tensors to FP8, also of a gated activation: ``kernels/quantize.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import SM_90
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import with_rows
from samebits.backends.cuda.products.tensor_core_sm90 import EPILOGUE_TYPES
from samebits.contract import SCALE_BLOCK

_THREADS = 256
_LINES = _THREADS // 16
"""Blocks of 1 x 128 that a block of threads has side by side, with 16 threads each."""


def kernel_spec(
    x: torch.dtype, values: torch.dtype, *, square: bool, vector: bool, silu: str = "NO"
) -> compiler.KernelSpec:
    """The kernel of ``quantize.cu``."""
    constants: dict[str, int | str] = {
        "IN": EPILOGUE_TYPES[x],
        "E5M2": int(values == torch.float8_e5m2),
        "SQUARE": int(square),
        "VECTOR": int(vector),
        "SILU": silu,
    }
    return compiler.KernelSpec(
        "quantize.cu", "quantize", "PPPPqqqii", tuple(constants.items()), block=_THREADS, oldest=SM_90
    )


_kernel = runtime.loader(kernel_spec)


def quantize(x: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales of ``x[M, K]`` in blocks of `rows` x 128, for 1 or 128 rows."""
    return _quantized(x, None, rows != 1, dtype)


def silu_mul_quantize(gate: Tensor, up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales of ``silu(gate) * up`` of ``[M, K]`` in blocks of 1 x 128."""
    return _quantized(gate, up, False, dtype)


def silu_of(x: torch.dtype, device: int) -> str:
    """How the kernel computes silu. What Hopper's own functions give was compared for every bf16."""
    return "FAST" if x == torch.bfloat16 and devices.device_info(device).arch.fast_silu else "EXACT"


def _quantized(x: Tensor, up: Tensor | None, square: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device, (m, k) = x.get_device(), x.shape
    blocks = -(-k // SCALE_BLOCK)
    values = runtime.empty((m, k), dtype, device)
    scale = runtime.empty((-(-m // SCALE_BLOCK) if square else m, blocks), torch.float32, device)
    if values.numel() == 0:
        return values, scale
    operands = [with_rows(t) for t in ((x,) if up is None else (x, up))]
    rows = [t.stride(0) if m > 1 else k for t in operands]
    vector = k % 8 == 0 and all(
        t.data_ptr() % 16 == row * t.element_size() % 16 == 0 for t, row in zip(operands, rows, strict=True)
    )
    at_once = 1 if square else _LINES * (4 if up is None else 2)
    grid = -(-scale.numel() // at_once)
    silu = "NO" if up is None else silu_of(x.dtype, device)
    _kernel(device, x.dtype, dtype, square=square, vector=vector, silu=silu).launch(
        *((grid, 1, 1), operands[0].data_ptr(), 0 if up is None else operands[1].data_ptr()),
        *(values.data_ptr(), scale.data_ptr(), rows[0], rows[-1], m, k, blocks),
    )
    return values, scale
