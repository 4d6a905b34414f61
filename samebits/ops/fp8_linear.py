"""A linear layer's product in block-scaled FP8, whose weight gradient is in 16 bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, pack_key, unpack_key
from samebits.contract import FP8, SCALE_BLOCK, Contract
from samebits.ops import _products
from samebits.ops._operator import Operator
from samebits.ops._scaled import quantized, scaled_product
from samebits.ops._sequences import check_offsets
from samebits.ops.linear import checked

_E4M3 = torch.float8_e4m3fn


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """``y = x @ weight.T + bias`` by :func:`samebits.scaled_mm`, with arguments as :func:`samebits.linear`.

    ``x`` is quantized to e4m3 in groups of 1 x 128, ``weight`` in blocks of 128 x 128
    (:func:`samebits.quantize`). The gradient of ``x`` is the same product of the output's gradient, in groups
    of 1 x 128 along output features, with the same values of ``weight``. The gradients of ``weight`` and
    ``bias`` are those of :func:`samebits.linear` under `contract`, from ``x`` and the gradient themselves.

    Raises:
        TypeError: as :func:`samebits.linear`.
        ValueError: as there; or the weight is empty, or the contract has segments.
    """
    x, weight, bias, key, _ = checked(x, weight, bias, cu_seqlens, contract)
    if contract is not None and contract.segments != 1:
        raise ValueError(f"samebits.nn.Linear: contract: expected no segments in FP8, got {contract}")
    if weight.numel() == 0:
        raise ValueError(f"samebits.nn.Linear: weight: expected features in FP8, got {tuple(weight.shape)}")
    out: Tensor = _linear(x, weight, bias, cu_seqlens, key)
    return out


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, key: Key, *, transposed: bool = False
) -> Tensor:
    """``x @ weight.T + bias`` in FP8, of ``x[..., K]``; `transposed`: ``x @ weight``."""
    fp8 = pack_key(FP8.key, unpack_key(key)[1])
    of_weight, scale = quantized(weight, SCALE_BLOCK, _E4M3, fp8)
    if transposed:
        of_weight, scale = of_weight.mT, scale.mT
    return by_values(x, of_weight, scale, bias, dtype, fp8)


def by_values(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, key: Key
) -> Tensor:
    """As :func:`product`, of a weight's FP8 values and float32 scales. `key` is that of ``FP8``."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, of_rows = quantized(rows, 1, _E4M3, key)
    out = scaled_product(values, weight, of_rows, scale, bias, dtype, key)
    return out.reshape(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def _run_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, key: Key
) -> Tensor:
    if cu_seqlens is not None:
        check_offsets("linear", cu_seqlens, x.shape[-2], key)
    return product(x, weight, bias, x.dtype, key)


_linear = Operator(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, str contract) -> Tensor",
    cpu=_run_linear,
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


def _linear_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens = saved
    grad_x = None
    if weight is not None:
        grad_x = product(grad, weight, None, weight.dtype, ctx.key, transposed=True)
    rest = _products._linear_gradients(
        grad, x, None, cu_seqlens, ctx.bias_dtype, ctx.needs_input_grad[2], ctx.key
    )
    return grad_x, *rest[1:], None, None


_linear.register_autograd(_linear_backward, setup_context=_products._linear_setup_context)
