"""The operators under delta rules and linear attention, for every device.

The public functions check their arguments and call :func:`attend_linearly`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, UnavailableError, module_for, on_gpu
from samebits.backends.delta import Delta, Steps
from samebits.ops._fused import backend as fused_backend
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend as rows_backend

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
    *,
    weights: Tensor | None = None,
    skip: Tensor | None = None,
    wide: bool = False,
    steps: Steps | None = None,
) -> tuple[Tensor, Tensor]:
    """Results, and with `closes` the matrices after the last tokens. `state` is updated in place.

    Results are float32 if they are to be `wide`, else of v's dtype. `steps` come with a state, and without
    gradients.
    """
    if steps is not None:
        of_steps = (getattr(steps, field.name) for field in dataclasses.fields(steps))
        return _stepping(q, k, v, *of_steps, state, spans, scale, wide, key), v.new_empty(0)
    operands = (q, k, v, g, beta, weights, skip, initial)
    options = (spans, scale, closes, wide, key)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        out, closed, after, _ = _operator(*operands, state, *options, True)
        if state is not None:
            with torch.no_grad():
                state.copy_(after)
        return out, closed
    if state is not None:
        return _going_on(*operands[:-1], state, *options)  # type: ignore[no-any-return]
    out, closed, _, _ = _operator(*operands, None, *options, False)
    return out, closed


def _call(*given: Any) -> tuple[Any, Delta]:
    """The module that computes on the device of q, and what it is to compute."""
    *operands, key = given
    backend, contract = module_for("delta", operands[0], key)
    return backend, Delta(*(*operands, contract))


def _size_of_z(q: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, key: Key) -> tuple[int, ...]:
    """The shape of z, which a forward saves for its backward; empty where that has no use for it."""
    if beta is None or not q.is_cuda:
        return (0,)
    device, by_channel = q.get_device(), g is not None and g.ndim == 3
    try:
        backend, contract = on_gpu("delta", key, device)
    except UnavailableError:  # a tensor without data, of a GPU that is not here
        return (0,)
    return tuple(v.shape) if backend.keeps_z(contract, q.shape[2], by_channel, device) else (0,)


def _run(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *operands, state, spans, scale, closes, wide, key, saves = args
    q, _, v, g, beta, *_ = operands
    after = torch.empty(0, dtype=torch.float32, device=q.device) if state is None else state.clone()
    kept = None if state is None else after
    z = q.new_empty(_size_of_z(q, v, g, beta, key) if saves else (0,), dtype=torch.float32)
    out, closed = _forward(*operands, kept, spans, scale, closes, wide, key, z=z)
    return out, closed, after, z


def _forward(*args: Any, steps: Steps | None = None, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
    *operands, state, spans, scale, closes, wide, key = args
    backend, x = _call(*operands, spans, scale, key)
    x = x if steps is None else dataclasses.replace(x, steps=steps)
    every = spans.shape[1] == 0  # token is one of a sequence, so its result is written
    q, v = x.q, x.v
    dtype = torch.float32 if wide else v.dtype
    out = (torch.empty if every else torch.zeros)(v.shape, dtype=dtype, device=v.device)
    size = (len(spans), v.shape[1], q.shape[2], v.shape[2]) if closes else (0,)
    closed = torch.zeros(size, dtype=torch.float32, device=q.device)
    backend.forward(x, state, out, closed if closes else None, **_named(z))
    return out, closed


def _named(z: Tensor | None) -> dict[str, Tensor]:
    """Arguments of a backend, if z is saved."""
    return {} if z is None or z.ndim == 1 else {"z": z}


def _going_on_run(*args: Any) -> tuple[Tensor, Tensor]:
    *operands, state, spans, scale, closes, wide, key = args
    return _forward(*operands, None, state, spans, scale, closes, wide, key)


def _going_on_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, spans, _, closes, wide, _ = given
    size = (spans.shape[0], v.shape[1], q.shape[2], v.shape[2]) if closes else (0,)
    out = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    return out, q.new_empty(size, dtype=torch.float32)


def _stepping_run(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    *of_steps, state, spans, scale, wide, key = given
    missing = (None,) * 5
    return _forward(q, k, v, *missing, state, spans, scale, False, wide, key, steps=Steps(*of_steps))[0]


def _stepping_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    return v.new_empty(v.shape, dtype=torch.float32 if given[-2] else v.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (*rest, key, saves), g, beta, state = given, *given[:2], given[5]
    sizes = (0,) if state is None else state.shape, _size_of_z(q, v, g, beta, key) if saves else (0,)
    after, z = (q.new_empty(size, dtype=torch.float32) for size in sizes)
    return *_going_on_fake(q, k, v, *rest, key), after, z


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? weights, Tensor? skip"
_OPTIONS = "Tensor spans, float scale, bool closes, bool wide, str contract"
_operator = Operator(
    f"delta({_OPERANDS}, Tensor? initial, Tensor? state, {_OPTIONS}, bool saves)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_run,
    fake=_fake,
)
_going_on = Operator(
    f"delta_({_OPERANDS}, Tensor(a!) state, {_OPTIONS}) -> (Tensor, Tensor)",
    cpu=_going_on_run,
    fake=_going_on_fake,
)
_stepping = Operator(
    "ssd_(Tensor q, Tensor k, Tensor v, Tensor dt, Tensor? bias, Tensor a, Tensor? d, bool softplus,"
    " float lowest, float highest, Tensor(a!) state, Tensor spans, float scale, bool wide, str contract)"
    " -> Tensor",
    cpu=_stepping_run,
    fake=_stepping_fake,
)
"""The same for Mamba 2, from its steps: so that a step of decoding can be one launch."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, spans, ctx.scale, ctx.closes, _, ctx.key, _ = inputs
    *_, after, z = output
    if state is not None:  # it will be updated
        state = state.clone()
    ctx.save_for_backward(*tensors, state, spans, None if z.ndim == 1 else z)
    ctx.mark_non_differentiable(after, z)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, saved: tuple[Tensor | None, ...], grad: Tensor | None, grad_closed: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    refuse_second_derivatives("gated_delta_rule, kda, lightning_attention, ssd")
    *operands, state, spans, z = saved
    v: Any = operands[2]
    grad = torch.zeros_like(v) if grad is None else grad.to(v.dtype)
    given = grad_closed if ctx.closes else None
    found = _gradients(*operands, state, spans, z, grad, given, ctx.scale, ctx.key)
    return *(None if of is None else t for of, t in zip(operands, found, strict=True)), *(None,) * 7


