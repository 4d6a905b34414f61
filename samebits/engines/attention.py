"""Attention of a step of an engine, over the pages of its cache."""

from __future__ import annotations

from torch import Tensor

from samebits.ops.attention import attention

__all__ = ["paged"]


def paged(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    starts: Tensor | None,
    lengths: Tensor,
    table: Tensor,
    left: int = -1,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention of ``query[tokens, heads, size]`` into `out`, of its shape.

    Args:
        k, v: pages ``[pages, page, heads, size]``.
        starts: where the queries of each sequence start, and the number of all of them; None where each
            sequence has one.
        lengths: keys of each sequence.
        table: the pages of each sequence.
        left: how many keys a query sees before its own; -1 for all.
    """
    if starts is None:
        query, out = query[:, None], out[:, None]
    attention(
        query,
        k,
        v,
        causal=True,
        window=(left, 0) if left >= 0 else (-1, -1),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        cu_seqlens_q=starts,
        key_length=lengths,
        block_table=table,
        out=out,
    )
