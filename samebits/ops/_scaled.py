"""The operators of block-scaled FP8: the product, and the quantization that gives its operands."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import Key, on_gpu, unpack_key
from samebits.contract import SCALE_BLOCK
from samebits.ops._operator import Operator


def blocks(n: int) -> int:
    """Blocks of 128 that n elements need."""
    return -(-n // SCALE_BLOCK)


def _product_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    from samebits.backends.reference import scaled as reference

    contract = unpack_key(key)[0]
    return reference.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, contract=contract)


def _product_cuda(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    backend, _ = on_gpu("scaled", key, a.get_device())
    out: Tensor = backend.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype)
    return out


def _product_fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


# a[M, K] @ b[N, K].T. Scales: [M, blocks of K] or [M, 1]; and [N, blocks], [blocks of N, blocks] or [N, 1].
scaled_product = Operator(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str contract) -> Tensor",
    cpu=_product_cpu,
    cuda=_product_cuda,
    fake=_product_fake,
)


def _quantized_cpu(x: Tensor, rows: int, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    from samebits.backends.reference import scaled as reference

    return reference.quantize(x, rows, dtype)


def _quantized_cuda(x: Tensor, rows: int, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    backend, _ = on_gpu("quantize", key, x.get_device())
    found: tuple[Tensor, Tensor] = backend.quantize(x, rows, dtype)
    return found


def _quantized_fake(x: Tensor, rows: int, dtype: torch.dtype, key: Key) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    scale = x.new_empty((-(-M // rows), blocks(K)), dtype=torch.float32)
    return x.new_empty((M, K), dtype=dtype), scale


# Values and scales of x[M, K] in blocks of `rows` x 128.
quantized = Operator(
    "quantize(Tensor x, int rows, ScalarType dtype, str contract) -> (Tensor, Tensor)",
    cpu=_quantized_cpu,
    cuda=_quantized_cuda,
    fake=_quantized_fake,
)
