"""``samebits.scaled_grouped_mm``: products of groups of rows in FP8, such as the tokens of experts."""

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
    check_dense,
    check_fp8,
    check_no_gradients,
    check_output_dtype,
    check_recipes,
    checked_bias,
    checked_scale,
    padded_blocks,
    scaled_grouped_product,
)

_OP = "scaled_grouped_mm"


def scaled_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    *,
    offs: Tensor,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """A product of FP8 matrices times their scales for each of G groups of rows.

    Names are those of ``torch.nn.functional.scaled_grouped_mm``. A row has the bits that
    :func:`samebits.scaled_mm` gives it with its group's matrix, scales and bias. Rows of no group are +0.

    * ``mat_a[T, K]``: group ``g`` has the rows ``offs[g - 1] ... offs[g] - 1``, and the first group starts at
      row 0. A group may be empty. Rows from ``offs[G - 1]`` on belong to none.
    * ``mat_a[G, M, K]``: group ``g`` has the first ``offs[g]`` rows of ``mat_a[g]``, as in a decoding step,
      where no host code knows how many tokens go to an expert. The others belong to none.

    Args:
        mat_a: ``[T, K]`` or ``[G, M, K]``; e4m3 (``torch.float8_e4m3fn``) or e5m2 (``torch.float8_e5m2``).
        mat_b: ``[G, K, N]``; either dtype, on the same device. For experts with weights ``[G, N, K]`` it is
            ``weight.mT``, which is read as it is.
        scale_a: float32 (or ``torch.float8_e8m0fnu``), ``[T, 1]`` (or ``[T]``) for ``RowWise``,
            ``[T, ceil(K / 128)]`` for ``BlockWise1x128``; with G, M in place of T where `mat_a` is 3-D.
        scale_recipe_a: ``torch.nn.functional.ScalingType.RowWise`` or ``BlockWise1x128``.
        scale_b: ``[G, N]`` for ``RowWise``, ``[G, N, ceil(K / 128)]`` for ``BlockWise1x128``,
            ``[G, ceil(K / 128), ceil(N / 128)]`` for ``BlockWise128x128`` (with up to 3 rows more of each
            matrix, as PyTorch pads it).
        scale_recipe_b: one of these three.
        offs: int32 ``[G]`` on the same device: the groups' ends, or the numbers of their rows. Its values
            stay there: nothing waits for them.
        bias: ``[G, N]``; bfloat16, float16 or float32.
        output_dtype: bfloat16, float16 or float32.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match, K is 0, a recipe is not one of these, a tensor requires a
            gradient, or ``offs`` decreases or leaves the rows. On a GPU the kernel checks the values of
            ``offs``, without waiting: bad ones end in an error of the device, an "unspecified launch
            failure". Nothing out of bounds is read.
        samebits.backends.UnavailableError: the GPU is no Hopper, whose FP8 alone has been specified, or there
            are more than 1,024 groups on it.
    """
    check_fp8(_OP, "mat_a", mat_a, (2, 3))
    check_fp8(_OP, "mat_b", mat_b, (3,))
    (G, K, N), before = mat_b.shape, mat_a.shape[:-1]
    if mat_a.shape[-1] != K or K == 0 or (mat_a.ndim == 3 and mat_a.shape[0] != G):
        raise ValueError(
            f"samebits.{_OP}: mat_a, mat_b: expected [T, K] or [G, M, K], and [G, K, N] with K > 0, got"
            f" shapes {shape(mat_a)} and {shape(mat_b)}"
        )
    recipes = check_recipes(_OP, scale_recipe_a, scale_recipe_b)
    shapes_a: dict[str, Sequence[tuple[int, ...]]] = {
        "RowWise": [(*before, 1), tuple(before)],
        "BlockWise1x128": [(*before, blocks(K))],
    }
    shapes_b: dict[str, Sequence[tuple[int, ...]]] = {
        "RowWise": [(G, N), (G, 1, N), (G, N, 1)],
        "BlockWise1x128": [(G, N, blocks(K))],
        "BlockWise128x128": [(G, rows, blocks(N)) for rows in padded_blocks(K)],
    }
    scale_a = checked_scale(_OP, "scale_a", scale_a, shapes_a[recipes[0]], "mat_a", mat_a)
    scale_b = checked_scale(_OP, "scale_b", scale_b, shapes_b[recipes[1]], "mat_a", mat_a)
    if recipes[0] == "RowWise":
        scale_a = scale_a.reshape(*before, 1)
    if recipes[1] == "RowWise":
        scale_b = scale_b.reshape(G, N, 1)
    elif recipes[1] == "BlockWise128x128":
        scale_b = scale_b[:, : blocks(K)].mT
    check_device(_OP, "mat_b", mat_b, "mat_a", mat_a)
    check_dense(_OP, "offs", offs, (torch.int32,), "torch.int32")
    if offs.shape != (G,):
        raise ValueError(f"samebits.{_OP}: offs: expected shape {(G,)}, got {shape(offs)}")
    check_device(_OP, "offs", offs, "mat_a", mat_a)
    check_output_dtype(_OP, output_dtype)
    bias = checked_bias(_OP, bias, (G, N), "mat_a", mat_a)
    given = {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    check_no_gradients(_OP, given)
    key = pack_key(FP8.key, chosen_backend(mat_a.device.type))
    operands = mat_a, mat_b.mT, scale_a, scale_b
    out: Tensor = scaled_grouped_product(*operands, offs, bias, output_dtype, key)
    return out
