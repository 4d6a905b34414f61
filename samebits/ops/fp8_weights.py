"""Linear layers whose weights are FP8 already, as checkpoints have them: frozen values and their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, chosen_backend, pack_key
from samebits.contract import FP8
from samebits.ops._checks import SUPPORTED, check_device, check_operands, shape
from samebits.ops._operator import Operator
from samebits.ops._scaled import blocks, check_dense, check_fp8, checked_bias, checked_scale
from samebits.ops.fp8_grouped import grouped_by_values
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
        scale: of blocks of 128 x 128, ``[ceil(N / 128), ceil(K / 128)]``, float32, 16 bits or
            ``float8_e8m0fnu``.
        bias: ``[N]``; bfloat16, float16 or float32.
    """
    scale = _checked(op, x, weight, scale, 2)
    bias = checked_bias(op, bias, (len(weight),), "input", x)
    key = pack_key(FP8.key, chosen_backend(x.device.type))
    out: Tensor = _frozen(x, weight, scale, bias, key)
    return out


def linear_of_groups(op: str, x: Tensor, ends: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Rows of ``x[rows, K]`` times the weights ``[groups, N, K]`` of their groups, as `linear_of_values`.

    Groups are those of :func:`samebits.scaled_grouped_mm` with ``ends[groups]``. Nothing waits for them.

    Args:
        op, x, weight, scale: as of :func:`linear_of_values`; weight and scale have a matrix for each group.
        ends: int32, of a layer of experts.
    """
    scale = _checked(op, x, weight, scale, 3)
    out: Tensor = _frozen_groups(x, weight, scale, ends, pack_key(FP8.key, chosen_backend(x.device.type)))
    return out


def _checked(op: str, x: Tensor, weight: Tensor, scale: Tensor, rank: int) -> Tensor:
    """The scale in float32, if the operands suit a weight of this rank."""
    check_operands(op, None, {"input": x}, autocast=False)
    check_fp8(op, "weight", weight, (rank,))
    *groups, rows, columns = weight.shape
    if x.ndim == 0 or x.shape[-1] != columns:
        raise ValueError(f"samebits.{op}: input: expected shape (..., {columns}), got {shape(x)}")
    if weight.numel() == 0:
        raise ValueError(f"samebits.{op}: weight: expected features in FP8, got shape {shape(weight)}")
    check_device(op, "weight", weight, "input", x)
    # Checkpoints have scales in 16 bits, too. float32 holds them exactly.
    wanted = "bfloat16, float16, float32 or float8_e8m0fnu"
    check_dense(op, "weight_scale_inv", scale, (*SUPPORTED, torch.float8_e8m0fnu), wanted)
    shapes = [(*groups, blocks(rows), blocks(columns))]
    return checked_scale(op, "weight_scale_inv", scale.to(torch.float32), shapes, "input", x)


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


def _forward_groups(x: Tensor, weight: Tensor, scale: Tensor, offs: Tensor, key: Key) -> Tensor:
    return grouped_by_values(x, weight, scale, offs, x.dtype, key)


def _fake_groups(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((len(x), weight.shape[1]))


_frozen_groups = Operator(
    "fp8_grouped_weights(Tensor x, Tensor weight, Tensor scale, Tensor offs, str contract) -> Tensor",
    cpu=_forward_groups,
    fake=_fake_groups,
)


def _setup_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, scale, offs, ctx.key = inputs
    ctx.save_for_backward(weight, scale, offs)


def _backward_groups(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, scale, offs = saved
    grad_x = grouped_by_values(grad, weight.mT, scale.mT, offs, grad.dtype, ctx.key)
    return grad_x, None, None, None, None


_frozen_groups.register_autograd(_backward_groups, setup_context=_setup_groups)
