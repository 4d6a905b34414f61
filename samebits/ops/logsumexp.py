"""``torch.logsumexp``, with the sums of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key
from samebits.ops._checks import check_operands
from samebits.ops._operator import Operator, refuse_third_derivatives
from samebits.ops._rows import as_rows, backend, rounded
from samebits.ops.logp import row_statistics
from samebits.ops.reduce import sum
from samebits.ops.softmax import jacobian_product, softmax


def logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """``out[...] = log(sum over i of exp(x[..., i]))``, as :func:`torch.logsumexp`.

    ``out = R + log S``, in float32, rounded once to the dtype of ``x``. R is the row's maximum, and S its sum
    of exponentials, as in ``docs/contract.md``, "Log-probabilities". A row with +inf and no NaN gives +inf. A
    row of nothing but -inf, or of nothing at all, gives -inf.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: one or several dimensions. Their elements are a row, in row-major order.
        keepdim: keep them, of size 1.

    The gradient is the result's gradient times :func:`samebits.ops.softmax.softmax` of the row in float32,
    with one more rounding to the dtype of ``x``. ``docs/contract.md``, "Second derivatives", has those of it.

    Raises:
        TypeError: ``x`` is not a dense tensor of such a dtype.
        IndexError: there is no such dimension, or it is named twice.
    """
    (x,), key, _ = check_operands("logsumexp", None, {"x": x}, autocast=False)
    rows, shape = as_rows("logsumexp", x, dim, keepdim)
    out: Tensor = _operator(rows, key)
    return out.reshape(shape)


def _forward(x: Tensor, key: Key) -> Tensor:
    if x.shape[1] == 0:
        return x.new_full((x.shape[0],), -torch.inf)
    shift, log_sum = row_statistics(x, key)
    return rounded(torch.where(shift == torch.inf, shift, shift + log_sum), x.dtype)


def _fake(x: Tensor, key: Key) -> Tensor:
    return x.new_empty(x.shape[0])


_operator = Operator("logsumexp(Tensor x, str contract) -> Tensor", cpu=_forward, fake=_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradient(grad, *saved), None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _grad(grad: Tensor, x: Tensor) -> Tensor:
    p = backend(x).softmax(x, False, torch.float32)
    return rounded(grad.to(torch.float32)[:, None] * p, x.dtype)


def _fake_grad(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_gradient = Operator("logsumexp_backward(Tensor grad, Tensor x) -> Tensor", cpu=_grad, fake=_fake_grad)


def _keep_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _second(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor, Tensor]:
    refuse_third_derivatives("logsumexp")
    g, x = (t.to(torch.float32) for t in saved)
    p, v = softmax(x), v.to(torch.float32)
    of_x = jacobian_product(p, g[:, None] * v)
    return rounded(sum(p * v, -1), saved[0].dtype), rounded(of_x, saved[1].dtype)


_gradient.register_autograd(_second, setup_context=_keep_grad)
