"""Log-probabilities on CPU tensors: statistics by blocks of the vocabulary, combined in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from samebits.backends.reference import logp_kernels as kernels
from samebits.functions import VOCAB_BLOCK

_ROWS_WORTH_A_THREAD = 1 << 14  # logits of them


class Statistics(NamedTuple):
    """What the forward pass keeps of the logits; ``[tokens, blocks]`` but for the last, ``[tokens]``."""

    m: Tensor
    s: Tensor
    u: Tensor
    target_logit: Tensor

    @classmethod
    def empty(cls, tokens: int, vocabulary: int, *, entropy: bool) -> Statistics:
        blocks = -(-vocabulary // VOCAB_BLOCK)
        m, s, u = (torch.empty(tokens, n) for n in (blocks, blocks, blocks if entropy else 0))
        return cls(m, s, u, torch.full((tokens,), torch.nan))


def add_statistics(
    to: Statistics, logits: Tensor, first: int, target: Tensor, *, scale: float, entropy: bool
) -> None:
    """The part of `to` that follows from ``logits[tokens, n]`` of the entries from `first` on.

    Args:
        logits: float32, bfloat16 or float16; multiplied by `scale`, with one rounding.
        first: a multiple of 128.
        target: int64 ``[tokens]``.
    """
    wide = logits.to(torch.float32)
    arrays = wide.numpy(), scale, first // VOCAB_BLOCK, to.m.numpy(), to.s.numpy(), to.u.numpy(), entropy
    _over_rows(wide, lambda start, stop: kernels.block_statistics(*arrays, start, stop))
    here = ((target >= first) & (target < first + logits.shape[1])).nonzero()[:, 0]
    to.target_logit[here] = wide[here, target[here] - first] * torch.tensor(scale)


def combine(statistics: Statistics, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and of every row R and logS."""
    m, s, u, target_logit = (t.numpy() for t in statistics)
    tokens = len(target_logit)
    out = [torch.empty(n) for n in (tokens, tokens if entropy else 0, tokens, tokens)]
    logp, entropies, shift, log_sum = (t.numpy() for t in out)
    kernels.combine(m, s, u, shift, log_sum, entropies, entropy)
    kernels.select(target_logit, shift, log_sum, logp)
    return out[0], out[1], out[2], out[3]


def _over_rows(logits: Tensor, run: Callable[[int, int], None]) -> None:
    rows = logits.shape[0]
    threads = min(torch.get_num_threads(), rows, 1 + logits.numel() // _ROWS_WORTH_A_THREAD)
    if threads <= 1:
        run(0, rows)
        return
    bounds = np.linspace(0, rows, threads + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, bounds[:-1], bounds[1:]))
