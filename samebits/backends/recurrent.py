"""What recurrent layers keep of a sequence between calls: the state at a chunk's start, and the chunk's rows.

A sequence is cut into chunks at absolute positions, multiples of a chunk's size. A row depends on the state
at its chunk's start and on the chunk's rows before it alone. So a call that goes on needs these two, and has
the bits of one call for all: see docs/contract.md, "Recurrent layers".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK", "Layout", "Part", "RecurrentState"]

CHUNK = 64
"""Tokens of a chunk."""

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One array in the state of a sequence.

    Attributes:
        name: what it holds.
        shape: its shape for one sequence.
        dtype: its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def words(self) -> int:
        """Words of 4 bytes that it takes, up to a multiple of 16 bytes."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT // 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a sequence's state are. Equal layouts have the same memory.

    Attributes:
        operation: the operation whose state it is.
        parts: the arrays, in the order of memory. The number of rows in the open chunk lies before them.
        chunk: tokens of a chunk.
    """

    operation: str
    parts: tuple[Part, ...]
    chunk: int = CHUNK

    @property
    def words(self) -> int:
        """Words of 4 bytes for one sequence."""
        return _ALIGNMENT // 4 + sum(part.words for part in self.parts)

    def offset(self, name: str) -> int:
        """The first word of a part."""
        at = _ALIGNMENT // 4
        for part in self.parts:
            if part.name == name:
                return at
            at += part.words
        raise KeyError(name)


class RecurrentState:
    """The state of a recurrent layer after the last token of each sequence: where a call goes on.

    It is the matrix at the start of the open chunk, and what the chunk's rows so far leave to later ones. All
    of a sequence is one row of :attr:`data`, a float32 tensor ``[sequences, words]``. So a cache that holds,
    copies, moves or reorders tensors by their first dimension can hold `data`, and zeros are an empty state:
    that of sequences which have not begun.

    ::

        o, state = samebits.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        o, state = samebits.gated_delta_rule(..., initial_state=state, output_final_state=True)  # goes on
        beams = state[order]
        earlier = state.clone().cut(3)

    Args:
        layout: what a row of `data` holds.
        data: the memory, which is not copied. None: that of `sequences` empty states.
        sequences: their number, without `data`.
        device: where they are, without `data`.
        closing: what computes :attr:`matrix`.

    Raises:
        TypeError: `data` is not float32, or no Tensor.
        ValueError: `data` is not of the layout's size, or its rows are not dense.
    """

    __slots__ = ("_closed", "_closing", "_parts", "data", "layout")

    def __init__(
        self,
        layout: Layout,
        data: Tensor | None = None,
        *,
        sequences: int = 0,
        device: torch.device | str | None = None,
        closing: Callable[[RecurrentState], Tensor] | None = None,
    ) -> None:
        if data is None:
            data = torch.zeros(sequences, layout.words, dtype=torch.float32, device=device)
        name = f"samebits.{layout.operation}: state"
        if not isinstance(data, Tensor) or data.dtype != torch.float32:
            got = data.dtype if isinstance(data, Tensor) else type(data).__name__
            raise TypeError(f"{name}: expected a float32 tensor, got {got}")
        if data.ndim != 2 or data.shape[1] != layout.words:
            raise ValueError(
                f"{name}: expected shape [sequences, {layout.words}] for these heads, sizes and dtype, got"
                f" {list(data.shape)}"
            )
        step = data.stride(0) if len(data) > 1 else layout.words
        if step < layout.words or step % (_ALIGNMENT // 4) or data.stride(1) != 1:
            raise ValueError(f"{name}: expected dense, aligned rows, got strides {data.stride()}")
        self.layout, self.data = layout, data
        self._parts: Mapping[str, Tensor] | None = None
        self._closing = closing
        self._closed: Tensor | None = None

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Views of :attr:`data` by name, ``[sequences, *shape]``. Rows past :attr:`count` are garbage."""
        if self._parts is None:
            found = {}
            for part in self.layout.parts:
                at = self.layout.offset(part.name)
                words = self.data[:, at : at + part.words].view(part.dtype)
                found[part.name] = words[:, : math.prod(part.shape)].unflatten(1, part.shape)
            self._parts = found
        return self._parts

    @property
    def count(self) -> Tensor:
        """How many rows of the open chunk there are: integers in float32, ``[sequences]``, a view."""
        return self.data[:, 0]

    @property
    def matrix(self) -> Tensor:
        """The plain state after the last tokens, float32 ``[sequences, heads, key size, value size]``.

        That of :func:`samebits.ssd` is ``[sequences, heads, P, N]``, as in ``mamba-ssm``.
        Gradients go into it right after the call that returned this state, if it recorded any.
        """
        if self._closed is not None:
            return self._closed
        if self._closing is None:
            raise ValueError(
                f"samebits.{self.layout.operation}: state: expected one that a call has returned"
            )
        return self._closing(self)

    def advanced(
        self, closed: Tensor | None, closing: Callable[[RecurrentState], Tensor] | None = None
    ) -> RecurrentState:
        """Note that :attr:`data` was updated: what :attr:`matrix` is now, or what computes it."""
        self._closed, self._closing = closed, closing or self._closing
        return self

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, sequences: Tensor | slice) -> RecurrentState:
        """The states of some sequences, in any order: those of beams, for instance. A slice is a view."""
        return self._with(self.data[sequences])

    def clone(self) -> RecurrentState:
        """A copy."""
        return self._with(self.data.clone())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RecurrentState:
        """The same on a device."""
        return self._with(self.data.to(device, non_blocking=non_blocking))

    def repeat_interleave(self, repeats: int) -> RecurrentState:
        """Each sequence's state `repeats` times in a row."""
        return self._with(self.data.repeat_interleave(repeats, 0))

    def copy_(self, other: RecurrentState) -> RecurrentState:
        """Take over the states of `other`, in place."""
        if other.layout != self.layout:
            raise ValueError(f"samebits.{self.layout.operation}: state: expected one of the same layout")
        self.data.copy_(other.data)
        return self.advanced(None)

    def cut(self, tokens: int | Tensor) -> RecurrentState:
        """Take the last tokens back, in place. What goes on from here has the bits as if they had never been.

        A state holds the rows of the open chunk alone, which is closed by the token after its last one. So 1
        token can always be taken back, and up to as many as :attr:`count` says. It waits for a GPU.

        Args:
            tokens: how many: one number, or int ``[sequences]``.

        Raises:
            ValueError: a sequence has fewer rows in its open chunk.
        """
        left = self.count - tokens
        if (left < 0).any() or (left > self.count).any():
            raise ValueError(
                f"samebits.{self.layout.operation}: cut: expected from 0 to as many tokens as the open chunk"
                f" of each sequence has, {self.count.int().tolist()}, got"
                f" {tokens.tolist() if isinstance(tokens, Tensor) else tokens}"
            )
        self.count.copy_(left)
        return self.advanced(None)

    def _with(self, data: Tensor) -> RecurrentState:
        return RecurrentState(self.layout, data, closing=self._closing)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentState:
        return self._with(copy.deepcopy(self.data, memo))

    def __repr__(self) -> str:
        parts = ", ".join(f"{p.name} {list(p.shape)}" for p in self.layout.parts)
        return f"RecurrentState({self.layout.operation}, {len(self)} sequences: {parts})"
