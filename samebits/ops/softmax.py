"""Softmax and its logarithm: ``torch.softmax`` and ``torch.log_softmax``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends.replay import viewed
from samebits.ops._operator import Operator, refuse_third_derivatives
from samebits.ops._rows import backend, check_rows, rounded, row_dim
from samebits.ops.reduce import sum


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``out[..., v] = exp(x[..., v] - R) / S``, as :func:`torch.softmax`.

    R is the row's maximum, and S its sum of exponentials, as in ``docs/contract.md``, "Log-probabilities":
    blocks of 128, all in float32, with one rounding to the dtype of ``x`` at the end. Entries of -inf at the
    end of a row change no bit of the others.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: the dimension that rows run along.

    The gradient is ``p * (grad - sum of p * grad)``, with p the rounded result (see ``docs/contract.md``,
    "Row reductions"). "Second derivatives" there has those of it.

    Raises:
        TypeError: ``x`` is not a dense tensor of such a dtype.
        IndexError: there is no such dimension.
    """
    return _checked("softmax", x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``out[..., v] = (x[..., v] - R) - log S``, as :func:`torch.log_softmax`; R and S as in :func:`softmax`.

    For float32 rows it has the bits of :func:`samebits.logp`. The gradient is
    ``grad - exp(y) * sum of grad``, with y the rounded result.
    """
    return _checked("log_softmax", x, dim)


def _checked(op: str, x: Tensor, dim: int) -> Tensor:
    bypass = check_rows(op, x)
    if x.ndim == 0:
        return _checked(op, x[None], dim)[0]
    dim = row_dim(op, x, dim)
    moved = x if dim == -1 else viewed(x, Tensor.movedim, dim, -1)
    rows = (
        moved
        if x.ndim == 2
        else viewed(moved, Tensor.reshape, (math.prod(moved.shape[:-1]), moved.shape[-1]))
    )
    out: Tensor = _operator(rows, op == "log_softmax", bypass=bypass)
    out = out if x.ndim == 2 else viewed(out, Tensor.reshape, moved.shape)
    return out if dim == -1 else viewed(out, Tensor.movedim, -1, dim)


def _forward(x: Tensor, logarithm: bool) -> Tensor:
    return backend(x).softmax(x, logarithm, x.dtype)  # type: ignore[no-any-return]


def _grad(grad: Tensor, out: Tensor, logarithm: bool) -> Tensor:
    return backend(out).softmax_backward(grad, out, logarithm, out.dtype)  # type: ignore[no-any-return]


def _fake(x: Tensor, logarithm: bool) -> Tensor:
    return x.new_empty(x.shape)


_operator = Operator("softmax(Tensor x, bool logarithm) -> Tensor", cpu=_forward, fake=_fake)


def _fake_grad(grad: Tensor, out: Tensor, logarithm: bool) -> Tensor:
    return out.new_empty(out.shape)


_gradient = Operator(
    "softmax_backward(Tensor grad, Tensor out, bool logarithm) -> Tensor", cpu=_grad, fake=_fake_grad
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.logarithm = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    (out,) = saved
    return _gradient(grad, out, ctx.logarithm), None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _keep_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, out, ctx.logarithm = inputs
    ctx.save_for_backward(grad, out)


def _second(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor | None, ...]:
    refuse_third_derivatives("softmax")
    g, out = (t.to(torch.float32) for t in saved)
    v = v.to(torch.float32)
    if ctx.logarithm:
        p = softmax(out)
        of_grad, of_out = v - sum(p * v, -1, True), -(p * (v * sum(g, -1, True)))
    else:
        of_grad = jacobian_product(out, v)
        of_out = v * (g - _total(out, g)) - g * _total(out, v)
    return rounded(of_grad, saved[0].dtype), rounded(of_out, saved[1].dtype), None


def jacobian_product(p: Tensor, v: Tensor) -> Tensor:
    """``p * (v - sum of p * v)`` of rows in float32: the gradient of :func:`softmax`, whose result is `p`."""
    out: Tensor = _gradient(v, p, False)
    return out


def _total(p: Tensor, t: Tensor) -> Tensor:
    """Sums of ``p * t``, where entries with p = 0 count as +0."""
    return sum((p * t).masked_fill(p == 0, 0.0), -1, True)


_gradient.register_autograd(_second, setup_context=_keep_grad)
