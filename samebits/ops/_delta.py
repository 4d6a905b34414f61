"""The operators under delta rules and linear attention, for every device.

The public functions check their arguments and call :func:`attend_linearly`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, module_for
from samebits.backends.delta import Delta
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend as rows_backend
from samebits.ops._rows import rounded
from samebits.ops.rsqrt import rsqrt

EPS = 1e-6
"""What is added to a sum of squares before a key or query is divided by its root."""


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    state: Tensor | None,
    spans: Tensor,
    scale: float,
    closes: bool,
    key: Key,
) -> tuple[Tensor, Tensor]:
    """Results, and with `closes` the matrices after the last tokens. `state` is updated in place."""
    operands = (q, k, v, g, beta, initial)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        out, closed, after = _operator(*operands, state, spans, scale, closes, key)
        if state is not None:
            with torch.no_grad():
                state.copy_(after)
        return out, closed
    if state is not None:
        return _going_on(*operands[:5], state, spans, scale, closes, key)  # type: ignore[no-any-return]
    out, closed, _ = _operator(*operands, None, spans, scale, closes, key)
    return out, closed


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    spans: Tensor,
    scale: float,
    key: Key,
) -> tuple[Any, Delta]:
    """The module that computes on the device of q, and what it is to compute."""
    backend, contract = module_for("delta", q, key)
    return backend, Delta(q, k, v, g, beta, initial, spans, scale, contract)


def _run(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, g, beta, initial, state, spans, scale, closes, key = args
    after = torch.empty(0, dtype=torch.float32, device=q.device) if state is None else state.clone()
    kept = None if state is None else after
    out, closed = _forward(q, k, v, g, beta, initial, spans, scale, closes, key, kept)
    return out, closed, after


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    spans: Tensor,
    scale: float,
    closes: bool,
    key: Key,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    backend, x = _call(q, k, v, g, beta, initial, spans, scale, key)
    every = spans.shape[1] == 0  # token is one of a sequence, so its result is written
    out = (torch.empty if every else torch.zeros)(v.shape, dtype=v.dtype, device=v.device)
    size = (len(spans), v.shape[1], q.shape[2], v.shape[2]) if closes else (0,)
    closed = torch.zeros(size, dtype=torch.float32, device=q.device)
    backend.forward(x, state, out, closed if closes else None)
    return out, closed


def _going_on_run(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state, spans, scale, closes, key = args
    return _forward(q, k, v, g, beta, None, spans, scale, closes, key, state)


def _going_on_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, spans, _, closes, _ = given
    size = (spans.shape[0], v.shape[1], q.shape[2], v.shape[2]) if closes else (0,)
    return v.new_empty(v.shape), q.new_empty(size, dtype=torch.float32)


def _fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    state = given[3]
    after = q.new_empty((0,) if state is None else state.shape, dtype=torch.float32)
    return *_going_on_fake(q, k, v, *given), after


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta"
_OPTIONS = "Tensor spans, float scale, bool closes, str contract"
_operator = Operator(
    f"delta({_OPERANDS}, Tensor? initial, Tensor? state, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    cpu=_run,
    fake=_fake,
)
_going_on = Operator(
    f"delta_({_OPERANDS}, Tensor(a!) state, {_OPTIONS}) -> (Tensor, Tensor)",
    cpu=_going_on_run,
    fake=_going_on_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, spans, ctx.scale, ctx.closes, ctx.key = inputs
    state = tensors[6]
    if state is not None:  # it will be updated
        tensors[6] = state.clone()
    ctx.save_for_backward(*tensors, spans)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, saved: tuple[Tensor | None, ...], grad: Tensor | None, grad_closed: Tensor | None, _: Any
) -> tuple[Any, ...]:
    refuse_second_derivatives("gated_delta_rule, kda, lightning_attention")
    q, k, v, g, beta, initial, state, spans = saved
    if grad is None:
        grad = torch.zeros_like(v)  # type: ignore[arg-type]
    given = grad_closed if ctx.closes else None
    args = (q, k, v, g, beta, initial, state, spans, grad, given, ctx.scale, ctx.key)
    dq, dk, dv, dg, dbeta, dinitial = _gradients(*args)
    return (
        dq,
        dk,
        dv,
        None if g is None else dg,
        None if beta is None else dbeta,
        None if initial is None else dinitial,
        *(None,) * 5,
    )


def _gradients_run(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, g, beta, initial, state, spans, grad, grad_closed, scale, key = args
    backend, x = _call(q, k, v, g, beta, initial, spans, scale, key)
    found = backend.backward(x, state, grad, grad_closed)
    return tuple(q.new_empty(0) if t is None else t for t in found)


def _gradients_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    given = (q, k, v, g, beta, initial)
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)


_gradients = Operator(
    f"delta_gradients({_OPERANDS}, Tensor? initial, Tensor? state, Tensor spans, Tensor grad,"
    " Tensor? grad_closed, float scale, str contract) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_gradients_run,
    fake=_gradients_fake,
)
_operator.register_autograd(_backward, setup_context=_setup_context)


# ---- keys and queries of length 1


def _root(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `x` in float32, and 1 / sqrt of the sums of their squares."""
    wide = x.detach().to(torch.float32)
    rows = (wide * wide).reshape(-1, x.shape[-1])
    squares = rows_backend(x).row_sum(rows, False, torch.float32).view(*x.shape[:-1], 1)
    return wide, rsqrt(squares + EPS)


def _normalize(x: Tensor) -> Tensor:
    wide, r = _root(x)
    return rounded(wide * r, x.dtype)


def _normalize_gradient(x: Tensor, grad: Tensor) -> Tensor:
    wide, r = _root(x)
    y, g = wide * r, grad.to(torch.float32)
    rows = (g * y).reshape(-1, x.shape[-1])
    along = rows_backend(x).row_sum(rows, False, torch.float32).view(*x.shape[:-1], 1)
    return rounded(r * (g - y * along), x.dtype)


normalized = Operator(
    "l2norm(Tensor x) -> Tensor", cpu=_normalize, fake=lambda x: x.new_empty(x.shape, dtype=x.dtype)
)
"""Rows ``x / sqrt(sum(x ** 2) + 1e-6)``, rounded once."""

_normalized_gradient = Operator(
    "l2norm_gradient(Tensor x, Tensor grad) -> Tensor",
    cpu=_normalize_gradient,
    fake=lambda x, _: x.new_empty(x.shape),
)


def _setup_normalized(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _normalized_backward(ctx: Any, saved: tuple[Tensor], grad: Tensor) -> Tensor:
    refuse_second_derivatives("gated_delta_rule, kda")
    found: Tensor = _normalized_gradient(*saved, grad)
    return found


normalized.register_autograd(_normalized_backward, setup_context=_setup_normalized)
