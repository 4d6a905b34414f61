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

A backend for GPUs also has ``keeps_z(contract: str, key_size: int, by_channel: bool, device: int) -> bool``:
whether its backward of the delta rule wants the contract's z of each row, so that no triangular system is
solved again. Both functions then take ``z=``, float32 of v's shape, contiguous. The forward fills it, but for
tokens of no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.backends.recurrent import CHUNK, Layout, Part

__all__ = ["BLOCK", "Delta", "Steps", "layout"]

BLOCK = 16
"""Rows of a block: a chunk's triangular system is solved block by block, and row by row within."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What Mamba 2 computes weights, decays and D from: see :mod:`samebits.ops._ssd_steps`.

    Attributes:
        dt: ``[tokens, heads]``.
        bias: ``[heads]``, or None.
        a: float32 ``[heads]``, contiguous.
        d: ``[heads]`` or ``[heads, value size]``, or None.
        softplus: whether steps are the softplus of the sum of `dt` and `bias`.
        lowest, highest: bounds of steps.
    """

    dt: Tensor
    bias: Tensor | None
    a: Tensor
    d: Tensor | None
    softplus: bool
    lowest: float
    highest: float


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
        steps: in place of `g`, `weights` and `skip`, what they are computed from. Of a call without
            gradients only.
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
    steps: Steps | None = None

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

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return self.weights is not None or self.steps is not None

    def computed(self, ssd_steps: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Delta:
        """The same with what a backend's function of that name finds of `steps`, if there are any."""
        if (s := self.steps) is None:
            return self
        size = self.v.shape[2]
        weights, g, skip = ssd_steps(s.dt, s.bias, s.a, s.d, size, s.softplus, s.lowest, s.highest)
        return replace(self, g=g, weights=weights, skip=None if s.d is None else skip, steps=None)


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
