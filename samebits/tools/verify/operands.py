"""The tensors of a case: operands in the case's layout, and outputs that start as NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samebits.backends.product import Operands
from samebits.testing import values
from samebits.tools.verify.case import F32, ProductCase


@dataclass(frozen=True, slots=True)
class Inputs:
    """The input tensors of a product."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    acc: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def into(self, out: Tensor) -> Operands:
        """The operands of a product that writes `out`. It already holds the accumulator, if there is one."""
        start = None if self.acc is None else out
        sequences = self.acc is not None or self.cu_seqlens is not None or self.a.ndim == 4
        return Operands(self.a, self.b, out, self.bias, start, self.cu_seqlens, sequences)


def laid(x: Tensor, layout: str, place: str) -> Tensor:
    """The values of `x` at other strides, with NaN beside them."""
    if layout == "T":
        return laid(x.mT, "N", place).mT
    columns = x.shape[-1]
    width, first, step = {
        "plain": (columns, 0, 1),
        "pitched": (-(-columns // 8) * 8 + 8, 0, 1),
        "odd": (columns + 2 + columns % 2, 1, 1),
        "spread": (2 * columns, 0, 2),
    }[place]
    room = x.new_full((*x.shape[:-1], width + (place == "odd")), math.nan)
    return room[..., first : first + step * columns : step].copy_(x)


def make_inputs(case: ProductCase, device: torch.device, make: Callable[..., Tensor] = values) -> Inputs:
    """The inputs of `case`, filled by `make`."""
    lead = (case.batch,) if case.batch else ()
    mid = (case.sequences,) if case.sequences else ()
    a_lead = (1,) if case.shared == "a" else lead
    b_lead = (1,) if case.shared == "b" else lead
    a = make(case.kind, (*a_lead, *mid, case.m, case.k), case.dtype, 1, device)
    b = make(case.kind, (*b_lead, *mid, case.k, case.n), case.dtype, 2, device)
    bias = None if case.bias is None else make(case.kind, (case.n,), case.bias, 3, device)
    acc = make("normal", (*lead, case.m, case.n), F32, 4, device) if case.accumulate else None
    cu_seqlens = None
    if case.lengths:
        ends = list(itertools.accumulate(case.lengths, initial=0))
        cu_seqlens = torch.tensor(ends, dtype=case.cu_seqlens_dtype, device=device)
    return Inputs(
        laid(a, case.layout[0], case.place), laid(b, case.layout[1], case.place), bias, acc, cu_seqlens
    )


def unfilled(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: Any) -> Tensor:
    """A substitute for `values` where only strides matter."""
    return torch.empty(shape, dtype=dtype, device=device)


_MARGIN = 8
"""Rows of memory before and after an output. Their bytes are a multiple of 16."""


@dataclass(frozen=True, slots=True)
class Room:
    """An output within memory full of NaN."""

    out: Tensor
    rows: Tensor
    """The output's rows, and the gaps between them."""
    memory: Tensor

    @property
    def margins(self) -> Tensor:
        """The memory before and after the output."""
        return torch.cat((self.memory[:_MARGIN], self.memory[-_MARGIN:]))


def make_room(case: ProductCase, inputs: Inputs) -> Room:
    """Room for an output that starts as NaN, or as the accumulator."""
    lead = (case.batch,) if case.batch else ()
    height, width = math.prod(lead) * case.m, max(case.n, case.pitch)
    memory = inputs.a.new_full((height + 2 * _MARGIN, width), math.nan, dtype=case.out_dtype)
    rows = memory[_MARGIN : _MARGIN + height].view(*lead, case.m, width)
    out = rows[..., : case.n]
    if inputs.acc is not None:
        out.copy_(inputs.acc)
    return Room(out, rows, memory)


_ALLOCATING = (torch.empty, torch.empty_like, Tensor.new_empty)


class Surrounded(TorchFunctionMode):
    """A context in which floating-point tensors are allocated within memory full of NaN.

    They start as NaN, too, unless zeros were asked for.
    """

    _WIDTH = 64
    """Elements before and after a tensor. Their bytes are a multiple of 128."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (*_ALLOCATING, torch.zeros) or not out.dtype.is_floating_point:
            return out
        memory = out.new_full((out.numel() + 2 * self._WIDTH,), math.nan)
        self._memories.append(memory)
        inside = memory[self._WIDTH : -self._WIDTH].view(out.shape)
        return inside.zero_() if func is torch.zeros else inside

    @property
    def margins(self) -> list[Tensor]:
        """The memory before and after each tensor."""
        return [torch.cat((m[: self._WIDTH], m[-self._WIDTH :])) for m in self._memories]
