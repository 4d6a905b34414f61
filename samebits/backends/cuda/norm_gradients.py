"""All gradients of a norm in one launch, on CUDA tensors: ``kernels/norm_gradients.cu``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address
from samebits.backends.cuda.plans import kept

_THREADS = 256
_WIDEST = 32768  # bytes of a row that has room in shared memory beside others

# By bytes of a value: for rows of up to so many values, the columns, stages and blocks. Measured:
# docs/kernels/rows.md.
_SHARES = {
    2: (
        *((2048, 16, 0, 3), (4096, 16, 0, 4), (8191, 64, 0, 3), (8192, 32, 1, 4)),
        *((16383, 64, 1, 3), (16384, 128, 1, 3)),
    ),
    4: ((2048, 8, 0, 3), (4096, 16, 1, 3), (8192, 32, 1, 3)),
}


class NormSchedule(NamedTuple):
    """How threads share the work: the macros of norm_gradients.cu of these names. It changes no bit."""

    columns: int
    each: int
    ahead: int
    warps: int
    passes: int
    stages: int
    """1: rows pass through shared memory. 0: threads hold them in registers."""
    blocks: int
    """Of a multiprocessor."""
    whole: int
    """1: rows fill all passes."""


def choose(n: int, itemsize: int) -> NormSchedule:
    """In narrow rows as few columns as still read memory by whole sectors, in others what was fastest."""
    warps = next((w for w in (1, 2, 4) if n <= w * 512), 8)
    passes = next(p for p in (1, 2, 4) if n <= p * warps * 512)
    columns, stages, blocks = next(of for most, *of in _SHARES[itemsize] if n <= most)
    each, ahead = (1, 2) if columns <= 32 else (2, 4)
    return NormSchedule(
        *(columns, each, ahead, warps, passes),
        stages=stages,
        blocks=blocks,
        whole=int(n == passes * warps * 512),
    )


def kernel_spec(
    x: torch.dtype, param: torch.dtype, sums: torch.dtype, s: NormSchedule
) -> compiler.KernelSpec:
    """The kernel of norm_gradients.cu."""
    run = 16 // x.itemsize
    types = ("IN", TYPES[x]), ("OUT", TYPES[x]), ("PARAM", TYPES[param]), ("SUMS", TYPES[sums])
    of_columns = ("COLUMNS", s.columns), ("EACH", s.each), ("AHEAD", s.ahead)
    of_rows = ("WARPS", s.warps), ("PASSES", s.passes), ("VECTOR", run), ("WHOLE", s.whole)
    stages, blocks = s.stages, s.blocks
    if param == torch.float32:  # it takes more registers
        stages, blocks = max(stages, int(s.passes > 1)), min(blocks, 3)
    read = ("STAGES", stages), ("BLOCKS", blocks), ("FETCHED", 0)
    across = s.columns // run
    producers = _THREADS // 32 - max(1, s.columns // (32 * s.each))
    pitch = s.columns + (across if across < 8 else 0)
    stage = s.ahead * (32 // across) // 2 * pitch * 16
    row = stages * s.passes * 16 * _THREADS * x.itemsize
    return compiler.KernelSpec(
        *("norm_gradients.cu", "norm_gradients", "PPPPPPqqqqqqPPq"),
        (*types, *of_columns, *of_rows, *read),
        block=_THREADS,
        smem=max(producers * stage, 2 * row),
    )


@kept
def _kernel(
    device: int, n: int, x: torch.dtype, param: torch.dtype, sums: torch.dtype
) -> tuple[runtime.Kernel, int, int]:
    """The kernel, its columns of a block, and the rows of one."""
    s = choose(n, x.itemsize)
    return (
        runtime.load(kernel_spec(x, param, sums, s), device),
        s.columns,
        _THREADS // 32 // s.warps,
    )


def takes(grad: Tensor, x: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernel reads these: rows of runs of 16 bytes, of one dtype, in one piece each."""
    n, size = x.shape[1], x.itemsize
    if grad.dtype != x.dtype or not 0 < n * size <= _WIDEST or x.stride(1) != 1 or grad.stride(1) != 1:
        return False
    if weight is not None and weight.stride(0) != 1:
        return False
    steps = (x.stride(0) | grad.stride(0) | n) * size
    return (x.data_ptr() | grad.data_ptr() | address(weight) | steps) & 15 == 0


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows of `x`, and in `dtype` of weight and bias, of what :func:`takes` is true for."""
    (rows, n), device = x.shape, x.get_device()
    out = runtime.empty(x.shape, x.dtype, device)
    weight_grad, bias_grad = (runtime.empty((n,), dtype, device) for _ in range(2))
    param = torch.float32 if weight is None else weight.dtype
    kernel, columns, rows_of_block = _kernel(device, n, x.dtype, param, dtype)
    parts = -(-n // columns)
    kernel.launch(
        (parts - (-rows // rows_of_block), 1, 1),
        *(grad.data_ptr(), x.data_ptr(), address(weight), address(means), address(scales), out.data_ptr()),
        *(grad.stride(0), x.stride(0), rows, n, 0, 1),
        *(weight_grad.data_ptr(), bias_grad.data_ptr(), parts),
    )
    return out, weight_grad, bias_grad
