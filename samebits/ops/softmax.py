"""Softmax and its logarithm: ``torch.softmax`` and ``torch.log_softmax``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from samebits.backends.replay import viewed
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend, check_rows, row_dim


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``out[..., v] = exp(x[..., v] - R) / S``, as :func:`torch.softmax`.

    R is the row's maximum, and S its sum of exponentials, as in ``docs/contract.md``, "Log-probabilities":
    blocks of 128, all in float32, with one rounding to the dtype of ``x`` at the end. Entries of -inf at the
    end of a row change no bit of the others.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: the dimension that rows run along.

    The gradient is ``p * (grad - sum of p * grad)``, with p the rounded result (see ``docs/contract.md``,
    "Row reductions"). Second derivatives are not implemented.

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
    refuse_second_derivatives("softmax")
    (out,) = saved
    return _gradient(grad, out, ctx.logarithm), None


_operator.register_autograd(_backward, setup_context=_setup_context)
