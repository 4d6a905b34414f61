"""Recurrent layers of a step of an engine, whose cache has a row for each sequence.

A row of such a layer is what :class:`samebits.backends.recurrent.RecurrentState` holds: the matrix at the
start of the open chunk, and the chunk's rows so far. So a token has the bits of one prefill, whatever the
engine computed in one step, and whatever it has in its cache beside it.

Rows are copied out, moved on and copied back. Nothing waits for the GPU, and CUDA graphs can take a step in
which each sequence has one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.backends.recurrent import Layout, RecurrentState
from samebits.ops.causal_conv1d import causal_conv1d, causal_conv1d_update

__all__ = ["Packing", "Step", "convolved", "gone_on"]


@dataclass(frozen=True)
class Packing:
    """Where tokens of several sequences lie, when each sequence has its last inputs before them.

    Attributes:
        offsets: int32 ``[sequences + 1]``, of the tokens alone.
        tokens, before, last: indices among tokens and inputs before them: ``[tokens]``, and of each
            sequence the inputs before its tokens, and the last ones, ``[sequences, lead]``.
        extended: int32 ``[sequences + 1]``: offsets with the inputs before.
    """

    offsets: Tensor
    tokens: Tensor
    before: Tensor
    last: Tensor
    extended: Tensor

    @staticmethod
    def of(offsets: Tensor, tokens: int, lead: int) -> Packing:
        """That of `tokens` tokens with `lead` inputs before each sequence."""
        count = torch.arange(len(offsets), device=offsets.device)
        extended = offsets + count * lead
        beside = torch.arange(lead, device=offsets.device)
        numbers = torch.repeat_interleave(count[1:], offsets.diff(), output_size=tokens)
        return Packing(
            offsets.to(torch.int32),
            torch.arange(tokens, device=offsets.device) + numbers * lead,
            extended[:-1, None] + beside,
            extended[1:, None] - lead + beside,
            extended.to(torch.int32),
        )


@dataclass(frozen=True)
class Step:
    """Some sequences of a step, and what they go on from.

    Attributes:
        rows: of the cache, ``[sequences]``.
        begins: ``[sequences]``, whether a sequence has no token before these.
        packing: of their tokens; None where each has one.
    """

    rows: Tensor
    begins: Tensor
    packing: Packing | None

    def taken(self, cache: Tensor) -> Tensor:
        """A copy of the rows of `cache`: zeros of sequences that begin, whatever a row holds."""
        found = cache.index_select(0, self.rows)
        return found.masked_fill_(self.begins.view(-1, *(1,) * (cache.ndim - 1)), 0)

    def put(self, cache: Tensor, states: Tensor) -> None:
        """Put rows back."""
        cache.index_copy_(0, self.rows, states)


def convolved(
    step: Step, x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """:func:`samebits.causal_conv1d` of ``x[tokens, channels]``.

    Args:
        cache: the last inputs of sequences, ``[rows, width - 1, channels]``.
    """
    states, packing = step.taken(cache), step.packing
    if packing is None:
        out = causal_conv1d_update(x, states.mT, weight, bias, activation)
        step.put(cache, states)
        return out
    seen = x.new_empty(len(x) + states.shape[0] * states.shape[1], x.shape[1])
    seen[packing.tokens] = x
    seen[packing.before] = states
    step.put(cache, seen[packing.last])
    found: Any = causal_conv1d(seen.T[None], weight, bias, activation=activation, cu_seqlens=packing.extended)
    return found[0].T[packing.tokens]  # type: ignore[no-any-return]


def gone_on(
    step: Step, layout: Layout, cache: Tensor, run: Callable[..., Tensor], *operands: Tensor
) -> Tensor:
    """Results ``[tokens, ...]`` of a recurrent operation on ``operands[tokens, ...]``.

    Args:
        layout: what ``cache[rows, words]`` holds.
        run: the operation, of operands ``[batch, tokens, ...]``, ``initial_state`` and ``cu_seqlens``.
    """
    state = RecurrentState(layout, step.taken(cache))
    packing = step.packing
    if packing is None:
        out = run(*(t[:, None] for t in operands), initial_state=state)
    else:
        out = run(*(t[None] for t in operands), initial_state=state, cu_seqlens=packing.offsets)
    step.put(cache, state.data)
    return out.flatten(0, 1)
