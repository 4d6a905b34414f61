"""A layer of experts: its tokens in the order of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops.expand import expand
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.indexing import take
from samebits.ops.reduce import sum, sum_of_slots

__all__ = ["Routed", "combined", "routed"]


class Routed:
    """Tokens and the experts that they go to, ``[tokens, slots]``, in the order of the experts.

    Attributes:
        order: of all slots, sorted by expert; those of one expert in the order of the tokens.
        places: where each slot is in that order.
        experts: of the slots in that order.
        ends: of each expert's slots. Those of experts from `count` on come after them all.
        sequences: of the slots in that order, if the tokens are those of several sequences.
    """

    def __init__(self, experts: Tensor, count: int, rows: int) -> None:
        tokens, self.slots = experts.shape
        # A sort of experts that is stable needs nothing else to have one result.
        self.experts, self.order = experts.reshape(-1).sort(stable=True)
        self.places = torch.empty_like(self.order)
        self.places[self.order] = torch.arange(self.order.numel(), device=experts.device)
        every = torch.arange(count, dtype=self.experts.dtype, device=experts.device)
        self.ends = torch.searchsorted(self.experts, every, right=True, out_int32=True)
        self.experts = self.experts.clamp(max=count - 1)
        self.sequences = None
        if rows > 1:
            self.sequences = (self.order // (self.slots * (tokens // rows))).to(torch.int32)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x[slots, K] @ weight[expert, K, N]``, then ``+ bias[expert, N]``, each rounded to the dtype."""
        out = grouped_mm(x.to(weight.dtype), weight, self.ends, sequences=self.sequences)
        return out if bias is None else out + take(bias, self.experts)


def routed(x: Tensor, to: Routed) -> Tensor:
    """The tokens ``x[tokens, n]`` once for each slot, in the order of the experts."""
    return _take_slots(x, to.order, to.places, to.slots)  # type: ignore[no-any-return]


def combined(x: Tensor, weights: Tensor, to: Routed) -> Tensor:
    """The sum over a token's slots of ``weights[tokens, slots]`` times their rows of `x`.

    Each product is rounded to its dtype. The sum is a row's (``docs/contract.md``), in the order of slots.
    """
    rows: Tensor = _take_slots(x, to.places, to.order, 1)
    rows = rows.reshape(*weights.shape, x.shape[1])
    return sum(rows * expand(weights.unsqueeze(2), rows.shape), 1)


def _forward(x: Tensor, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.index_select(0, order if slots == 1 else order // slots)


def _fake(x: Tensor, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


# out[i] = x[order[i] // slots]; places is the inverse of order.
_take_slots = Operator(
    "take_slots(Tensor x, Tensor order, Tensor places, int slots) -> Tensor", cpu=_forward, fake=_fake
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, places, ctx.slots = inputs
    ctx.save_for_backward(order, places)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, None, None, None]:
    order, places = saved
    rows: Tensor = _take_slots(grad, places, order, 1)
    if ctx.slots > 1:
        rows = sum_of_slots(rows.reshape(-1, ctx.slots, grad.shape[1]))
    return rows, None, None, None


_take_slots.register_autograd(_backward, setup_context=_setup_context)


Activation = Callable[[Tensor], Tensor]


def experts(
    x: Tensor,
    to: Routed,
    weights: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    activation: Activation,
    norm: Activation | None,
) -> Tensor:
    """The layer: rows to their experts, `up`, `activation`, `down`, `norm`, and back."""
    inner = activation(to.linear(routed(x, to), *up))
    out = to.linear(inner, *down)
    return combined(out if norm is None else norm(out), weights, to)
