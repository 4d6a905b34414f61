"""Variances, standard deviations and 2-norms: ``torch.var``, ``std`` and ``linalg.vector_norm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import on_gpu
from samebits.backends.replay import viewed
from samebits.ops._checks import check_operands
from samebits.ops._operator import Operator, refuse_third_derivatives
from samebits.ops._rows import as_rows, backend, rounded
from samebits.ops.reduce import mean, sum

Dims = int | Sequence[int] | None


def var(x: Tensor, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    """``out[...] = sum over i of d[i]**2 / max(0, n - correction)``, as :func:`torch.var`.

    ``d[i] = x[..., i] - mean``, with the mean as in :func:`samebits.ops.reduce.mean`. Sums are rows of
    ``docs/contract.md``, "Row reductions". Everything is computed in float32, with one rounding to the dtype
    of ``x`` at the end.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: one or several dimensions; all of them by default.
        correction: subtracted from the number of elements.
        keepdim: keep the dimensions, of size 1.

    The gradient is ``d[i] * (grad * 2 / max(0, n - correction))``, rounded once more. ``docs/contract.md``,
    "Second derivatives", has those of it.

    Raises:
        TypeError: ``x`` is not a dense tensor of such a dtype.
        IndexError: there is no such dimension, or it is named twice.
    """
    return _moment("var", x, dim, correction, keepdim)


def std(x: Tensor, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    """The float32 square root of :func:`var`'s unrounded result, rounded once, as :func:`torch.std`.

    The gradient is ``d[i] * (grad / (out * max(0, n - correction)))``, +0 where ``out`` is 0.
    """
    return _moment("std", x, dim, correction, keepdim)


def vector_norm(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """``out[...] = sqrt(sum over i of x[..., i]**2)``, as :func:`torch.linalg.vector_norm` of order 2.

    Everything is computed in float32, with one rounding to the dtype of ``x`` at the end. The gradient is
    ``x[i] * (grad / out)``, +0 where ``out`` is 0. All else is as in :func:`var`.
    """
    return _moment("vector_norm", x, dim, 0, keepdim)


def _moment(op: str, x: Tensor, dim: Dims, correction: float, keepdim: bool) -> Tensor:
    (x,), _, _ = check_operands(op, None, {"x": x}, autocast=False)
    rows, shape = as_rows(op, x, dim, keepdim)
    if op == "vector_norm":
        out: Tensor = _norm(rows)
        return out if len(shape) == 1 else viewed(out, Tensor.reshape, shape)
    out = _deviation(rows, float(correction), op == "std")[0]
    return out.reshape(shape)


def _filled(like: Tensor, value: float) -> Tensor:
    """`value` as a tensor to divide by. PyTorch on a GPU multiplies by the inverse of a number."""
    return torch.full_like(like, value)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded float32 square root, computed in float64. PyTorch's is not on every CPU."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def _forward_deviation(x: Tensor, correction: float, root: bool) -> tuple[Tensor, Tensor]:
    wide, n = x.to(torch.float32), x.shape[1]
    means = backend(x).row_sum(wide, True, torch.float32)
    d = wide - means[:, None]
    total = backend(x).row_sum(d * d, False, torch.float32)
    variance = total / _filled(total, max(0.0, n - correction))
    return rounded(_root(variance) if root else variance, x.dtype), means


def _forward_norm(x: Tensor) -> Tensor:
    return backend(x).row_norm(x, x.dtype)  # type: ignore[no-any-return]


_norm = Operator("vector_norm(Tensor x) -> Tensor", cpu=_forward_norm, fake=lambda x: x.new_empty(x.shape[0]))


def _grad_deviation(grad: Tensor, x: Tensor, out: Tensor | None, means: Tensor, correction: float) -> Tensor:
    g, count = grad.to(torch.float32), max(0.0, x.shape[1] - correction)
    if out is not None:
        factor = (g / (out.to(torch.float32) * count)).masked_fill(out == 0, 0)
    else:
        factor = g * 2 / _filled(g, count)
    return rounded((x.to(torch.float32) - means[:, None]) * factor[:, None], x.dtype)


_deviation_gradient = Operator(
    "deviation_backward(Tensor grad, Tensor x, Tensor? out, Tensor means, float correction) -> Tensor",
    cpu=_grad_deviation,
    fake=lambda grad, x, *_: x.new_empty(x.shape),
)


def _grad_norm(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    factor = (grad.to(torch.float32) / out.to(torch.float32)).masked_fill(out == 0, 0)
    return rounded(x.to(torch.float32) * factor[:, None], x.dtype)


def _grad_norm_cuda(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return on_gpu("vector_norm", "", x.get_device())[0].backward(grad, x, out)  # type: ignore[no-any-return]


_norm_gradient = Operator(
    "vector_norm_backward(Tensor grad, Tensor x, Tensor out) -> Tensor",
    cpu=_grad_norm,
    cuda=_grad_norm_cuda,
    fake=lambda grad, x, out: x.new_empty(x.shape),
)


def _fake_deviation(x: Tensor, correction: float, root: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0]), x.new_empty(x.shape[0], dtype=torch.float32)


_deviation = Operator(
    "deviation(Tensor x, float correction, bool root) -> (Tensor, Tensor)",
    cpu=_forward_deviation,
    fake=_fake_deviation,
)


def _keep_deviation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.correction, ctx.root = inputs
    ctx.save_for_backward(x, output[0] if ctx.root else None, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_deviation(
    ctx: Any, saved: tuple[Tensor, ...], grad: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:
    return _deviation_gradient(grad, *saved, ctx.correction), None, None


_deviation.register_autograd(_backward_deviation, setup_context=_keep_deviation)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward_norm(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    return _norm_gradient(grad, *saved)  # type: ignore[no-any-return]


_norm.register_autograd(_backward_norm, setup_context=_keep_norm)


def _keep_deviation_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.correction = inputs
    ctx.save_for_backward(*tensors)


def _second_deviation(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Any, ...]:
    grad, x, out, means = saved
    refuse_third_derivatives("var" if out is None else "std")
    g, v, count = grad.to(torch.float32), v.to(torch.float32), max(0.0, x.shape[1] - ctx.correction)
    total, of_out = sum((x.to(torch.float32) - means[:, None]) * v, -1), None
    if out is None:
        factor, of_grad = g * 2 / _filled(g, count), total * 2 / _filled(g, count)
    else:
        y = out.to(torch.float32)
        factor, of_grad = ((t / (y * count)).masked_fill(y == 0, 0) for t in (g, total))
        of_out = rounded((-(total * factor) / y).masked_fill(y == 0, 0), out.dtype)
    of_x = (v - mean(v, -1, True)) * factor[:, None]
    return rounded(of_grad, grad.dtype), rounded(of_x, x.dtype), of_out, None, None


_deviation_gradient.register_autograd(_second_deviation, setup_context=_keep_deviation_gradient)


def _keep_norm_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _second_norm(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor, ...]:
    refuse_third_derivatives("vector_norm")
    g, x, y = (t.to(torch.float32) for t in saved)
    v = v.to(torch.float32)
    factor, share = ((t / y).masked_fill(y == 0, 0) for t in (g, sum(x * v, -1)))
    of_out = (-(share * g) / y).masked_fill(y == 0, 0)
    found = share, v * factor[:, None], of_out
    return tuple(rounded(t, of.dtype) for t, of in zip(found, saved, strict=True))


_norm_gradient.register_autograd(_second_norm, setup_context=_keep_norm_gradient)
