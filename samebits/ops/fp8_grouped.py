"""Grouped products in block-scaled FP8, whose weight gradients are in 16 bits: the experts of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, pack_key, unpack_key
from samebits.contract import FP8, Contract
from samebits.ops._checks import check_operands, shape
from samebits.ops._grouped import rows_gradients
from samebits.ops._operator import Operator
from samebits.ops._scaled import quantized, quantized_matrices, scaled_grouped_product

__all__ = ["fp8_grouped_linear", "grouped_by_values"]


def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    sequences: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """``x[t] @ weight[g].T`` for the rows t of each group g, by :func:`samebits.scaled_grouped_mm`.

    ``x[T, K]`` is quantized to e4m3 in groups of 1 x 128, ``weight[G, N, K]`` in blocks of 128 x 128
    (:func:`samebits.quantize`). The gradient of ``x`` is the same product of the output's gradient, in groups
    of 1 x 128 along output features, with the same values of ``weight``. The gradient of ``weight`` is that
    of :func:`samebits.grouped_mm` under `contract`, from ``x`` and the gradient themselves.

    Args:
        x, weight: bfloat16, float16 or float32, of one dtype.
        offs, sequences: as of :func:`samebits.grouped_mm`, for which a layer of experts has made them.

    Raises:
        TypeError: as :func:`samebits.grouped_mm`.
        ValueError: shapes or devices do not match, or the weight is empty.
    """
    (x, weight), key, _ = check_operands("experts in FP8", contract, {"x": x, "weight": weight})
    if weight.ndim != 3 or x.ndim != 2 or x.shape[1] != weight.shape[2] or weight.numel() == 0:
        raise ValueError(
            "samebits.experts in FP8: x, weight: expected [T, K] and [G, N, K] that is not empty, got shapes"
            f" {shape(x)} and {shape(weight)}"
        )
    out: Tensor = _linear(x, weight, offs, sequences, key)
    return out


def grouped_by_values(
    x: Tensor, weight: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype, key: Key
) -> Tensor:
    """``x[T, K]`` times the FP8 values ``weight[G, N, K]``, with float32 scales. `key` is that of ``FP8``."""
    values, of_rows = quantized(x, 1, torch.float8_e4m3fn, key)
    return scaled_grouped_product(  # type: ignore[no-any-return]
        values, weight, of_rows, scale, offs, None, dtype, key
    )


def _product(
    x: Tensor, weight: Tensor, offs: Tensor, dtype: torch.dtype, key: Key, *, transposed: bool = False
) -> Tensor:
    fp8 = pack_key(FP8.key, unpack_key(key)[1])
    values, scale = quantized_matrices(weight.detach(), fp8)
    if transposed:
        values, scale = values.mT, scale.mT
    return grouped_by_values(x, values, scale, offs, dtype, fp8)


def _forward(x: Tensor, weight: Tensor, offs: Tensor, sequences: Tensor | None, key: Key) -> Tensor:
    return _product(x, weight, offs, x.dtype, key)


_linear = Operator(
    "fp8_grouped_linear(Tensor x, Tensor weight, Tensor offs, Tensor? sequences, str contract) -> Tensor",
    cpu=_forward,
    fake=lambda x, weight, *_: x.new_empty((len(x), weight.shape[1])),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offs, sequences, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None, offs, sequences)
    ctx.dtype = x.dtype


def _backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offs, sequences = saved
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = _product(grad, weight, offs, ctx.dtype, ctx.key, transposed=True)
    if x is not None:
        given = offs, sequences, ctx.dtype, None, True, ctx.key
        _, of_weight, _ = rows_gradients(grad, x, None, *given)
        grad_weight = None if of_weight is None else of_weight.mT
    return grad_x, grad_weight, None, None, None


_linear.register_autograd(_backward, setup_context=_setup_context)
