"""Log-probabilities on GPU tensors by Triton from given logits: launches ``logp_kernels``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later, token_logps
from samebits.backends.replay import refuse
from samebits.backends.token_logps import Rows, Statistics
from samebits.backends.token_logps import first_unknown as first_unknown
from samebits.backends.triton import logp_kernels as kernels
from samebits.functions import VOCAB_BLOCK

# A program's share of the work. block_statistics has one warp, so that both halves of a block are in it.
BLOCK_STATISTICS: dict[str, Any] = {"BLOCKS": 8, "num_warps": 1}
COMBINE: dict[str, Any] = {"ROWS": 4, "num_warps": 4}
GRAD_LOGITS: dict[str, Any] = {"COLUMNS": 1024, "num_warps": 4}


def add_statistics(to: Statistics, logits: Tensor, first: int, rows: Rows) -> None:
    """Fill in the part of `to` that depends on ``logits[tokens, n]``, the vocabulary's entries from `first`.

    Args:
        logits: float32, bfloat16 or float16.
        first: a multiple of 128. So is n, unless the logits end with the vocabulary.
    """
    refuse("launches of Triton's are not seen")
    logits = _with_rows(logits)
    tokens, width = logits.shape
    if tokens == 0:
        return
    with torch.cuda.device_of(logits):
        kernels.block_statistics[(tokens * -(-width // (BLOCK_STATISTICS["BLOCKS"] * VOCAB_BLOCK)),)](
            *(logits, rows.target, to.m, to.s, to.u if rows.with_entropy else None, to.target_logit),
            *(logits.stride(0), first, width, to.m.shape[1], rows.scale),
            **BLOCK_STATISTICS,
            enable_fp_fusion=False,  # a product and a sum stay two roundings; kernels call tl.fma
        )


def combine(statistics: Statistics, rows: Rows) -> None:
    """Fill in the results of `rows`."""
    refuse("launches of Triton's are not seen")
    tokens, blocks = statistics.m.shape
    if tokens == 0:
        return
    with torch.cuda.device_of(rows.target):
        kernels.combine[(-(-tokens // COMBINE["ROWS"]),)](
            *(statistics.m, statistics.s, statistics.u if rows.with_entropy else None),
            *(statistics.target_logit, rows.target, rows.logp, rows.entropy, rows.shift, rows.log_sum),
            *(rows.vocabulary, rows.ignore_index, tokens, blocks),
            **COMBINE,
            enable_fp_fusion=False,
        )


of_ids = partial(token_logps.of_ids, add_statistics, combine)


def grad_logits(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> None:
    """Write dz of logits as in :func:`add_statistics` into `out`, from the gradients of the results.

    The rows of `out` need not be contiguous.
    """
    refuse("launches of Triton's are not seen")
    if logits.numel() == 0:
        return
    logits = _with_rows(logits)
    tokens, width = logits.shape
    with torch.cuda.device_of(logits):
        kernels.grad_logits[(tokens * -(-width // GRAD_LOGITS["COLUMNS"]),)](
            *(logits, rows.target, rows.shift, rows.log_sum, rows.entropy, grad, grad_entropy, out),
            *(logits.stride(0), out.stride(0), first, width, rows.vocabulary, rows.ignore_index, rows.scale),
            **GRAD_LOGITS,
            enable_fp_fusion=False,
        )


def grad_logits_later(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> Later:
    """:func:`grad_logits`, later."""
    return partial(grad_logits, out, logits, first, rows, grad, grad_entropy)


def _with_rows(logits: Tensor) -> Tensor:
    """The logits, contiguous along the vocabulary."""
    return logits if logits.stride(1) == 1 else logits.contiguous()