def _gradients_run(*args: Any) -> tuple[Tensor, ...]:
    *operands, skip, initial, state, spans, z, grad, grad_closed, scale, key = args
    # Hooks may give these back with other strides than they were saved with.
    skip, state, spans, z = (t if t is None else t.contiguous() for t in (skip, state, spans, z))
    backend, x = _call(*operands, skip, initial, spans, scale, key)
    *found, of_initial = backend.backward(x, state, grad, grad_closed, **_named(z))
    found += [None if x.skip is None else _of_skip(x, grad), of_initial]
    return tuple(x.q.new_empty(0) if t is None else t for t in found)


def _of_skip(x: Delta, grad: Tensor) -> Tensor:
    """The chain over all tokens of a gradient times a value; +0 for tokens of no sequence."""
    terms = grad.to(torch.float32) * x.v.to(torch.float32)
    if x.spans.shape[1]:
        steps = x.spans.new_zeros(len(terms) + 1)
        for at, step in ((x.spans[:, 0], 1), (x.spans[:, 1], -1)):
            steps.index_add_(0, at, torch.full_like(at, step))
        terms = torch.where(steps[:-1].cumsum(0)[:, None, None] > 0, terms, 0.0)
    total: Tensor = rows_backend(terms).column_sum(terms.flatten(1), torch.float32)
    return total.view(terms.shape[1:])


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    *operands, _, _, _, _, _, _, _ = args
    return tuple(args[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in operands)


_gradients = Operator(
    f"delta_gradients({_OPERANDS}, Tensor? initial, Tensor? state, Tensor spans, Tensor? z,"
    f" Tensor grad, Tensor? grad_closed, float scale, str contract) -> ({', '.join(['Tensor'] * 8)})",
    cpu=_gradients_run,
    fake=_gradients_fake,
)
_operator.register_autograd(_backward, setup_context=_setup_context)


# ---- keys and queries of length 1


def _normalize(x: Tensor) -> Tensor:
    found: Tensor = fused_backend("l2norm", x).l2norm(x, EPS)
    return found


def _normalize_gradient(x: Tensor, grad: Tensor) -> Tensor:
    found: Tensor = fused_backend("l2norm", x).l2norm_backward(x, grad, EPS)
    return found


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
