"""Products on GPU tensors by Triton, and the choice of kernels. Every kernel gives the same bits."""

from __future__ import annotations

import functools
import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later, UnavailableError, broadcast
from samebits.backends.arch import arch_of
from samebits.backends.product import LARGEST, Operands, Product
from samebits.backends.replay import refuse
from samebits.backends.segments import refuse_start, segment_bounds
from samebits.backends.triton import kernels, products
from samebits.backends.triton.products import TritonKernel, TritonPlan
from samebits.contract import FMA, contract_from_key


@functools.cache
def check_contract(contract: str, device: int) -> None:
    """Refuse a contract that the matrix unit of `device` does not follow."""
    wanted = contract_from_key(contract)
    if wanted.step == "fma" or device < 0:  # Triton's interpreter, on the CPU, has no matrix unit
        return
    p: Any = torch.cuda.get_device_properties(device)
    family = None if torch.version.hip else arch_of((p.major, p.minor)).mma
    if family is None:
        raise UnavailableError(
            f"samebits: it is not known which bits the matrix unit of {p.name} gives, so {wanted.name} has"
            " no MmaModel for it; contract=samebits.FMA works on it"
        )
    if wanted.mma not in (None, family):
        raise ValueError(
            f"samebits: contract {wanted}: expected the family of {p.name}, {family.name};"
            " CPU tensors follow any family"
        )


def matmul(a: Tensor, b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    """``a[*A, M, K] @ b[*B, K, N] (+ bias[N])`` with batch dimensions broadcast as in ``torch.matmul``."""
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    out = a.new_empty((*batch, M, N), dtype=out_dtype)
    B = batch.numel()
    if b.ndim == 2:  # one tall product: the rows of every batch share b
        x = Operands(a.reshape(B * M, K), b, out.view(B * M, N), bias)
    else:
        a, b = a.expand(*batch, M, K).reshape(B, M, K), b.expand(*batch, K, N).reshape(B, K, N)
        x = Operands(a, b, out.view(B, M, N), bias)
    _run_plain(x, contract)
    return out


def addbmm(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor | None,
    *,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    """``acc[B, M, N] + sum over s, k of a[B, S, M, K] * b[B, S, K, N]``: a chain over sequences."""
    shape = a.shape[0], a.shape[2], b.shape[3]
    if acc is not None:
        acc = torch.empty(shape, dtype=torch.float32, device=a.device).copy_(acc)
    out = acc if acc is not None and out_dtype == torch.float32 else a.new_empty(shape, dtype=out_dtype)
    _run_sequences(a, b, out, acc, cu_seqlens, contract)
    return out


def addbmm_later(
    out: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, *, accumulate: bool, contract: str
) -> Later:
    """`addbmm` into ``out``. Chains start from +0, or from the values in ``out``.

    Triton compiles at the first launch of a kind, in the step.
    """
    acc = out if accumulate else None
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    return partial(_run_sequences, a, b, out, acc, cu_seqlens, contract)


def matmul_later(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, contract: str
) -> Later:
    """``a[M, K] @ b[K, N] (+ bias[N])`` into ``out``. Chains start from +0, or from the values in ``out``.

    All may have a batch dimension in front. Under TENSOR_CORE the parts of a chain must be cut at multiples
    of 16. A contract with segments takes no values to start from.
    """
    refuse_start(contract, accumulate)
    return partial(_run_plain, Operands(a, b, out, bias, out if accumulate else None), contract)


def tree_later(out: Tensor, partials: Tensor) -> Later:
    """Write the rounded sum of contiguous ``partials[S, M, N]`` by pairs of neighbours into ``out[M, N]``.

    S is a power of two. ``out`` may be ``partials[0]``.
    """
    return partial(_tree, out, partials, None)


def rounded_later(out: Tensor, chain: Tensor) -> Later:
    """Write the rounded results of chains in ``chain[M, N]``, whose NaN are canonical, into ``out``."""
    return partial(_run, Operands(out[:, :0], out[:0], out, start=chain), FMA.key)  # adds no term


def _run_sequences(
    a: Tensor, b: Tensor, out: Tensor, acc: Tensor | None, cu_seqlens: Tensor | None, contract: str
) -> None:
    B, S, M, K = a.shape
    if out is acc and (S == 0 or K == 0):
        check_contract(contract, out.get_device())
        return  # no term was added, so even a NaN keeps its bits
    together = B == 1 and S > 1 and a.stride(1) == K * a.stride(3) and b.stride(1) == K * b.stride(2)
    if together and K % 16 == 0 and S * K <= LARGEST and contract_from_key(contract).step == "mma":
        # The sequences are contiguous in memory and end with full groups, so they are one sequence.
        a = a.as_strided((1, 1, M, S * K), (0, 0, a.stride(2), a.stride(3)))
        b = b.as_strided((1, 1, S * K, b.shape[3]), (0, 0, b.stride(2), b.stride(3)))
    if cu_seqlens is not None:
        a, b, cu_seqlens = a[:, 0], b[:, 0], cu_seqlens.contiguous()
    _run(Operands(a, b, out, None, acc, cu_seqlens, sequences=True), contract)


def _run_plain(x: Operands, contract: str) -> None:
    """Run a plain product, in the contract's segments one after another, and add their sums."""
    bounds = segment_bounds(x.a.shape[-1], contract)
    if len(bounds) == 2:
        _run(x, contract)
        return
    partials = torch.empty((len(bounds) - 1, *x.out.shape), dtype=torch.float32, device=x.out.device)
    for sums, (start, stop) in zip(partials, itertools.pairwise(bounds), strict=True):
        _run(Operands(x.a[..., start:stop], x.b[..., start:stop, :], sums), contract)
    _tree(x.out, partials, x.bias)


def _tree(out: Tensor, partials: Tensor, bias: Tensor | None) -> None:
    if out.numel() == 0:
        return
    batch, row, column = (0, *out.stride())[-3:]
    sizes = (
        out.numel(),
        *out.shape[-2:],
        out.numel(),
        batch,
        row,
        column,
        0 if bias is None else bias.stride(0),
    )
    refuse("launches of Triton's are not seen")
    block = max(16, 2048 // len(partials))
    with torch.cuda.device(out.get_device()):
        kernels.tree[(-(-out.numel() // block),)](
            partials, bias, out, *sizes, SEGMENTS=len(partials), BLOCK=block
        )


def _run(x: Operands, contract: str) -> None:
    """Run the fastest kernel that supports these operands."""
    check_contract(contract, x.out.get_device())
    _plan(Product.unchecked(x, contract_from_key(contract).step)).run(x)


@functools.lru_cache(maxsize=8192)
def _plan(p: Product) -> TritonPlan:
    return fastest(p).plan(p)


def fastest(p: Product) -> TritonKernel[Any]:
    """The kernel that should be fastest. This is the one place where kernels are chosen."""
    if p.step == "fma":
        return products.FMA
    return products.TENSOR_CORE_TILES if products.TENSOR_CORE_TILES.supports(p) else products.TENSOR_CORE
