"""Sequences of attention on the CPU: their keys, what queries see of them, and the chains over queries.

Under a mask a key's position is its rank among those that a row shows. Keys that no row shows are dropped
first. Where each row shows the first ones of the others, as with padding and gaps, a rank is an index into
these, and rows go together. Elsewhere each row has keys of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.backends.attention import HIDES, Attention
from samebits.contract import GROUP
from samebits.functions import CONSTANTS

__all__ = ["TOGETHER", "Sequence", "parts", "places", "sequences"]

_I64 = npt.NDArray[np.int64]

TOGETHER = 64
"""Queries that are tried together where not all of a sequence can be."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of the batch.

    Attributes:
        row: of q, and of a mask, in the batch.
        queries: span of its tokens there.
        slots: of its keys, in order, in ``k.flatten(0, -3)``; without those that a mask hides from all rows.
        first_slot: of all its keys in a row of the batch, and in a mask.
        columns: of its keys in a mask.
        offset: position of its first query among all keys.
        first_seen, last_seen: for each query the first key in its window, and the one after the last.
        shown: bool ``[kv heads, queries, group, keys]``: what the mask shows; None without one.
        together: whether each row shows the first keys of the sequence.
    """

    row: int
    queries: slice
    slots: Tensor
    first_slot: int
    columns: Tensor
    offset: int
    first_seen: _I64
    last_seen: _I64
    shown: Tensor | None = None
    together: bool = True


def sequences(x: Attention) -> Iterator[Sequence]:
    q_ends, k_ends, starts, lengths = (
        None if t is None else t.tolist() for t in (x.cu_seqlens_q, x.cu_seqlens_k, x.key_start, x.key_length)
    )
    for b in range(x.batch):
        queries = slice(0, x.queries) if q_ends is None else slice(q_ends[b], q_ends[b + 1])
        first = 0 if starts is None else starts[b]
        if k_ends is not None:
            slots = torch.arange(k_ends[b], k_ends[b + 1])
        else:
            slots = torch.arange(first, x.keys if lengths is None else lengths[b])
            if x.block_table is None:
                slots += b * x.keys
            else:
                page = x.k.shape[1]
                slots = x.block_table[b].to(torch.int64)[slots // page] * page + slots % page
        asked, keys = queries.stop - queries.start, len(slots)
        offset = {"first": 0, "slots": -first, "last": keys - asked}[x.align]
        position, (left, right) = np.arange(asked) + offset, x.window
        first_seen = position - left if left >= 0 else np.zeros_like(position)
        last_seen = position + right + 1 if right >= 0 else np.full_like(position, keys)
        row = b if q_ends is None else 0
        columns = torch.arange(first, first + keys)
        s = Sequence(row, queries, slots, first, columns, offset, first_seen.clip(0), last_seen.clip(0, keys))
        yield s if x.mask is None else _shown(x, s, x.mask)


def _shown(x: Attention, s: Sequence, mask: Tensor) -> Sequence:
    """The sequence with what the mask shows."""
    own = mask.detach()[s.row, :, :, s.columns]
    if own.dtype != torch.bool:
        own = ~(own.to(torch.float32) * CONSTANTS["LOG2E"] <= HIDES)
    own = own[:, s.queries]
    return _kept(replace(s, shown=own.view(x.kv_heads, x.group, *own.shape[1:]).transpose(1, 2)))


def _kept(s: Sequence) -> Sequence:
    """The sequence without the keys that the mask hides from all rows."""
    assert s.shown is not None
    kept = s.shown.flatten(0, 2).any(0).nonzero()[:, 0]
    first_seen, last_seen = (np.searchsorted(kept.numpy(), t) for t in (s.first_seen, s.last_seen))
    shown = s.shown[..., kept]
    first_ones = torch.arange(len(kept)) < shown.sum(-1, keepdim=True)
    return replace(
        s,
        slots=s.slots[kept],
        columns=s.columns[kept],
        first_seen=first_seen,
        last_seen=last_seen,
        shown=shown,
        together=torch.equal(first_ones, shown),
    )


def parts(s: Sequence) -> Iterator[Sequence]:
    """The sequence, or some of its queries at a time where they do not go together."""
    if s.together or s.shown is None:
        yield s
        return
    for start in range(0, s.shown.shape[1], TOGETHER):
        of = slice(start, start + TOGETHER)
        queries = slice(s.queries.start + start, min(s.queries.start + start + TOGETHER, s.queries.stop))
        part = replace(s, first_seen=s.first_seen[of], last_seen=s.last_seen[of], shown=s.shown[:, of])
        yield _kept(replace(part, queries=queries, offset=s.offset + start))


def places(x: Attention, s: Sequence) -> Tensor:
    """Each head's chain over queries, ``[kv heads, members, places]``: queries, -1 where there is none.

    Groups of 16 begin at multiples of 16.
    """
    asked = s.queries.stop - s.queries.start
    if s.shown is None or (x.align == "first" and x.queries != x.keys):
        plain = torch.cat([torch.full((s.offset % GROUP,), -1), torch.arange(asked)])
        return plain.expand(x.kv_heads, x.group, -1)
    column = {int(c): i for i, c in enumerate(s.columns)}
    own = [(i + s.offset, column.get(s.first_slot + i + s.offset, -1)) for i in range(asked)]
    chains = [_chain(s.shown[h, :, e].numpy(), own) for h in range(x.kv_heads) for e in range(x.group)]
    most = max(map(len, chains))
    filled = [c + [-1] * (most - len(c)) for c in chains]
    return torch.tensor(filled, dtype=torch.int64).view(x.kv_heads, x.group, -1)


def _chain(shown: npt.NDArray[np.bool_], own: list[tuple[int, int]]) -> list[int]:
    """Queries in groups of 16 places, -1 where there is none.

    Args:
        shown: what a mask shows each query.
        own: of each query its position among all keys, and the index of the key there in ``shown``, or -1.
    """
    main = [p < 0 or bool(k >= 0 and shown[i, k]) for i, (p, k) in enumerate(own)]
    last = max((i for i, is_main in enumerate(main) if is_main), default=len(main))
    chain: list[int] = []
    place, others = -1, []
    for i, (position, key) in enumerate(own):
        if main[i] or (i > last and shown[i].any()):
            rank = position if position < 0 else int(shown[i, :key].sum())
            new = main[i] and (not chain or rank == 0)
            place = rank if new else place + 1
            if new or place % GROUP == 0:
                chain += [-1] * GROUP
            chain[place % GROUP - GROUP] = i
        elif shown[i].any():
            others.append(i)
    return chain + others + [-1] * (-len(others) % GROUP)
