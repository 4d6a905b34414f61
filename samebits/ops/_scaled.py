"""The operators of block-scaled FP8: products, their checks, and the quantization of their operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, module_for
from samebits.contract import FP8, SCALE_BLOCK
from samebits.ops._checks import SUPPORTED, check_device, shape
from samebits.ops._grouped import check_offs
from samebits.ops._operator import Operator, has_tangent, reshaped
from samebits.remedies import see

_RECIPES_A = ("RowWise", "BlockWise1x128")
_RECIPES_B = ("RowWise", "BlockWise1x128", "BlockWise128x128")


def blocks(n: int) -> int:
    """Blocks of 128 that n elements need."""
    return -(-n // SCALE_BLOCK)


def padded_blocks(n: int) -> list[int]:
    """The same, or as PyTorch pads it, to a multiple of four."""
    return sorted({blocks(n), -(-blocks(n) // 4) * 4})


def check_dense(op: str, name: str, t: Tensor, dtypes: Sequence[torch.dtype], wanted: str) -> None:
    """Refuse what is not a dense tensor of one of these dtypes, which `wanted` names."""
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
    dense = t.layout is torch.strided and not t.is_nested
    if not dense or t.dtype not in dtypes:
        got = str(t.dtype) if dense else "a nested one" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"samebits.{op}: {name}: expected a dense tensor of {wanted}, got {got}" + see("fp8"))


def check_fp8(op: str, name: str, t: Tensor, ranks: tuple[int, ...]) -> None:
    """Refuse what is not a dense tensor of FP8 of one of these ranks."""
    check_dense(op, name, t, FP8.input_dtypes, "torch.float8_e4m3fn or torch.float8_e5m2")
    if t.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"samebits.{op}: expected tensors on a CPU or CUDA device, got {t.device}")
    if t.ndim not in ranks:
        wanted = "a matrix" if ranks == (2,) else " or ".join(f"{n}-D" for n in ranks)
        raise ValueError(f"samebits.{op}: {name}: expected {wanted}, got shape {shape(t)}")


def check_no_gradients(op: str, operands: dict[str, Tensor | None]) -> None:
    """Refuse operands that ask for a gradient, or carry one forward: FP8 values have none."""
    for name, t in operands.items():
        if t is None:
            continue
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(
                f"samebits.{op}: {name}: expected a tensor that requires no grad (or torch.no_grad()), since"
                " FP8 values have no gradients" + see("fp8")
            )
        if has_tangent(t):
            raise NotImplementedError(
                f"samebits.{op}: {name}: expected no forward-mode derivative, since FP8 values have none"
            )


def check_quantized(op: str, dtype: torch.dtype) -> None:
    """Refuse what is not a dtype of FP8 values."""
    if dtype not in FP8.input_dtypes:
        raise TypeError(
            f"samebits.{op}: dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype!r}"
        )


def check_recipes(op: str, of_a: Any, of_b: Any) -> tuple[str, str]:
    """The names of two ``torch.nn.functional.ScalingType``, if they are of scales that no batch decides."""
    found = {"scale_recipe_a": (of_a, _RECIPES_A), "scale_recipe_b": (of_b, _RECIPES_B)}
    for name, (recipe, known) in found.items():
        named = getattr(recipe, "name", None)
        if not isinstance(named, str):
            raise TypeError(
                f"samebits.{op}: {name}: expected a torch.nn.functional.ScalingType,"
                f" got {type(recipe).__name__}"
            )
        if known is _RECIPES_A and named in ("TensorWise", "BlockWise128x128"):
            raise ValueError(
                f"samebits.{op}: {name}: {named} takes the maximum over rows, so a row's result depends on"
                f" the others in the batch; expected {' or '.join(known)}, from samebits.quantize"
                + see("fp8")
            )
        if named not in known:
            raise ValueError(f"samebits.{op}: {name}: expected one of {', '.join(known)}, got {named}")
    return of_a.name, of_b.name


def checked_scale(
    op: str, name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]], lead_name: str, lead: Tensor
) -> Tensor:
    """`scale` in float32, if it has one of these shapes and the device of `lead`."""
    wanted = "torch.float32 or torch.float8_e8m0fnu"
    check_dense(op, name, scale, (torch.float32, torch.float8_e8m0fnu), wanted)
    if scale.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"samebits.{op}: {name}: expected shape {wanted}, got {shape(scale)}")
    check_device(op, name, scale, lead_name, lead)
    return scale.to(torch.float32)


def checked_bias(
    op: str, bias: Tensor | None, size: tuple[int, ...], lead_name: str, lead: Tensor
) -> Tensor | None:
    """The bias, contiguous, if it is what an epilogue takes."""
    if bias is None:
        return None
    check_dense(op, "bias", bias, SUPPORTED, "bfloat16, float16 or float32")
    if bias.shape != size:
        raise ValueError(f"samebits.{op}: bias: expected shape {size}, got {shape(bias)}")
    check_device(op, "bias", bias, lead_name, lead)
    return bias.contiguous()


def check_output_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in SUPPORTED:
        raise TypeError(f"samebits.{op}: output_dtype: expected bfloat16, float16 or float32, got {dtype!r}")


def _run_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    backend, contract = module_for("scaled", a, key)
    out: Tensor = backend.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, contract=contract)
    return out


# a[M, K] @ b[N, K].T. Scales: [M, blocks of K] or [M, 1]; and [N, blocks], [blocks of N, blocks] or [N, 1].
scaled_product = Operator(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str contract) -> Tensor",
    cpu=_run_product,
    fake=lambda a, b, *given: a.new_empty((a.shape[0], b.shape[0]), dtype=given[-2]),
)


def check_grouped_offs(offs: Tensor, rows: int, masked: bool) -> None:
    """Refuse ends of groups, or numbers of rows, that `rows` rows cannot have. Reads the values."""
    if not masked:
        return check_offs("scaled_grouped_mm", offs, rows)
    for i, count in enumerate(offs.tolist()):
        if not 0 <= count <= rows:
            raise ValueError(
                f"samebits.scaled_grouped_mm: offs: expected numbers of rows from 0 to {rows}, got {count} at"
                f" position {i}"
            )
    return None


def _run_grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    if not a.is_cuda:
        check_grouped_offs(offs, a.shape[-2], a.ndim == 3)
    backend, contract = module_for("scaled", a, key)
    out: Tensor = backend.scaled_grouped_mm(
        a, b, scale_a, scale_b, offs, bias=bias, out_dtype=out_dtype, contract=contract
    )
    return out


# a[t] @ b[g].T for the rows t of group g: of a[T, K], those between the ends `offs`; of a[G, M, K], the first
# offs[g] of its own. b[G, N, K], bias[G, N]. Scales are as of a product; those of b have one more dimension.
scaled_grouped_product = Operator(
    "scaled_grouped_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, Tensor? bias,"
    " ScalarType out_dtype, str contract) -> Tensor",
    cpu=_run_grouped,
    fake=lambda a, b, *given: a.new_empty((*a.shape[:-1], b.shape[1]), dtype=given[-2]),
)


def _run_quantized(x: Tensor, rows: int, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = module_for("quantize", x, key)[0].quantize(x, rows, dtype)
    return found


def _fake_quantized(x: Tensor, rows: int, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    scale = x.new_empty((-(-M // rows), blocks(K)), dtype=torch.float32)
    return x.new_empty((M, K), dtype=dtype), scale


# Values and scales of x[M, K] in blocks of `rows` x 128.
quantized = Operator(
    "quantize(Tensor x, int rows, ScalarType dtype, str contract) -> (Tensor, Tensor)",
    cpu=_run_quantized,
    fake=_fake_quantized,
)


def quantized_matrices(
    x: Tensor, key: Key, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Values and scales of ``x[..., M, K]`` in blocks of 128 x 128, each of one matrix."""
    if x.ndim == 3 and x.shape[0] > 0 and x.shape[1] % SCALE_BLOCK:
        found = [quantized_matrices(matrix, key, dtype) for matrix in x]
        return torch.stack([values for values, _ in found]), torch.stack([scale for _, scale in found])
    *before, rows, k = x.shape
    values, scale = quantized(x.reshape(math.prod(x.shape[:-1]), k), SCALE_BLOCK, dtype, key)
    return reshaped(values, x.shape), reshaped(scale, (*before, blocks(rows), blocks(k)))


def _run_fused(gate: Tensor, up: Tensor, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    backend, _ = module_for("quantize", gate, key)
    found: tuple[Tensor, Tensor] = backend.silu_mul_quantize(gate, up, dtype)
    return found


# Values and scales of silu(gate[M, K]) * up[M, K] in blocks of 1 x 128.
silu_mul_quantized = Operator(
    "silu_mul_quantize(Tensor gate, Tensor up, ScalarType dtype, str contract) -> (Tensor, Tensor)",
    cpu=_run_fused,
    fake=lambda gate, up, dtype, key: _fake_quantized(gate, 1, dtype, key),
)
