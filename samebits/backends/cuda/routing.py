"""The experts of tokens, on CUDA tensors: ``kernels/routing.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.arch import OLDEST
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.operands import TYPES, address, with_rows

_WARPS = 4  # of a block; each has a token


def kernel_spec(
    x: torch.dtype, out: torch.dtype, score: str, blocks: int, grouped: bool, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of routing.cu for up to so many blocks of 128 experts."""
    constants = ("IN", TYPES[x]), ("OUT", TYPES[out]), ("SCORE", score.upper())
    return compiler.KernelSpec(
        *("routing.cu", "topk_routing", "PPPPqq5iff"),
        (*constants, ("BLOCKS", blocks), ("GROUPED", int(grouped))),
        block=32 * _WARPS,
        programmatic=programmatic,
        oldest=OLDEST,
    )


_kernel = runtime.loader(kernel_spec)


def topk_routing(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    top_groups: int,
    renormalize: bool,
    eps: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weights in `dtype` and indices of the `k` experts of each row of ``logits[tokens, experts]``."""
    x, device, (tokens, experts) = with_rows(logits), logits.get_device(), logits.shape
    bias = None if bias is None else bias.contiguous()
    weights = runtime.empty((tokens, k), dtype, device)
    indices = runtime.empty((tokens, k), torch.int64, device)
    if tokens:
        blocks = next(b for b in (1, 2, 4, 8) if 128 * b >= experts)
        _kernel(device, x.dtype, dtype, score, blocks, groups > 1).launch(
            (-(-tokens // _WARPS), 1, 1),
            *(x.data_ptr(), address(bias), weights.data_ptr(), indices.data_ptr(), x.stride(0), tokens),
            *(experts, k, groups, top_groups, int(renormalize), eps, scale),
        )
    return weights, indices
