"""What a call of a delta rule or of linear attention computes, as data: what every backend receives.

A backend's module ``delta`` has these functions. Their bits are those of docs/contract.md, "Recurrent
layers":

* ``forward(x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None) -> None`` fills ``out``, of
  v's shape, contiguous and of zeros: tokens of no sequence stay so. It has v's dtype; float32 is taken with
  weights, too. `state` is the memory of a
  :class:`samebits.backends.recurrent.RecurrentState`: each sequence goes on from its row, which is updated.
  ``closed``, float32 ``[sequences, heads, key size, value size]``, gets the matrices after the last tokens.
* ``backward(x: Delta, state: Tensor | None, grad: Tensor, grad_closed: Tensor | None) -> (dq, dk, dv, dg,
  dbeta, dweights, dinitial)`` for the state before the forward, and for ``grad`` of v's dtype. ``dg``,
  ``dbeta`` and ``dweights`` are float32, and None where there is no such operand; ``dinitial`` is None if
  ``x.initial`` is. That of ``x.skip`` needs nothing of this, and is left to the operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.recurrent import CHUNK, Layout, Part

__all__ = ["BLOCK", "Delta", "layout"]

BLOCK = 16
"""Rows of a block: a chunk's triangular system is solved block by block, and row by row within."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Operands and options, checked by the operator: shapes fit, all are on one device.

    Attributes:
        q, k: ``[tokens, key heads, key size]``; any strides.
        v: ``[tokens, heads, value size]``, of q's dtype. ``heads`` is a multiple of ``key heads``.
        g: logarithms of decays, float32 ``[tokens, heads]``; ``[tokens, heads, key size]`` for one of each
            channel; None for no decay.
        beta: float32 ``[tokens, heads]``. None: no delta rule, the state gets the values as they are.
        weights: float32 ``[tokens, heads]``, of rows as others and the state read them. None: all are 1.
            Without a delta rule only, and with one decay for each head.
        skip: float32 ``[heads, value size]``, contiguous: times the values it is added to results. With
            weights only.
        initial: float32 ``[sequences, heads, key size, value size]``: matrices that sequences start from.
        spans: int32 ``[sequences, 2]``, contiguous: the first token of each sequence, and the one after the
            last. ``[sequences, 0]``: they are side by side, of one length, and nothing was to be computed.
        scale: of the results; a float32.
        contract: key of the contract, without a backend.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    weights: Tensor | None
    skip: Tensor | None
    initial: Tensor | None
    spans: Tensor
    scale: float
    contract: str

    def bounds(self) -> list[tuple[int, int]]:
        """`spans`, as numbers."""
        if self.spans.shape[1]:
            return [(start, stop) for start, stop in self.spans.tolist()]
        length = self.q.shape[0] // max(1, len(self.spans))
        return [(n * length, (n + 1) * length) for n in range(len(self.spans))]

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key has a decay of its own."""
        return self.g is not None and self.g.ndim == 3


def layout(
    operation: str,
    heads: int,
    key_size: int,
    size: int,
    dtype: torch.dtype,
    by_channel: bool = False,
    weighted: bool = False,
) -> Layout:
    """What a state has: the matrix at the chunk's start; of the chunk's rows keys, updates and decays.

    Updates are what each row adds to the state, and values without a delta rule. Decays are the sums of
    base-2 logarithms from the chunk's start on. Weights are there if an operation has any. Marks are zeros:
    while a kernel runs, it counts blocks there.
    """
    decays = (heads, CHUNK, key_size) if by_channel else (heads, CHUNK)
    return Layout(
        operation,
        (
            Part("matrix", (heads, key_size, size), torch.float32),
            Part("keys", (heads, CHUNK, key_size), dtype),
            Part("updates", (heads, CHUNK, size), dtype),
            Part("decays", decays, torch.float32),
            *([Part("weights", (heads, CHUNK), torch.float32)] if weighted else []),
            Part("marks", (1 + heads,), torch.int32),
        ),
    )
