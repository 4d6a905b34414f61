"""Norms of whole tensors that are sharded over ranks, as ``DTensor`` s."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.functions import CHAINS, VOCAB_BLOCK
from samebits.ops._rows import backend, rounded
from samebits.ops.reduce import sum
from samebits.ops.variance import _root, vector_norm

__all__ = ["is_sharded", "norm_of_shards"]


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor of which every rank has a part, or all of it: no partial sums."""
    placements = getattr(x, "placements", None)  # without an import of torch.distributed
    return placements is not None and not any(p.is_partial() for p in placements)


def norm_of_shards(x: Any, order: int) -> Any:
    """The 1-norm or 2-norm of all elements of a DTensor, on all ranks: a DTensor, replicated.

    It has the bits of :func:`samebits.ops.variance.vector_norm`, or of the sum of absolute values, of the
    whole tensor on one rank. A row's sum begins with blocks of 128 neighbours (``docs/contract.md``, "Row
    reductions"): every rank adds those of its part, and the ranks exchange these sums, 1 / 128 of the
    elements. Tensors whose shards begin or end within a block are gathered whole.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh, replicated = x.device_mesh, [Replicate()] * x.device_mesh.ndim
    shape = _blocks(x)
    if shape is None:
        whole = x.full_tensor()
        norm = vector_norm(whole) if order == 2 else sum(whole.abs())
        return DTensor.from_local(norm, mesh, replicated, run_check=False)
    local = x.to_local()
    wide = local.to(torch.float32)
    terms = wide * wide if order == 2 else wide.abs()
    lead, rest = local.shape[: len(shape) - 1], local.shape[len(shape) - 1 :]
    blocks = sum(terms.reshape(*lead, rest.numel() // VOCAB_BLOCK, VOCAB_BLOCK), -1)
    stride = torch.empty(shape, device="meta").stride()
    all_blocks = DTensor.from_local(blocks, mesh, x.placements, run_check=False, shape=shape, stride=stride)
    total = _chained(all_blocks.full_tensor().reshape(-1))
    norm = rounded(_root(total) if order == 2 else total, x.dtype)[0]
    return DTensor.from_local(norm, mesh, replicated, run_check=False)


def _blocks(x: Any) -> torch.Size | None:
    """The shape of `x` in blocks of 128 neighbours, if they do not lie on several ranks."""
    split = [
        (p.dim % x.ndim, n)
        for p, n in zip(x.placements, x.device_mesh.shape, strict=True)
        if not p.is_replicate()
    ]
    last = max((dim for dim, _ in split), default=0)
    if x.ndim == 0 or x.numel() == 0:
        return None
    if last < x.ndim - 1:
        count, parts = x.shape[last + 1 :].numel(), 1
        lead = x.shape[: last + 1]
    else:
        count, parts = x.shape[-1], math.prod(n for dim, n in split if dim == last)
        lead = x.shape[:-1]
    return None if count % (VOCAB_BLOCK * parts) else torch.Size([*lead, count // VOCAB_BLOCK])


def _chained(blocks: Tensor) -> Tensor:
    """``[1]``: the sum of a row of which these are the sums of blocks, which are not -0."""
    chains = F.pad(blocks, (0, -len(blocks) % CHAINS)).view(-1, CHAINS)
    return sum(backend(blocks).column_sum(chains, torch.float32)[None], -1)
