"""Per-token inputs and results of the log-probability kernels of all backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.functions import VOCAB_BLOCK


def vocabulary_pieces(part: slice, tokens: int, logits: int) -> Iterator[slice]:
    """A part of the vocabulary in equal pieces of whole blocks, with at most about `logits` logits each."""
    blocks = -(-(part.stop - part.start) // VOCAB_BLOCK)
    pieces = max(1, -(-blocks // max(1, logits // max(1, tokens) // VOCAB_BLOCK)))
    step = max(1, -(-blocks // pieces)) * VOCAB_BLOCK
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def first_unknown(target: Tensor, vocabulary: int, ignore_index: int) -> Callable[[], int]:
    """The position of the first target that is neither ``ignore_index`` nor in [0, vocabulary).

    The returned function gives the position, or the number of targets if there is none. On a GPU it waits for
    the answer. A backend may have a faster version.
    """
    flat = target.reshape(-1)
    unknown = (flat.clamp(0, vocabulary - 1) != flat) & (flat != ignore_index)
    some, answered = unknown.any(), None
    if some.is_cuda:
        some = some.to("cpu", non_blocking=True)  # into pinned memory
        answered = torch.cuda.current_stream(target.device).record_event()

    def wait() -> int:
        if answered is not None:
            answered.synchronize()
        return int(unknown.nonzero()[0]) if some else len(flat)

    return wait


class Rows(NamedTuple):
    """Inputs and results of rows of logits. Tensors are ``[tokens]``, contiguous, float32 except the target.

    Attributes:
        target: int64.
        vocabulary: entries in a row.
        ignore_index: the target of rows that do not count.
        scale: the factor of logits, which is rounded to float32 first.
        logp, entropy, shift, log_sum: results. The last two are R and logS of ``docs/contract.md``. The
            entropy is empty if it was not asked for.
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
        logp = target.new_empty(tokens, dtype=torch.float32)
        kept = logp.new_empty(tokens if entropy else 0)
        results = logp, kept, torch.empty_like(logp), torch.empty_like(logp)
        return cls(target, vocabulary, ignore_index, scale, *results)

    @property
    def with_entropy(self) -> bool:
        return self.entropy.numel() > 0

    def part(self, start: int, stop: int) -> Rows:
        """Views of some of the rows."""
        if (start, stop) == (0, self.target.shape[0]):
            return self
        return Rows._make(x[start:stop] if isinstance(x, Tensor) else x for x in self)


class Statistics(NamedTuple):
    """m, s and u of every block, ``[tokens, blocks]``, and every target's logit. u may be empty."""

    m: Tensor
    s: Tensor
    u: Tensor
    target_logit: Tensor

    @classmethod
    def empty(cls, rows: Rows) -> Statistics:
        """Uninitialized statistics of `rows`."""
        tokens, blocks = rows.target.shape[0], -(-rows.vocabulary // VOCAB_BLOCK)
        like = rows.shift
        m, s = like.new_empty(tokens, blocks), like.new_empty(tokens, blocks)
        return cls(m, s, like.new_empty(tokens, blocks if rows.with_entropy else 0), torch.empty_like(like))


def room_for_logits(tokens: int, weight: Tensor) -> Tensor:
    """Memory for the logits that a forward keeps for its backward: float32 ``[tokens, n]``.

    They are those of the vocabulary's first entries, whole blocks of them or all, with the bias and before
    the scale. They take no more memory than `weight`: so shapes alone decide how many they are. Rows start at
    multiples of 16 bytes: of a vocabulary that is no multiple of four, only whole blocks are kept.
    """
    vocabulary, features = weight.shape
    blocks = vocabulary * features * weight.itemsize // (4 * torch.sym_max(tokens, 1)) // VOCAB_BLOCK
    end = vocabulary if vocabulary % 4 == 0 else vocabulary // VOCAB_BLOCK * VOCAB_BLOCK
    return weight.new_empty((tokens, torch.sym_min(end, blocks * VOCAB_BLOCK)), dtype=torch.float32)


class GradLogitsInputs(NamedTuple):
    """What the gradient of a part of the logits is computed from.

    Attributes:
        hidden: ``[tokens, D]``.
        weight, bias: ``[V, D]`` and ``[V]``, of the whole vocabulary.
        part: of the vocabulary, whose columns the result has.
        rows: with their results.
        grad, grad_entropy: of the results, ``[tokens]``, float32.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    part: slice
    rows: Rows
    grad: Tensor
    grad_entropy: Tensor | None


def of_ids(
    add_statistics: Callable[[Statistics, Tensor, int, Rows], None],
    combine: Callable[[Statistics, Rows], None],
    logits: Tensor,
    ids: Tensor,
) -> Tensor:
    """The log-probabilities of ``ids[rows, n]`` under ``logits[rows, V]``, by these two functions.

    An id that is not in the vocabulary gives NaN. A backend may have a faster version.
    """
    count, vocabulary = logits.shape
    rows = Rows.empty(torch.full((count,), -1, device=logits.device), vocabulary, -1)
    statistics = Statistics.empty(rows)
    add_statistics(statistics, logits, 0, rows)
    combine(statistics, rows)
    known = (ids >= 0) & (ids < vocabulary)
    z = logits.gather(1, torch.where(known, ids, 0).to(torch.int64)).to(torch.float32)
    found = z - rows.shift[:, None] - rows.log_sum[:, None]
    nan = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=logits.device).view(torch.float32)
    return torch.where(known & ~found.isnan(), found, nan)
