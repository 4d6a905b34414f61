"""Replacements of PyTorch's products under ``samebits.batch_invariant``.

The functions follow the conventions of :mod:`samebits.mode.overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import same_shape
from samebits.backends.replay import viewed
from samebits.contract import FP8
from samebits.mode.arguments import records, takes, without_autocast
from samebits.ops.bmm import bmm
from samebits.ops.einsum import einsum
from samebits.ops.expand import expand
from samebits.ops.grouped_mm import grouped_mm
from samebits.ops.linear import linear
from samebits.ops.matmul import matmul
from samebits.ops.scaled_grouped_mm import scaled_grouped_mm
from samebits.ops.scaled_mm import scaled_mm
from samebits.remedies import see


def mm(input: Tensor, mat2: Tensor, out_dtype: torch.dtype | None = None) -> Any:
    return _of_ranks(2, 2, torch.mm, input, mat2, out_dtype)


def mv(input: Tensor, vec: Tensor) -> Any:
    return _of_ranks(2, 1, torch.mv, input, vec)


def dot(input: Tensor, tensor: Tensor) -> Any:
    return _of_ranks(1, 1, torch.dot, input, tensor)


def _of_ranks(
    rows: int,
    columns: int,
    theirs: Callable[..., Any],
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if not takes(a, b):
        return NotImplemented
    if (a.ndim, b.ndim) != (rows, columns) or _on_gpus_only(out_dtype, a):
        return theirs(a, b, *() if out_dtype is None else (out_dtype,))  # PyTorch raises its error
    return matmul(a, b, out_dtype=out_dtype)


def _on_gpus_only(out_dtype: torch.dtype | None, x: Tensor) -> bool:
    """Whether PyTorch refuses ``out_dtype`` for `x`: it takes it on GPUs only."""
    return out_dtype is not None and x.is_cpu


def matmul_(input: Tensor, other: Tensor) -> Any:
    if not takes(input, other):
        return NotImplemented
    if input.dtype != other.dtype and _dtype(input) != _dtype(other):
        # Python takes a TypeError in `@` for an operand that Tensor does not know, and raises one of its own.
        raise RuntimeError(
            f"samebits.batch_invariant: torch.matmul (@): other: expected {input.dtype} like input, got"
            f" {other.dtype}" + see("dtypes")
        )
    return matmul(input, other)


def rmatmul(input: Tensor, other: Tensor) -> Any:
    return matmul_(other, input)


def bmm_(input: Tensor, mat2: Tensor, out_dtype: torch.dtype | None = None) -> Any:
    if not takes(input, mat2):
        return NotImplemented
    if (
        input.ndim != 3
        or mat2.ndim != 3
        or input.shape[0] != mat2.shape[0]
        or _on_gpus_only(out_dtype, input)
    ):
        return torch.bmm(input, mat2, *() if out_dtype is None else (out_dtype,))  # PyTorch raises its error
    return bmm(input, mat2, out_dtype=out_dtype)


def grouped_mm_(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if not takes(input, mat2):
        return NotImplemented
    fits = input.dtype == mat2.dtype and {input.ndim, mat2.ndim} <= {2, 3}
    if not fits or bias is not None or out_dtype not in (None, input.dtype):
        return torch._grouped_mm(input, mat2, offs, bias, out_dtype)  # PyTorch raises its error
    with without_autocast(input.device):  # PyTorch does not apply it either
        return grouped_mm(input, mat2, offs)


def scaled_mm_(
    input: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Any:
    recipes = _recipes(scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
    if recipes is None or contraction_dim or out_dtype is None:
        return NotImplemented
    if not {input.dtype, mat2.dtype} <= {*FP8.input_dtypes} or input.ndim != 2 or input.shape[1] == 0:
        return NotImplemented
    given = (scale_a[0], recipes[0]), (scale_b[0], recipes[1])
    return scaled_mm(input, mat2, *given[0], *given[1], bias=bias, output_dtype=out_dtype)


def scaled_grouped_mm_(
    input: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Any:
    recipes = _recipes(scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
    if recipes is None or contraction_dim or out_dtype is None or offs is None:
        return NotImplemented
    if not {input.dtype, mat2.dtype} <= {*FP8.input_dtypes} or (input.ndim, mat2.ndim) != (2, 3):
        return NotImplemented
    given = (scale_a[0], recipes[0]), (scale_b[0], recipes[1])
    return scaled_grouped_mm(input, mat2, *given[0], *given[1], offs=offs, bias=bias, output_dtype=out_dtype)


def _recipes(
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
) -> list[Any] | None:
    """What both scales are, if it is one each, not swizzled, and of 128 terms or more."""
    alone = len(scale_a) == len(scale_b) == len(recipe_a) == len(recipe_b) == 1
    if not alone or any((*swizzle_a, *swizzle_b)):
        return None
    found = [F.ScalingType(n) for n in (*recipe_a, *recipe_b)]
    return None if any(of.name in ("BlockWise1x16", "BlockWise1x32") for of in found) else found


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    if not takes(input, mat1, mat2):
        return NotImplemented
    dtype = out_dtype or _dtype(mat1)
    fits = mat1.ndim == mat2.ndim == 2 and input.ndim <= 2 and not _on_gpus_only(out_dtype, mat1)
    if not fits or _dtype(input) not in (dtype, _dtype(mat1)):
        return torch.addmm(input, mat1, mat2, *() if out_dtype is None else (out_dtype,))  # its error
    if input.ndim == 1 and beta == alpha == 1 and out_dtype is None:
        return linear(mat1, viewed(mat2, Tensor.transpose, 0, 1), input)
    return _scaled_sum(input, matmul(mat1, mat2, out_dtype=torch.float32), beta, alpha, dtype)


def baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    if not takes(input, batch1, batch2):
        return NotImplemented
    dtype = out_dtype or _dtype(batch1)
    fits = batch1.ndim == batch2.ndim == 3 and input.ndim <= 3 and batch1.shape[0] == batch2.shape[0]
    if not fits or _on_gpus_only(out_dtype, batch1) or _dtype(input) not in (dtype, _dtype(batch1)):
        return torch.baddbmm(input, batch1, batch2, *() if out_dtype is None else (out_dtype,))  # its error
    return _scaled_sum(input, bmm(batch1, batch2, out_dtype=torch.float32), beta, alpha, dtype)


def in_place(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """`replacement`, with its result written into the first argument."""

    def write(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_autocast(input.device):
            kept = input.clone() if records(input) else input  # what a gradient needs is not written over
            result = replacement(kept, *args, **kwargs)
        if result is NotImplemented:
            return result
        if result.shape != input.shape or result.dtype != input.dtype:
            raise RuntimeError(
                f"samebits.batch_invariant: in place: expected shape {tuple(result.shape)},"
                f" {result.dtype}, got {tuple(input.shape)} and {input.dtype}"
            )
        return input.copy_(result)

    return write


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product of `x`: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _scaled_sum(input: Tensor, product: Tensor, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """``beta * input + alpha * product`` in float32, rounded once. `input` is not read if beta is 0."""
    if not same_shape(input.shape, product.shape):
        input = expand(input, product.shape)
    out = product if alpha == 1 else product * alpha
    if beta != 0:
        wide = input.to(torch.float32)
        out = (wide if beta == 1 else wide * beta) + out
    return out.to(dtype)


def linear_(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    operands = (input, weight) if bias is None else (input, weight, bias)
    if not takes(*operands) or weight.ndim != 2:
        return NotImplemented
    if bias is not None and bias.ndim > 1:  # such a bias broadcasts over the output
        rows = input if input.ndim > 1 else input[None]
        out = _scaled_sum(bias, matmul(rows, weight.mT, out_dtype=torch.float32), 1, 1, _dtype(input))
        return out if input.ndim > 1 else out[0]
    return linear(input, weight, bias)


def einsum_(equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return (
        NotImplemented
        if not isinstance(equation, str) or not takes(*operands)
        else einsum(equation, *operands)
    )


def einsum_operator(equation: str, tensors: Sequence[Tensor], path: Any = None) -> Any:
    return einsum_(equation, *tensors)  # from left to right, whatever the path
