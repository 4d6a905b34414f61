"""Layer norm and RMS norm: ``F.layer_norm`` and ``F.rms_norm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends.replay import viewed
from samebits.ops._checks import shape
from samebits.ops._operator import Operator, refuse_third_derivatives
from samebits.ops._rows import backend, check_rows, rounded
from samebits.ops.reduce import mean


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``y[..., i] = (x[i] - mean) * r * weight[i] + bias[i]``, as :func:`torch.nn.functional.layer_norm`.

    ``r = 1 / sqrt(sum over i of (x[i] - mean)**2 / n + eps)``. Both sums are rows of ``docs/contract.md``,
    "Row reductions". Everything is computed in float32, with one rounding to the dtype of ``x`` at the end.

    Args:
        x: ``[..., *normalized_shape]``; bfloat16, float16 or float32, any strides.
        normalized_shape: the last dimensions, a row in row-major order.
        weight, bias: of that shape, any of these dtypes.
        eps: added to the variance, as a float32.

    Gradients: that of ``x`` is computed for each row by itself. Those of ``weight`` and ``bias`` are chains
    over all rows, in order, with a float32 accumulator, so rows with zero gradients change nothing.
    ``docs/contract.md``, "Second derivatives", has those of it.

    Raises:
        TypeError: a tensor is not dense or of another dtype.
        ValueError: shapes or devices do not match.
    """
    return _norm("layer_norm", x, normalized_shape, weight, bias, eps, True)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``y[..., i] = x[i] * r * weight[i]``, as :func:`torch.nn.functional.rms_norm`.

    ``r = 1 / sqrt(sum over i of x[i]**2 / n + eps)``. The default of ``eps`` is that of float32, in which
    PyTorch computes. All else is as in :func:`layer_norm`.
    """
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _norm("rms_norm", x, normalized_shape, weight, None, eps, False)


def _norm(
    op: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> Tensor:
    bypass = check_rows(op, x, weight=weight, bias=bias)
    wanted = torch.Size(normalized_shape)
    if len(wanted) == 0 or x.shape[-len(wanted) :] != wanted:
        raise ValueError(
            f"samebits.{op}: x: expected a shape that ends in normalized_shape {tuple(wanted)},"
            f" got {shape(x)}"
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != wanted:
            raise ValueError(f"samebits.{op}: {name}: expected shape {tuple(wanted)}, got {shape(t)}")
    rows = x
    if x.ndim != 2 or len(wanted) != 1 or not wanted.numel():
        rows = viewed(x, Tensor.reshape, (-1, wanted.numel()) if wanted.numel() else (0, 0))
    if len(wanted) > 1:
        weight, bias = (None if t is None else viewed(t, Tensor.reshape, -1) for t in (weight, bias))
    out: Any = _operator(rows, weight, bias, float(eps), centred, bypass=bypass)
    y: Tensor = out[0]
    return y if rows is x else viewed(y, Tensor.reshape, x.shape)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return backend(x).norm(x, weight, bias, eps, centred)  # type: ignore[no-any-return]


def _grad(grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor) -> Tensor:
    return backend(x).norm_backward(grad, x, weight, means, scales)  # type: ignore[no-any-return]


def _columns(
    grad: Tensor, x: Tensor, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return backend(x).norm_columns(grad, x, means, scales, dtype)  # type: ignore[no-any-return]


def _all(
    grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return backend(x).norm_gradients(grad, x, weight, means, scales, dtype)  # type: ignore[no-any-return]


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, ...]:
    rows = x.shape[0]
    return (
        x.new_empty(x.shape),
        x.new_empty(rows if centred else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


_operator = Operator(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor, Tensor)",
    cpu=_forward,
    fake=_fake,
)


def _fake_grad(grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_gradient = Operator(
    "norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor means, Tensor scales) -> Tensor",
    cpu=_grad,
    fake=_fake_grad,
)


def _fake_columns(
    grad: Tensor, x: Tensor, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


_column_gradients = Operator(
    "norm_columns(Tensor grad, Tensor x, Tensor means, Tensor scales, ScalarType dtype) -> (Tensor, Tensor)",
    cpu=_columns,
    fake=_fake_columns,
)


def _fake_all(
    grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_fake_columns(grad, x, means, scales, dtype)


_gradients = Operator(
    "norm_gradients(Tensor grad, Tensor x, Tensor? weight, Tensor means, Tensor scales, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_all,
    fake=_fake_all,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, means, scales = saved
    needed = ctx.needs_input_grad
    dtypes = {ctx.dtypes[i] for i in (0, 1) if needed[1 + i]}
    if needed[0] and len(dtypes) == 1 and not torch.is_grad_enabled():
        (dtype,) = dtypes
        dx, *of_vectors = _gradients(grad, x, weight, means, scales, dtype)
        columns = {dtype: of_vectors}
    else:
        dx = _gradient(grad, x, weight, means, scales) if needed[0] else None
        columns = {dtype: _column_gradients(grad, x, means, scales, dtype) for dtype in dtypes}
    grads = (columns[ctx.dtypes[i]][i] if needed[1 + i] else None for i in (0, 1))
    return dx, *grads, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _normalised(x: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    d = x.to(torch.float32)
    return (d - means[:, None] if means.numel() else d) * scales[:, None]


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _second(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor | None, ...]:
    """Of ``N(h) = r * (h - m - y * c)`` with h = grad * weight. N is symmetric: ``N(v)`` is that of h."""
    refuse_third_derivatives("norm")
    grad, x, weight, means, scales = saved
    wide, g, v = (t.to(torch.float32) for t in (x, grad, v))
    y, r = _normalised(x, means, scales), scales[:, None]
    w = None if weight is None else weight.to(torch.float32)
    h = g if w is None else g * w
    of_h, first = (_gradient(t, wide, None, means, scales) for t in (v, h))
    q = -(r * (v * mean(h * y, -1, True) + h * mean(v * y, -1, True)))
    of_x = _gradient(q, wide, None, means, scales) - y * (r * mean(v * first, -1, True))
    of_weight = None if weight is None else backend(x).column_sum(g * of_h, weight.dtype)
    of_grad = of_h if w is None else of_h * w
    return rounded(of_grad, grad.dtype), rounded(of_x, x.dtype), of_weight, None, None


_gradient.register_autograd(_second, setup_context=_keep_gradient)


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4])


def _second_columns(
    ctx: Any, saved: tuple[Tensor, ...], of_weight: Tensor, of_bias: Tensor
) -> tuple[Tensor | None, ...]:
    refuse_third_derivatives("norm")
    grad, x, means, scales = saved
    a, b = of_weight.to(torch.float32), of_bias.to(torch.float32)
    of_grad = _normalised(x, means, scales) * a + b
    of_x = _gradient(grad.to(torch.float32) * a, x.to(torch.float32), None, means, scales)
    return rounded(of_grad, grad.dtype), rounded(of_x, x.dtype), None, None, None


_column_gradients.register_autograd(_second_columns, setup_context=_keep_columns)
