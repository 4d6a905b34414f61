"""A layer of experts: its tokens in the order of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.contract import Contract
from samebits.ops._operator import Operator
from samebits.ops._rows import backend, rounded
from samebits.ops.expand import expand, sum_over_broadcast
from samebits.ops.fp8_grouped import fp8_grouped_linear
from samebits.ops.fp8_weights import linear_of_groups
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.indexing import take
from samebits.ops.reduce import FEW

__all__ = ["Routed", "combined", "routed"]


class Routed:
    """Tokens and the experts that they go to, ``[tokens, slots]``, in the order of the experts.

    Attributes:
        order: of all slots, sorted by expert; those of one expert in the order of the tokens.
        places: where each slot is in that order.
        experts: of the slots in that order; `count` where one is beyond.
        ends: of each expert's slots. Those of experts from `count` on come after them all.
        sequences: of the slots in that order, if the tokens are those of several sequences.
    """

    def __init__(self, experts: Tensor, count: int, rows: int) -> None:
        tokens, self.slots = experts.shape
        each = self.slots * (tokens // rows) if rows > 1 else 0
        flat = experts.to(torch.int64).reshape(-1)
        self.experts, self.order, self.places, self.ends, sequences = _route(flat, count, each)
        self.sequences = sequences if each else None

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fp8: bool | Tensor = False,
        contract: Contract | None = None,
    ) -> Tensor:
        """``x[slots, K] @ weight[expert, K, N]``, then ``+ bias[expert, N]``, each rounded to the dtype.

        Args:
            fp8: whether the product is in block FP8; or the scales of a weight that is.
            contract: of a product that is not.
        """
        if isinstance(fp8, Tensor):
            out = linear_of_groups("experts in FP8", x, self.ends, weight.mT, fp8.mT)
        elif fp8:
            out = fp8_grouped_linear(x.to(weight.dtype), weight.mT, self.ends, sequences=self.sequences)
        else:
            x = x.to(weight.dtype)
            out = grouped_mm(x, weight, self.ends, sequences=self.sequences, contract=contract)
        return out if bias is None else out + take(bias, self.experts.clamp(max=len(bias) - 1))


def _forward_route(experts: Tensor, count: int, each: int) -> tuple[Tensor, ...]:
    return backend(experts).route(experts, count, each)  # type: ignore[no-any-return]


def _fake_route(experts: Tensor, count: int, each: int) -> tuple[Tensor, ...]:
    ends = experts.new_empty(count, dtype=torch.int32)
    sequences = experts.new_empty(len(experts) if each else 0, dtype=torch.int32)
    return *(torch.empty_like(experts) for _ in range(3)), ends, sequences


# A stable sort needs nothing else to have one result.
_route = Operator(
    "route(Tensor experts, int count, int each) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    return _combine(x, weights, to.order, to.places, to.slots)  # type: ignore[no-any-return]


# Each is the other's gradient. Both take order and its inverse, places; weights are [tokens, slots], or None.


def _dtype(x: Tensor, weights: Tensor | None) -> torch.dtype:
    return x.dtype if weights is None else torch.promote_types(x.dtype, weights.dtype)


def _promoted(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dtype = _dtype(x, weights)
    return x.to(dtype), None if weights is None else weights.to(dtype)


def _forward_take(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    x, weights = _promoted(x, weights)
    return backend(x).take_slots(x, places, slots, weights)  # type: ignore[no-any-return]


def _fake_take(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]), dtype=_dtype(x, weights))


# out[places[i]] = x[i // slots] * weights[i]
_take = Operator(
    "take_slots(Tensor x, Tensor? weights, Tensor order, Tensor places, int slots) -> Tensor",
    cpu=_forward_take,
    fake=_fake_take,
)


def _forward_combine(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    on = backend(x)
    if slots <= FEW:
        if weights is not None and weights.dtype != torch.float32:  # float32 is the result's
            x, weights = _promoted(x, weights)
        return on.combine_slots(x, places, slots, weights)  # type: ignore[no-any-return]
    x, weights = _promoted(x, weights)
    rows = on.take_slots(x, order, 1, None)
    rows = rows if weights is None else rows * weights.reshape(-1, 1)
    by_entry = rows.view(-1, slots, x.shape[1]).transpose(1, 2)
    return on.row_sum(by_entry.reshape(-1, slots), False, x.dtype).view(by_entry.shape[:2])  # type: ignore[no-any-return]


def _fake_combine(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor, slots: int) -> Tensor:
    return x.new_empty((places.shape[0] // slots, x.shape[1]), dtype=_dtype(x, weights))


# out[t] = the sum over its slots i of x[places[i]] * weights[i]
_combine = Operator(
    "combine_slots(Tensor x, Tensor? weights, Tensor order, Tensor places, int slots) -> Tensor",
    cpu=_forward_combine,
    fake=_fake_combine,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, order, places, ctx.slots = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights, order, places)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else rounded(x, dtype)


def _of_weights(tokens: Tensor, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """For each slot the sum over a token's entries times those of its row, whose products are rounded."""
    rows = _take(rows, None, places, order, 1).view(*weights.shape, rows.shape[1])
    terms = expand(tokens.unsqueeze(1), rows.shape) * rows
    total: Tensor = sum_over_broadcast(terms, (*weights.shape, 1))
    return _rounded(total.squeeze(2), weights.dtype)


def _backward_take(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order, places = saved
    of_x = of_weights = None
    if ctx.needs_input_grad[0]:
        of_x = _rounded(_combine(grad, weights, order, places, ctx.slots), ctx.dtype)
    if ctx.needs_input_grad[1]:
        of_weights = _of_weights(x, grad, weights, order, places)
    return of_x, of_weights, None, None, None


def _backward_combine(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, order, places = saved
    of_x = of_weights = None
    if ctx.needs_input_grad[0]:
        of_x = _rounded(_take(grad, weights, order, places, ctx.slots), ctx.dtype)
    if ctx.needs_input_grad[1]:
        of_weights = _of_weights(grad, x, weights, order, places)
    return of_x, of_weights, None, None, None


_take.register_autograd(_backward_take, setup_context=_setup_context)
_combine.register_autograd(_backward_combine, setup_context=_setup_context)


Step = Callable[[Tensor], Tensor]


def experts(
    x: Tensor, to: Routed, weights: Tensor, up: Step, activation: Step, down: Step, norm: Step | None
) -> Tensor:
    """The layer: rows to their experts, `up`, `activation`, `down`, `norm`, and back."""
    out = down(activation(up(routed(x, to))))
    return combined(out if norm is None else norm(out), weights, to)
