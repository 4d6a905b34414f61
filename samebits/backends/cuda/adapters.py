"""Adapters (LoRA) of tokens, added to a layer's output, on CUDA tensors: ``kernels/adapters.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.backends.arch import OLDEST, SM_80
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.matmul import check_contract
from samebits.backends.cuda.operands import TYPES, with_rows
from samebits.contract import contract_from_key

_THREADS = 128
_COLUMNS, _TOKENS = 128, 16  # of a block, and of a step
_BLOCKS = 16  # that a multiprocessor should have, so that all end at about one time


def kernel_spec(
    dtype: torch.dtype, fma: bool, groups: int, slices: int, vector: bool, *, programmatic: bool = False
) -> compiler.KernelSpec:
    """The kernel of adapters.cu for so many groups of 16 in a rank."""
    constants = ("TYPE", TYPES[dtype]), ("FMA", int(fma)), ("GROUPS", groups)
    return compiler.KernelSpec(
        *("adapters.cu", "add_adapters", f"6P2q{3 + slices}i"),
        (*constants, ("SLICES", slices), ("VECTOR", int(vector))),
        block=_THREADS,
        programmatic=programmatic,
        oldest=OLDEST if fma else SM_80,
    )


_kernel = runtime.loader(kernel_spec)


def add_adapters(
    base: Tensor,
    inner: Tensor,
    b: Tensor,
    adapters: Tensor,
    scalings: Tensor,
    ends: Sequence[int],
    contract: str,
    of_block: int = 0,
) -> Tensor:
    """See :func:`samebits.ops.adapters.add_adapters`. ``of_block``: tokens of a block, or 0 to choose."""
    device, (tokens, n) = base.get_device(), base.shape
    check_contract(contract, device)
    out = runtime.empty((tokens, n), base.dtype, device)
    if out.numel() == 0:
        return out
    base, inner = with_rows(base), with_rows(inner)
    b, adapters, scalings = b.contiguous(), adapters.contiguous(), scalings.contiguous()
    if inner.data_ptr() & 3 or inner.stride(0) & 1:  # two entries are read at once
        inner = inner.clone(memory_format=torch.contiguous_format)
    if b.data_ptr() & 3:
        b = b.clone()
    low = (base.data_ptr() | out.data_ptr()) & 15 | base.stride(0) % 8
    vector = low == 0 and not any(end % 8 for end in ends)
    columns = sum(-(-(end - begin) // 32) for begin, end in itertools.pairwise((0, *ends)))
    blocks = -(-columns * 32 // _COLUMNS)
    if not of_block:
        room = max(_BLOCKS * devices.device_info(device).sm_count // blocks, 1)
        of_block = _TOKENS * -(-tokens // (_TOKENS * room))
    fma = contract_from_key(contract).step == "fma"
    _kernel(device, base.dtype, fma, b.shape[2] // 16, len(ends), vector).launch(
        (blocks, -(-tokens // of_block), 1),
        *(t.data_ptr() for t in (base, inner, b, adapters, scalings, out)),
        *(base.stride(0), inner.stride(0), tokens, b.shape[0], of_block, *ends),
    )
    return out
