"""``samebits.scaled_mm``: products of FP8 matrices with scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.contract import FP8
from samebits.ops._checks import check_device, shape
from samebits.ops._scaled import (
    blocks,
    check_fp8,
    check_no_gradients,
    check_output_dtype,
    check_recipes,
    checked_bias,
    checked_scale,
    padded_blocks,
    scaled_product,
)


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of two FP8 matrices times their scales, with names as ``torch.nn.functional.scaled_mm``.

    ``out[m, n] = sum over blocks of (sum over k in the block of a[m, k] * b[k, n]) * scale_a * scale_b``

    Blocks are 128 consecutive k, aligned from 0. Each is a chain of its own from +0, as Hopper's tensor cores
    compute it, of up to four steps of 32 terms. Then ``acc = fma(chain, s, acc)`` in float32, blocks
    ascending, where s is the product of both scales, rounded once. The bias is added with one rounding, and
    the sum is rounded once to `output_dtype`. So a row depends on its own values and scales alone, and on
    ``mat_b``. (``samebits.contract.FP8``; docs/contract.md, "FP8".)

    Scales of activations are each row's own: a scale of a whole tensor, or of 128 rows, is a maximum over
    every request in the batch, so it is refused for ``mat_a``.

    Args:
        mat_a: ``[M, K]``; e4m3 (``torch.float8_e4m3fn``) or e5m2 (``torch.float8_e5m2``).
        mat_b: ``[K, N]``; either dtype, on the same device. The transpose of a contiguous ``[N, K]`` is read
            as it is.
        scale_a: float32 (or ``torch.float8_e8m0fnu``), ``[M, 1]`` for ``RowWise``, ``[M, ceil(K / 128)]`` for
            ``BlockWise1x128``.
        scale_recipe_a: ``torch.nn.functional.ScalingType.RowWise`` or ``BlockWise1x128``.
        scale_b: N elements for ``RowWise``, ``[N, ceil(K / 128)]`` for ``BlockWise1x128``,
            ``[ceil(K / 128), ceil(N / 128)]`` for ``BlockWise128x128`` (with up to 3 rows more, as PyTorch
            pads it).
        scale_recipe_b: one of these three.
        bias: ``[N]``; bfloat16, float16 or float32.
        output_dtype: bfloat16, float16 or float32.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match, K is 0, a recipe is not one of these, or a tensor requires
            a gradient.
        samebits.backends.UnavailableError: the GPU is no Hopper. Other GPUs' FP8 has not been specified.
    """
    check_fp8("scaled_mm", "mat_a", mat_a, (2,))
    check_fp8("scaled_mm", "mat_b", mat_b, (2,))
    (M, K), N = mat_a.shape, mat_b.shape[1]
    if mat_b.shape[0] != K or K == 0:
        raise ValueError(
            "samebits.scaled_mm: mat_a, mat_b: expected [M, K] and [K, N] with K > 0, got shapes"
            f" {shape(mat_a)} and {shape(mat_b)}"
        )
    recipes = check_recipes("scaled_mm", scale_recipe_a, scale_recipe_b)
    shapes_a = {"RowWise": [(M, 1)], "BlockWise1x128": [(M, blocks(K))]}
    shapes_b: dict[str, Sequence[tuple[int, ...]]] = {
        "RowWise": [(1, N), (N, 1), (N,)],
        "BlockWise1x128": [(N, blocks(K))],
        "BlockWise128x128": [(rows, blocks(N)) for rows in padded_blocks(K)],
    }
    scale_a = checked_scale("scaled_mm", "scale_a", scale_a, shapes_a[recipes[0]], "mat_a", mat_a)
    scale_b = checked_scale("scaled_mm", "scale_b", scale_b, shapes_b[recipes[1]], "mat_a", mat_a)
    if recipes[1] == "RowWise":
        scale_b = scale_b.reshape(N, 1)
    elif recipes[1] == "BlockWise128x128":
        scale_b = scale_b[: blocks(K)].mT
    check_device("scaled_mm", "mat_b", mat_b, "mat_a", mat_a)
    check_output_dtype("scaled_mm", output_dtype)
    bias = checked_bias("scaled_mm", bias, (N,), "mat_a", mat_a)
    given = {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    check_no_gradients("scaled_mm", given)
    key = pack_key(FP8.key, chosen_backend(mat_a.device.type))
    out: Tensor = scaled_product(mat_a, mat_b.mT, scale_a, scale_b, bias, output_dtype, key)
    return out
