"""What log-probabilities keep of every token: the arguments that backends share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.functions import VOCAB_BLOCK


def vocabulary_pieces(part: slice, tokens: int, logits: int) -> Iterator[slice]:
    """A part of the vocabulary in pieces of whole blocks, with about so many logits at most."""
    step = max(1, logits // max(1, tokens) // VOCAB_BLOCK) * VOCAB_BLOCK
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


class Rows(NamedTuple):
    """Inputs and results of rows of logits; tensors are ``[tokens]``, contiguous, float32 but for the target.

    Attributes:
        target: int64.
        vocabulary: entries in a row.
        ignore_index: the target of rows that do not count.
        scale: what logits are multiplied by, once it is rounded to float32.
        logp, entropy, shift, log_sum: results; the last two are R and logS of ``docs/contract.md``. The
            entropy is empty if nobody asked for it.
    """

    target: Tensor
    vocabulary: int
    ignore_index: int
    scale: float
    logp: Tensor
    entropy: Tensor
    shift: Tensor
    log_sum: Tensor

    @classmethod
    def empty(
        cls, target: Tensor, vocabulary: int, ignore_index: int, *, scale: float = 1.0, entropy: bool = False
    ) -> Rows:
        """Rows without results."""
        tokens = target.shape[0]
        results = (
            torch.empty(n, dtype=torch.float32, device=target.device)
            for n in (tokens, tokens if entropy else 0, tokens, tokens)
        )
        return cls(target, vocabulary, ignore_index, scale, *results)

    @property
    def with_entropy(self) -> bool:
        return self.entropy.numel() > 0

    def part(self, start: int, stop: int) -> Rows:
        """Some of the rows: views."""
        return Rows._make(x[start:stop] if isinstance(x, Tensor) else x for x in self)


class Statistics(NamedTuple):
    """m, s and u of every block, ``[tokens, blocks]``, and the logit of every target. u may be empty."""

    m: Tensor
    s: Tensor
    u: Tensor
    target_logit: Tensor

    @classmethod
    def empty(cls, rows: Rows) -> Statistics:
        """Room for the statistics of `rows`."""
        tokens, blocks = rows.target.shape[0], -(-rows.vocabulary // VOCAB_BLOCK)
        like = rows.shift
        m, s = like.new_empty(tokens, blocks), like.new_empty(tokens, blocks)
        return cls(m, s, like.new_empty(tokens, blocks if rows.with_entropy else 0), torch.empty_like(like))
