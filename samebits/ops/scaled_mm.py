"""``samebits.scaled_mm``: products of FP8 matrices with scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, pack_key
from samebits.contract import FP8
from samebits.ops._checks import SUPPORTED, check_device, shape
from samebits.ops._scaled import blocks, scaled_product

_A = ("RowWise", "BlockWise1x128")
_B = ("RowWise", "BlockWise1x128", "BlockWise128x128")


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
        ValueError: shapes or devices do not match, K is 0, or a recipe is not one of these.
        samebits.backends.UnavailableError: the GPU is no Hopper. Other GPUs' FP8 has not been specified.
    """
    operands = {"mat_a": mat_a, "mat_b": mat_b}
    for name, t in operands.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"samebits.scaled_mm: {name}: expected a Tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.dtype not in FP8.input_dtypes:
            raise TypeError(
                f"samebits.scaled_mm: {name}: expected a dense tensor of torch.float8_e4m3fn or"
                f" torch.float8_e5m2, got {t.dtype} of layout {t.layout}"
            )
        if t.ndim != 2:
            raise ValueError(f"samebits.scaled_mm: {name}: expected a matrix, got shape {shape(t)}")
    (M, K), N = mat_a.shape, mat_b.shape[1]
    if mat_b.shape[0] != K or K == 0:
        raise ValueError(
            "samebits.scaled_mm: mat_a, mat_b: expected [M, K] and [K, N] with K > 0, got shapes"
            f" {shape(mat_a)} and {shape(mat_b)}"
        )
    if mat_a.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"samebits.scaled_mm: expected tensors on a CPU or CUDA device, got {mat_a.device}")
    if output_dtype not in SUPPORTED:
        raise TypeError(
            f"samebits.scaled_mm: output_dtype: expected bfloat16, float16 or float32, got {output_dtype!r}"
        )
    recipe_a, recipe_b = _recipe("scale_recipe_a", scale_recipe_a), _recipe("scale_recipe_b", scale_recipe_b)
    if recipe_a in ("TensorWise", "BlockWise128x128"):
        raise ValueError(
            f"samebits.scaled_mm: scale_recipe_a: {recipe_a} takes the maximum over rows, so a row's result"
            f" depends on the others in the batch; expected {' or '.join(_A)}, from samebits.quantize"
        )
    for name, recipe, known in (("scale_recipe_a", recipe_a, _A), ("scale_recipe_b", recipe_b, _B)):
        if recipe not in known:
            raise ValueError(f"samebits.scaled_mm: {name}: expected one of {', '.join(known)}, got {recipe}")
    shapes_a = {"RowWise": [(M, 1)], "BlockWise1x128": [(M, blocks(K))]}
    padded = [(blocks(K) + more, blocks(N)) for more in range(4) if not more or (blocks(K) + more) % 4 == 0]
    shapes_b: dict[str, Sequence[tuple[int, ...]]] = {
        "RowWise": [(1, N), (N, 1), (N,)],
        "BlockWise1x128": [(N, blocks(K))],
        "BlockWise128x128": padded,
    }
    scale_a = _scale("scale_a", scale_a, shapes_a[recipe_a], mat_a)
    scale_b = _scale("scale_b", scale_b, shapes_b[recipe_b], mat_a)
    if recipe_b == "RowWise":
        scale_b = scale_b.reshape(N, 1)
    elif recipe_b == "BlockWise128x128":
        scale_b = scale_b[: blocks(K)].mT
    check_device("scaled_mm", "mat_b", mat_b, "mat_a", mat_a)
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in SUPPORTED:
            got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise TypeError(f"samebits.scaled_mm: bias: expected bfloat16, float16 or float32, got {got}")
        if bias.shape != (N,):
            raise ValueError(f"samebits.scaled_mm: bias: expected shape {(N,)}, got {shape(bias)}")
        check_device("scaled_mm", "bias", bias, "mat_a", mat_a)
        bias = bias.contiguous()
    key = pack_key(FP8.key, chosen_backend(mat_a.device.type))
    out: Tensor = scaled_product(mat_a, mat_b.mT, scale_a, scale_b, bias, output_dtype, key)
    return out


def _recipe(name: str, recipe: Any) -> str:
    """The name of a ``torch.nn.functional.ScalingType``."""
    found = getattr(recipe, "name", None)
    if not isinstance(found, str):
        raise TypeError(
            f"samebits.scaled_mm: {name}: expected a torch.nn.functional.ScalingType,"
            f" got {type(recipe).__name__}"
        )
    return found


def _scale(name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]], mat_a: Tensor) -> Tensor:
    """`scale` in float32, if it has one of these shapes."""
    if not isinstance(scale, Tensor):
        raise TypeError(f"samebits.scaled_mm: {name}: expected a Tensor, got {type(scale).__name__}")
    if scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise TypeError(
            f"samebits.scaled_mm: {name}: expected torch.float32 or torch.float8_e8m0fnu, got {scale.dtype}"
        )
    if scale.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"samebits.scaled_mm: {name}: expected shape {wanted}, got {shape(scale)}")
    check_device("scaled_mm", name, scale, "mat_a", mat_a)
    return scale.to(torch.float32)
