"""Linear layers whose weights are FP8 already, as checkpoints have them: frozen values and their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, chosen_backend, pack_key
from samebits.contract import FP8
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._operator import Operator
from samebits.ops._scaled import blocks
from samebits.ops.fp8_linear import by_values

__all__ = ["linear_of_groups", "linear_of_values"]


def linear_of_values(op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., K] @ (weight[N, K] times scale).T + bias``, in the dtype of `x`.

    `x` is quantized to e4m3 in groups of 1 x 128 (:func:`samebits.quantize`). Its gradient is the same
    product of the output's gradient with the transposed weight, as in
    :func:`samebits.ops.fp8_linear.fp8_linear`. Weight, scale and bias are frozen: they get none.

    Args:
        op: what errors name.
        x: bfloat16, float16 or float32.
        weight: e4m3 or e5m2.
        scale: of blocks of 128 x 128, ``[ceil(N / 128), ceil(K / 128)]``, float32 or ``float8_e8m0fnu``.
        bias: ``[N]``.
    """
    check_operands(op, None, {"input": x}, autocast=False)
    if weight.dtype not in FP8.input_dtypes:
        raise TypeError(f"samebits.{op}: weight: expected float8_e4m3fn or float8_e5m2, got {weight.dtype}")
    rows, columns = weight.shape
    if x.ndim == 0 or x.shape[-1] != columns:
        raise ValueError(f"samebits.{op}: input: expected shape (..., {columns}), got {shape(x)}")
    if scale.shape != (blocks(rows), blocks(columns)):
        raise ValueError(
            f"samebits.{op}: weight_scale_inv: expected shape {(blocks(rows), blocks(columns))}, a scale for"
            f" each 128 x 128 of the weight {shape(weight)}, got {shape(scale)}"
        )
    for name, t in (("weight", weight), ("weight_scale_inv", scale)):
        check_device(op, name, t, "input", x)
    key = pack_key(FP8.key, chosen_backend(x.device.type))
    out: Tensor = _frozen(x, weight, scale.to(torch.float32), bias, key)
    return out


def linear_of_groups(op: str, x: Tensor, ends: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows of ``x[rows, K]`` times the weights ``[groups, N, K]`` of their groups, as `linear_of_values`.

    ``ends[groups]`` says where the rows of each group end. Those after the last one are of no group: +0.
    """
    stops = ends.tolist()
    counts = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    # `split` has a gradient without a sum: adding zeros would turn -0 into +0.
    *parts, rest = x.split([*counts, len(x) - stops[-1]])
    found = [linear_of_values(op, part, w, s) for part, w, s in zip(parts, weight, scale, strict=True)]
    return torch.cat([*found, rest.new_zeros(len(rest), weight.shape[1])])


def _forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: Key) -> Tensor:
    return by_values(x, weight, scale, bias, x.dtype, key)


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, key: Key) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_frozen = Operator(
    "fp8_weights(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str contract) -> Tensor",
    cpu=_forward,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, scale, _, ctx.key = inputs
    ctx.save_for_backward(weight, scale)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale = saved
    grad_x = by_values(grad, weight.mT, scale.mT, None, grad.dtype, ctx.key)
    return grad_x, None, None, None, None


_frozen.register_autograd(_backward, setup_context=_setup_context)
