"""What the kernels of attention share on the host: ``struct Problem`` of ``attention_problem.cuh``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.attention import Attention
from samebits.backends.cuda import matmul, runtime
from samebits.backends.cuda.operands import address
from samebits.functions import CONSTANTS

__all__ = ["PROBLEM", "check", "empty_results", "lse_strides", "problem", "sequences", "with_tokens"]

PROBLEM = "PPPPPqPqqqqiiiiiiiiiiiifffi"
"""The ``struct`` format of the values of :func:`problem`."""

_LARGEST_HEAD, _LARGEST_VALUES = 576, 512
_ALIGN = {"first": 0, "slots": 1, "last": 2}  # enum Align


def check(x: Attention) -> None:
    """Raise unless the kernels take the call on its device."""
    device = x.q.get_device()
    matmul.check_contract(x.contract, device)
    sizes = x.q.shape[-1], x.v.shape[-1]
    if sizes[0] > _LARGEST_HEAD or sizes[1] > _LARGEST_VALUES:
        raise UnavailableError(
            f"samebits' CUDA kernels for attention take heads of keys up to {_LARGEST_HEAD} and of values"
            f" up to {_LARGEST_VALUES}, got {sizes[0]} and {sizes[1]} — use CPU tensors"
        )


def lse_strides(x: Attention) -> tuple[int, int]:
    """Strides of batch and head."""
    return 0 if x.packed else x.heads * x.queries, x.queries


def sequences(x: Attention) -> tuple[int, ...]:
    """The first values of ``struct Problem``: addresses, and what lies among them."""
    return (
        *map(address, (x.cu_seqlens_q, x.cu_seqlens_k, x.key_start, x.key_length, x.block_table)),
        0 if x.block_table is None else x.block_table.stride(0),
        address(x.mask),
    )


def with_tokens(x: Attention) -> int:
    """Sequences of a packed call that have tokens, as far as shapes tell.

    In the capture of a CUDA graph there may be as many as tokens, since nobody can count them.
    """
    return 1 if x.cu_seqlens_k is not None and x.batch >= x.queries == x.keys else max(1, x.batch)


def problem(x: Attention) -> tuple[Any, ...]:
    """The values of ``struct Problem``."""
    f32 = np.float32
    paged = x.block_table is not None
    span = x.keys + x.queries  # no window is wider
    left, right = (w if 0 <= w < span else -1 for w in x.window)
    factor = x.softcap or x.scale
    return (
        *sequences(x),
        *((0, 0, 0, 0) if x.mask is None else x.mask.stride()),
        *(x.batch, x.kv_heads, x.group, x.queries, x.keys, x.q.shape[-1], x.v.shape[-1]),
        *((x.k.shape[1], x.k.shape[0]) if paged else (1, 1)),
        *(left, right, _ALIGN[x.align]),
        float(f32(factor) * f32(CONSTANTS["LOG2E"])),
        float(f32(x.scale) / f32(x.softcap)) if x.softcap else 0.0,
        *(x.scale, 0),
    )


def empty_results(
    x: Attention, out: Tensor | None = None, *, checked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, which is `out` if given, and both log-sum-exps, to be filled.

    Args:
        checked: whether every token belongs to a sequence, as the kernel sees to it.
    """
    device = x.q.get_device()
    if out is None:
        out = runtime.empty((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype, device)
    lse, lse2 = (runtime.empty(x.lse_shape, torch.float32, device) for _ in range(2))
    if x.packed and not checked:  # there may be tokens of no sequence
        out.zero_()
        lse.fill_(-torch.inf)
        lse2.fill_(-torch.inf)
    return out, lse, lse2
