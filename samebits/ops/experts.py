"""A layer of experts: its tokens in the order of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.ops._operator import Operator
from samebits.ops._rows import backend
from samebits.ops.expand import expand, sum_over_broadcast
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.indexing import take

__all__ = ["Routed", "combined", "routed"]


class Routed:
    """Tokens and the experts that they go to, ``[tokens, slots]``, in the order of the experts.

    Attributes:
        order: of all slots, sorted by expert; those of one expert in the order of the tokens.
        places: where each slot is in that order.
        experts: of the slots in that order, perhaps beyond `count`.
        ends: of each expert's slots. Those of experts from `count` on come after them all.
        sequences: of the slots in that order, if the tokens are those of several sequences.
    """

    def __init__(self, experts: Tensor, count: int, rows: int) -> None:
        tokens, self.slots = experts.shape
        # A sort of experts that is stable needs nothing else to have one result.
        self.experts, self.order = experts.to(torch.int64).reshape(-1).sort(stable=True)
        each = self.slots * (tokens // rows) if rows > 1 else 0
        self.places, self.ends, sequences = _route(self.experts, self.order, count, each)
        self.sequences = sequences if each else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x[slots, K] @ weight[expert, K, N]``, then ``+ bias[expert, N]``, each rounded to the dtype."""
        out = grouped_mm(x.to(weight.dtype), weight, self.ends, sequences=self.sequences)
        return out if bias is None else out + take(bias, self.experts.clamp(max=len(bias) - 1))


def _forward_route(experts: Tensor, order: Tensor, count: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    return backend(order).route(experts, order, count, each)  # type: ignore[no-any-return]


def _fake_route(experts: Tensor, order: Tensor, count: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    ends = order.new_empty(count, dtype=torch.int32)
    return torch.empty_like(order), ends, order.new_empty(len(order) if each else 0, dtype=torch.int32)


_route = Operator(
    "route(Tensor experts, Tensor order, int count, int each) -> (Tensor, Tensor, Tensor)",
    cpu=_forward_route,
    fake=_fake_route,
)


def routed(x: Tensor, to: Routed) -> Tensor:
    """The tokens ``x[tokens, n]`` once for each slot, in the order of the experts."""
    return _take(x, None, to.order, to.places, to.slots)  # type: ignore[no-any-return]


def combined(x: Tensor, weights: Tensor, to: Routed) -> Tensor:
    """The sum over a token's slots of ``weights[tokens, slots]`` times their rows of `x`.

    Each product is rounded to its dtype. The sum is a row's (``docs/contract.md``), in the order of slots.
    """
    dtype = torch.promote_types(x.dtype, weights.dtype)
    return _combine(x.to(dtype), weights.to(dtype), to.order, to.places, to.slots)  # type: ignore[no-any-return]


# Each is the other's gradient. Both take order and its inverse, places; weights are [tokens, slots], or None.


def _forward_take(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return backend(x).take_slots(x, order, slots, weights)  # type: ignore[no-any-return]


def _fake_take(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


# out[i] = x[order[i] // slots] * weights[order[i]]
_take = Operator(
    "take_slots(Tensor x, Tensor? weights, Tensor order, Tensor places, int slots) -> Tensor",
    cpu=_forward_take,
    fake=_fake_take,
)


def _forward_combine(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return backend(x).combine_slots(x, places, slots, weights)  # type: ignore[no-any-return]


def _fake_combine(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.new_empty((places.shape[0] // slots, x.shape[1]))


# out[t] = the sum over its slots i of x[places[i]] * weights[i]
_combine = Operator(
    "combine_slots(Tensor x, Tensor? weights, Tensor order, Tensor places, int slots) -> Tensor",
    cpu=_forward_combine,
    fake=_fake_combine,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, order, places, ctx.slots = inputs
    ctx.save_for_backward(None if weights is None else x, weights, order, places)


def _of_weights(tokens: Tensor, rows: Tensor, order: Tensor, places: Tensor, slots: int) -> Tensor:
    """For each slot the sum over a token's entries times those of its row, whose products are rounded."""
    rows = _take(rows, None, places, order, 1).view(-1, slots, rows.shape[1])
    terms = expand(tokens.unsqueeze(1), rows.shape) * rows
    return sum_over_broadcast(terms, (*terms.shape[:2], 1)).squeeze(2)  # type: ignore[no-any-return]


def _backward_take(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order, places = saved
    of_x = _combine(grad, weights, order, places, ctx.slots) if ctx.needs_input_grad[0] else None
    of_weights = None
    if weights is not None and ctx.needs_input_grad[1]:
        of_weights = _of_weights(x, grad, order, places, ctx.slots)
    return of_x, of_weights, None, None, None


def _backward_combine(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order, places = saved
    of_x = _take(grad, weights, order, places, ctx.slots) if ctx.needs_input_grad[0] else None
    of_weights = None
    if weights is not None and ctx.needs_input_grad[1]:
        of_weights = _of_weights(grad, x, order, places, ctx.slots)
    return of_x, of_weights, None, None, None


_take.register_autograd(_backward_take, setup_context=_setup_context)
_combine.register_autograd(_backward_combine, setup_context=_setup_context)


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
