"""``samebits.silu_mul_quantize``: a gated activation and its FP8 values in one step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.contract import FP8
from samebits.ops._checks import check_operands, shape
from samebits.ops._operator import reshaped
from samebits.ops._scaled import blocks, check_no_gradients, check_quantized, silu_mul_quantized

_OP = "silu_mul_quantize"


def silu_mul_quantize(
    gate: Tensor, up: Tensor | None = None, *, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """FP8 values of ``silu(gate) * up`` and a float32 scale for every 128 of a row, in one pass.

    It stands between the two products of a gated MLP, and gives the operand of the second one: what other
    libraries call ``silu_and_mul`` with a quantization by groups. ``silu(a) = a / (1 + exp(-a))`` and the
    product are computed in float32, and both are rounded to the operands' dtype, as two functions of
    PyTorch's would round them. Then the product is quantized as :func:`samebits.quantize` does it. In 16 bits
    the result has the bits of ``samebits.quantize(torch.nn.functional.silu(gate) * up)``.

    Args:
        gate: ``[..., K]``; bfloat16, float16 or float32. Without `up`: ``[..., 2 K]``, the gate's half first,
            as the product with both matrices leaves it.
        up: of the shape, dtype and device of `gate`.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The values, ``[..., K]``, and the scales, ``[..., ceil(K / 128)]``.

    Raises:
        TypeError: an operand is not a dense bfloat16, float16 or float32 tensor, dtypes differ, or `dtype` is
            not one of the two.
        ValueError: shapes or devices do not match, there is no `up` and an odd size, or an operand requires a
            gradient, which FP8 values do not have.
    """
    if up is None:
        check_operands(_OP, None, {"gate": gate}, autocast=False)
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"samebits.{_OP}: gate: expected [..., 2 K] without up, with a half for each, got shape"
                f" {shape(gate)}"
            )
        gate, up = gate.chunk(2, -1)
    check_operands(_OP, None, {"gate": gate, "up": up}, autocast=False)
    check_quantized(_OP, dtype)
    if gate.ndim == 0 or gate.shape != up.shape:
        raise ValueError(
            f"samebits.{_OP}: gate, up: expected [..., K] of one shape, got {shape(gate)} and {shape(up)}"
        )
    check_no_gradients(_OP, {"gate": gate, "up": up})
    key = pack_key(FP8.key, chosen_backend(gate.device.type))
    rows, k = math.prod(gate.shape[:-1]), gate.shape[-1]
    values, scale = silu_mul_quantized(gate.reshape(rows, k), up.reshape(rows, k), dtype, key)
    return reshaped(values, gate.shape), reshaped(scale, (*gate.shape[:-1], blocks(k)))
