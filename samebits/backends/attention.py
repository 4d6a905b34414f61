"""What a call of attention computes, as data: the operands and options that every backend receives.

A backend's module ``attention`` has these functions. The bits that they return are those of docs/contract.md,
"Attention".

* ``forward(x: Attention, out: Tensor | None = None) -> (out, lse, lse2)``. ``out`` is contiguous, of q's
  shape with v's last size. It is the given tensor, which is such, if the backend can write there. The
  log-sum-exp ``lse`` is ``[batch, heads, queries]``, or ``[heads, tokens]`` if packed, in float32. ``lse2``
  is the same to base 2, for ``backward``.
* ``checks_offsets(x: Attention) -> bool``, on GPUs alone: whether ``forward`` stops the GPU at offsets that
  do not rise from 0 to the number of tokens. Else the caller does.
* ``backward(x, grad, out, lse2, *, grad_mask: bool) -> (dq, dk, dv, dmask, dsinks)``. ``dmask`` is
  ``[batch, heads, queries, keys]`` in float32 if ``grad_mask``, else None. ``dsinks`` is None without sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = ["BLOCK", "HIDES", "LANES", "SEGMENT", "Align", "Attention"]

BLOCK = 128
"""Keys of a block: their scores have one maximum."""

SEGMENT = 512
"""Keys of a segment: its partial result is merged with those of the segments before it."""

LANES = 8
"""Partial sums of a segment's weights; key ``j`` is added to lane ``j % 8``."""

HIDES = -8192.0
"""What a float mask adds to a score in base 2 where it hides a key, or less: -inf, and what stands for it.

A row of such keys alone would have weights of little precision, as float32 has at this size.
"""

Align = Literal["first", "slots", "last"]
"""Where queries lie among the keys of their sequence, whose first key has position 0.

* ``"first"``: the first query has position 0.
* ``"slots"``: query slot i has the position of key slot i: i - key_start.
* ``"last"``: the last query has the position of the last key: i + keys - queries. Keys end at key_length.
"""


@dataclass(frozen=True, slots=True)
class Attention:
    """Operands and options, checked by the operator: shapes fit, all are on one device.

    Attributes:
        q: ``[batch, queries, heads, size]``, or packed ``[tokens, heads, size]``; any strides.
        k: ``[batch, keys, kv heads, size]``, packed ``[tokens, kv heads, size]``, or pages
            ``[pages, page, kv heads, size]``; of q's dtype. ``heads`` is a multiple of ``kv heads``.
        v: the same with its own last size.
        contract: key of the contract, without a backend.
        scale: of scores; a float32 > 0 and finite.
        softcap: scores are capped to its magnitude by tanh; a float32, 0.0 for none.
        window: how many keys to the left and to the right of its own position a query sees; -1 for all.
            Causal is 0 to the right.
        align: positions of queries.
        mask: ``[batch, heads, queries, keys]``: boolean, or float32, bfloat16 or float16; any strides,
            which may be 0. Its keys are slots. Never with packed operands.
        sinks: ``[heads]``, float32, contiguous.
        cu_seqlens_q: int32 ``[batch + 1]``, contiguous: where sequences of packed queries begin and end.
        cu_seqlens_k: likewise for packed keys. None with ``block_table``.
        key_start: int32 ``[batch]``, contiguous: the first slot that belongs to the sequence; 0 without.
        key_length: int32 ``[batch]``, contiguous: the first slot after the sequence; all slots without.
        block_table: int32 ``[batch, pages of a sequence]``, contiguous along rows: pages with the sequence's
            slots, in order.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    contract: str
    scale: float
    softcap: float = 0.0
    window: tuple[int, int] = (-1, -1)
    align: Align = "first"
    mask: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    key_start: Tensor | None = None
    key_length: Tensor | None = None
    block_table: Tensor | None = None

    @property
    def heads(self) -> int:
        """Of q."""
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads // self.kv_heads

    @property
    def packed(self) -> bool:
        """Whether the queries of all sequences lie one after the other."""
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def queries(self) -> int:
        """Slots of q: of a sequence, or of all together if packed."""
        return self.q.shape[-3]

    @property
    def keys(self) -> int:
        """Slots of k: of a sequence, of its pages, or of all sequences together if packed."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.k.shape[1]
        return self.k.shape[-3]

    @property
    def whole_keys(self) -> bool:
        """Whether every slot of k belongs to a sequence."""
        return all(t is None for t in (self.cu_seqlens_k, self.key_start, self.key_length, self.block_table))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp."""
        return (self.heads, self.queries) if self.packed else (self.batch, self.heads, self.queries)
