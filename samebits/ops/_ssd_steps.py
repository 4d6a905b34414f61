"""The operator for what Mamba 2 needs of its steps, for every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import module_for
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend as rows_backend
from samebits.ops._rows import rounded
from samebits.ops.activation import activation

_F32 = torch.float32


def _run(dt: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = module_for("ssd_steps", dt)[0].ssd_steps(dt, *given)
    return found


def _fake(
    dt: Tensor, bias: Tensor | None, a: Tensor, d: Tensor | None, size: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    new = dt.new_empty
    of_d = (0,) if d is None else (dt.shape[1], size)
    return new(dt.shape, dtype=_F32), new(dt.shape, dtype=_F32), new(of_d, dtype=_F32)


_TENSORS = "Tensor dt, Tensor? bias, Tensor a, Tensor? d"
_OPTIONS = "bool softplus, float lowest, float highest"
ssd_steps = Operator(
    f"ssd_steps({_TENSORS}, SymInt size, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", cpu=_run, fake=_fake
)
"""Of ``dt[tokens, heads]`` and float32 ``a[heads]``: steps, steps times `a`, and `d` for each column."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.softplus, ctx.lowest, ctx.highest = inputs
    ctx.save_for_backward(*tensors, output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
    refuse_second_derivatives("ssd")
    found = _gradients(*saved, *grads, ctx.softplus, ctx.lowest, ctx.highest)
    return *(None if of is None else t for of, t in zip(saved[:4], found, strict=True)), *(None,) * 4


def _run_gradients(
    dt: Tensor,
    bias: Tensor | None,
    a: Tensor,
    d: Tensor | None,
    steps: Tensor,
    of_steps: Tensor | None,
    of_decays: Tensor | None,
    of_skip: Tensor | None,
    softplus: bool,
    lowest: float,
    highest: float,
) -> tuple[Tensor, ...]:
    rows, none = rows_backend(steps), steps.new_empty(0)
    of_steps = torch.zeros_like(steps) if of_steps is None else of_steps
    of_a = torch.zeros_like(a)
    if of_decays is not None:
        of_steps = of_steps + of_decays * a
        of_a = rows.column_sum(steps * of_decays, a.dtype).view(a.shape)
    raw = dt.to(_F32) if bias is None else dt.to(_F32) + bias.to(_F32)
    unbounded = activation(raw, "softplus") if softplus else raw
    of_raw = of_steps * activation(raw, "sigmoid") if softplus else of_steps
    of_raw = torch.where((unbounded >= lowest) & (unbounded <= highest), of_raw, 0.0)
    of_bias = none if bias is None else rows.column_sum(of_raw, bias.dtype).view(bias.shape)
    of_d = none.clone()
    if d is not None:
        if of_skip is None:
            of_d = torch.zeros_like(d)
        else:
            of_d = rounded(of_skip, d.dtype) if d.ndim == 2 else rows.row_sum(of_skip, False, d.dtype)
    return rounded(of_raw, dt.dtype), of_bias, of_a, of_d.view(none.shape if d is None else d.shape)


def _fake_gradients(
    dt: Tensor, bias: Tensor | None, a: Tensor, d: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(dt.new_empty(0, dtype=_F32) if t is None else t.new_empty(t.shape) for t in (dt, bias, a, d))


_gradients = Operator(
    f"ssd_steps_gradients({_TENSORS}, Tensor steps, Tensor? of_steps, Tensor? of_decays, Tensor? of_skip,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_run_gradients,
    fake=_fake_gradients,
)
ssd_steps.register_autograd(_backward, setup_context=_setup_context)
