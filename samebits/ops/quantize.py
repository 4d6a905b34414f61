"""``samebits.quantize``: FP8 values and the scale of each block, from that block alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.contract import FP8, SCALE_BLOCK
from samebits.ops._checks import check_operands, shape
from samebits.ops._operator import reshaped
from samebits.ops._scaled import blocks, check_quantized, quantized, quantized_matrices


def quantize(
    x: Tensor, *, block: int | tuple[int, int] = SCALE_BLOCK, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """FP8 values of `x`, and a float32 scale for each block: ``x`` is about ``values * scale``.

    A block is 128 consecutive elements of a row, or 128 x 128 of a matrix. Blocks are aligned from 0, and the
    last ones may be smaller. For each block, in float32, with one rounding to nearest even an operation:

    ``m = max |x|``, ``scale = max(m / largest, 2**-126)``, ``r = 1 / scale``, ``value = to FP8(x * r)``

    with 448 as the largest value of e4m3, and 57,344 of e5m2. The last step rounds to nearest even, too, and
    never overflows. A block with a NaN or an infinity has the scale NaN and nothing but values of NaN. So
    values and scales of a row depend on that row alone (with blocks of 128 x 128: of those 128 rows).

    Args:
        x: ``[..., K]`` (``[M, K]`` or ``[G, M, K]`` for blocks of 128 x 128); bfloat16, float16 or float32.
        block: 128, for activations and output gradients, or ``(128, 128)``, for weights.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The values, of the shape of `x`, and the scales ``[..., ceil(K / 128)]``, or
        ``[ceil(M / 128), ceil(K / 128)]``, behind G if there is one. There are no gradients.

    Raises:
        TypeError: `x` is not a dense bfloat16, float16 or float32 tensor, or `dtype` is not one of the two.
        ValueError: `block` is not one of the two, or `x` has no such shape.
    """
    check_operands("quantize", None, {"x": x}, autocast=False)
    check_quantized("quantize", dtype)
    if isinstance(block, Tensor) or block not in (SCALE_BLOCK, (SCALE_BLOCK, SCALE_BLOCK)):
        raise ValueError(
            f"samebits.quantize: block: expected {SCALE_BLOCK} or {(SCALE_BLOCK, SCALE_BLOCK)}, got {block!r}"
        )
    of_matrix = block != SCALE_BLOCK
    if x.ndim not in (2, 3) if of_matrix else x.ndim == 0:
        wanted = "[M, K] or [G, M, K] for blocks of 128 x 128" if of_matrix else "at least 1-D"
        raise ValueError(f"samebits.quantize: x: expected {wanted}, got shape {shape(x)}")
    key = pack_key(FP8.key, chosen_backend(x.device.type))
    if of_matrix:
        return quantized_matrices(x.detach(), key, dtype)
    rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, scale = quantized(rows, 1, dtype, key)
    return reshaped(values, x.shape), reshaped(scale, (*x.shape[:-1], blocks(x.shape[-1])))
