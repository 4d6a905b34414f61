"""Products on CUDA tensors, and the choice of kernels. Every kernel gives the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later, UnavailableError, broadcast
from samebits.backends.arch import ARCHS
from samebits.backends.cuda import devices, runtime, shapes, tuned
from samebits.backends.cuda.plans import Plans
from samebits.backends.cuda.products import segmented_sm90
from samebits.backends.cuda.products.fma import FMA
from samebits.backends.cuda.products.fma_sm90 import FMA_SM90
from samebits.backends.cuda.products.padded_sm90 import PADDED_SM90
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan
from samebits.backends.cuda.products.segmented import segmented_plan, tree_launch
from samebits.backends.cuda.products.tail_sm90 import TAIL_SM90
from samebits.backends.cuda.products.tensor_core import TENSOR_CORE
from samebits.backends.cuda.products.tensor_core_sm90 import TENSOR_CORE_SM90
from samebits.backends.cuda.products.tiny import TINY, TINY_FMA
from samebits.backends.cuda.shapes import ProductShape
from samebits.backends.product import LARGEST, Matrix, Operands, Product
from samebits.backends.replay import kept
from samebits.backends.segments import check_terms, refuse_start
from samebits.contract import MmaModel, contract_from_key
from samebits.remedies import see


@functools.cache
def family(device: int) -> MmaModel:
    """The tensor-core family of CUDA device `device`."""
    info = devices.device_info(device)
    found = info.arch.mma
    if found is None:
        raise UnavailableError(
            f"samebits: it is not known which bits the tensor cores of {info.name} ({info.arch}) give;"
            f" known are {', '.join(str(arch) for arch in ARCHS.values() if arch.mma is not None)};"
            " contract=samebits.FMA works on it, and CPU tensors follow any family" + see("unsupported-gpus")
        )
    return found


def check_contract(contract: str, device: int) -> None:
    """Refuse a contract that the tensor cores of `device` do not follow."""
    wanted = contract_from_key(contract)
    if wanted.step == "fma":
        return
    found = family(device)
    if wanted.mma not in (None, found):
        raise ValueError(
            f"samebits: contract {wanted}: expected the family of {devices.device_info(device).name},"
            f" {found.name}; CPU tensors follow any family" + see("contracts")
        )


def matmul(a: Tensor, b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    """``a[*A, M, K] @ b[*B, K, N] (+ bias[N])`` with batch dimensions broadcast as in ``torch.matmul``."""
    if b.ndim == 2:  # one tall product: the rows of every batch share b
        out = runtime.empty((*a.shape[:-1], b.shape[1]), out_dtype, a.get_device())
        if a.ndim > 2 and not a.is_contiguous():
            a = a.reshape(a.shape[:-1].numel(), a.shape[-1])
        plan, addresses, _ = _call(a, b, out, contract, bias=bias, fresh=True)
        plan.launch(*addresses)
        return out
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    out = runtime.empty((*batch, M, N), out_dtype, a.get_device())
    a3 = a.expand(*batch, M, K).reshape(batch.numel(), M, K)
    b3 = b.expand(*batch, K, N).reshape(batch.numel(), K, N)
    _launch(_call(a3, b3, out.view(batch.numel(), M, N), contract, bias=bias, fresh=True))
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
    shape = (a.shape[0], a.shape[2], b.shape[3])
    if acc is None:
        out = runtime.empty(shape, out_dtype, a.get_device())
        _run_sequences(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=False)
        return out
    chain = torch.empty(shape, dtype=torch.float32, device=a.device).copy_(acc)
    _run_sequences(a, b, chain, contract, cu_seqlens=cu_seqlens, accumulate=True)
    return rounded(chain, out_dtype)


def addbmm_later(
    out: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, *, accumulate: bool, contract: str
) -> Later:
    """`addbmm` into ``out``. Chains start from +0, or from the values in ``out``."""
    return _later(_call_of_sequences(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=accumulate))


def matmul_later(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, contract: str
) -> Later:
    """``a[M, K] @ b[K, N] (+ bias[N])`` into ``out``. Chains start from +0, or from the values in ``out``.

    All may have a batch dimension in front. Under TENSOR_CORE the parts of a chain must be cut at multiples
    of 16. A contract with segments takes no values to start from.
    """
    refuse_start(contract, accumulate)
    return _later(_call(a, b, out, contract, bias=bias, accumulate=accumulate))


def tree_later(out: Tensor, partials: Tensor) -> Later:
    """Write the rounded sum of contiguous ``partials[S, M, N]`` by pairs of neighbours into ``out[M, N]``.

    S is a power of two. ``out`` may be ``partials[0]``.
    """
    segment, row, _ = partials.stride()
    launch = tree_launch(out.get_device(), partials.shape[0], (segment, row), Matrix.of(out), None)
    return partial(launch, partials.data_ptr(), out.data_ptr(), 0, 0)


def rounded_later(out: Tensor, chain: Tensor) -> Later:
    """Write the rounded results of chains in contiguous ``chain``, whose NaN are canonical, into ``out``."""
    if chain.numel() == 0:
        return int
    flat, to = (t.view(-1, t.shape[-1]) for t in (chain, out))
    x = Operands(to[:, :0], to[:0], to, start=flat)  # adds no term
    return partial(FMA.plan(Product.of(x, FMA.step)).run, x)


def rounded(chain: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`rounded_later` into a new tensor, immediately."""
    if dtype == torch.float32:
        return chain
    out = torch.empty_like(chain, dtype=dtype)
    rounded_later(out, chain)()
    return out


def _run_sequences(
    a: Tensor, b: Tensor, out: Tensor, contract: str, *, cu_seqlens: Tensor | None, accumulate: bool
) -> None:
    _launch(_call_of_sequences(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=accumulate))


def _call_of_sequences(
    a: Tensor, b: Tensor, out: Tensor, contract: str, *, cu_seqlens: Tensor | None, accumulate: bool
) -> _Call:
    B, S, M, K = a.shape
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    # Only under TENSOR_CORE: under FMA every sequence ends with a zero term.
    tensor_core = contract_from_key(contract).step == "mma"
    together = S > 1 and B == 1 and _one_axis(a, 3) and _one_axis(b, 2)
    if tensor_core and together and S * K <= LARGEST:
        # The sequences are contiguous in memory, so they can be packed sequences of one K axis.
        if K % 16:
            cu_seqlens = _offsets(S, K, a)
        a = a.as_strided((1, 1, M, S * K), (0, 0, a.stride(2), a.stride(3)))
        b = b.as_strided((1, 1, S * K, b.shape[3]), (0, 0, b.stride(2), b.stride(3)))
        S = 1
    if S == 1:
        a, b = a[:, 0], b[:, 0]
        if B == 1:
            a, b, out = a[0], b[0], out[0]
    return _call(a, b, out, contract, sequences=True, cu_seqlens=cu_seqlens, accumulate=accumulate)


_MOST_KEPT = 4096
_kept_offsets: dict[tuple[int, int, torch.device], Tensor] = {}


def _offsets(count: int, length: int, of: Tensor) -> Tensor:
    """Where `count` sequences of one length begin, and where the last one ends."""
    make = partial(torch.arange, 0, count * length + 1, length, dtype=torch.int32, device=of.device)
    key = count, length, of.device
    if key not in _kept_offsets and max(count, len(_kept_offsets)) >= _MOST_KEPT:
        return make()
    return kept(_kept_offsets, key, make)


def _one_axis(t: Tensor, k: int) -> bool:
    return t.stride(1) == t.shape[k] * t.stride(k)


_Call = tuple[CudaPlan, tuple[int, int, int, int, int, int], Tensor | None]
"""A plan, its addresses, and cu_seqlens, which must live as long: it may be a copy made for this launch."""


def _launch(call: _Call) -> None:
    plan, addresses, _ = call
    plan.launch(*addresses)


def _later(call: _Call) -> Later:
    plan, addresses, cu_seqlens = call
    launch = plan.later(*addresses)
    return launch if cu_seqlens is None else partial(_launch_holding, launch, cu_seqlens)


def _launch_holding(launch: Later, cu_seqlens: Tensor) -> None:
    launch()


_plans: Plans[CudaPlan] = Plans()


def _call(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    contract: str,
    *,
    bias: Tensor | None = None,
    sequences: bool = False,
    cu_seqlens: Tensor | None = None,
    accumulate: bool = False,
    fresh: bool = False,
) -> _Call:
    """The plan of the fastest kernel for these operands, and their addresses.

    With `sequences` the terms belong to sequences, in the contract's sense. With `accumulate` the chains
    start from `out`. `fresh`: `out` is contiguous and was allocated for this product.
    """
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), out.data_ptr()
    key = (
        contract,
        (a_at & 15) << 4 | b_at & 15,
        a.get_device(),
        a.dtype,
        b.dtype,
        out.dtype,
        a.shape,
        a.stride(),
        b.shape,
        b.stride(),
        None if fresh else (out_at & 15, out.shape, out.stride()),
        sequences,
        accumulate,
        None if bias is None else (bias.dtype, bias.stride()),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.stride()),
    )
    plan = _plans.get(key)
    if plan is None:
        if b.ndim == 2:  # only a plan needs the rows of all batches in one dimension
            a, out = (t if t.ndim == 2 else t.view(t.shape[:-1].numel(), t.shape[-1]) for t in (a, out))
        operands = Operands(a, b, out, bias, out if accumulate else None, cu_seqlens, sequences)
        plan = _plans.keep(key, _plan(operands, contract))
    at = (
        a_at,
        b_at,
        out_at,
        0 if bias is None else bias.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        out_at if accumulate else 0,
    )
    return plan, at, cu_seqlens


def _plan(operands: Operands, contract: str) -> CudaPlan:
    check_contract(contract, operands.a.get_device())
    p = Product.of(operands, contract_from_key(contract).step)
    segments = 1 if p.sequences else check_terms(contract, p.k)
    if segments == 1:
        return _chosen_plan(p)
    if segmented_sm90.supports(p, segments):
        return segmented_sm90.plan(p, segments)
    return segmented_plan(p, segments, _chosen_plan)


def _chosen_plan(p: Product) -> CudaPlan:
    kernel, schedule = chosen(p)
    return kernel.plan(p, schedule)


PRODUCTS: tuple[CudaKernel[Product, Any], ...] = (
    TENSOR_CORE,
    FMA,
    TENSOR_CORE_SM90,
    TAIL_SM90,
    PADDED_SM90,
    FMA_SM90,
    TINY,
    TINY_FMA,
)
"""All product kernels. The first of each step is universal: it supports every product. Others are compared
with it."""


def chosen(p: Product) -> tuple[CudaKernel[Product, Any], Any]:
    """The kernel and the schedule that should be fastest: those of a tuned table, or the cost model's.

    The schedule is None if it is what the kernel itself chooses.
    """
    shape = ProductShape.of(p)
    if shape is not None:
        shapes.met(shape)
    return tuned.find(shape, p.device, partial(ways, p)) or (fastest(p), None)


def ways(p: Product, name: str = "") -> list[tuple[CudaKernel[Product, Any], Any]]:
    """Kernels, or the one of this name, and schedules that could be fastest for `p`. Tuning times them."""
    return [
        (kernel, s)
        for kernel in kernels_for(p)
        if name in ("", kernel.name)
        for candidate in kernel.candidates(p)
        for s in (candidate, *kernel.variations(p, candidate))
    ]


Takes = Callable[[Product], bool]


def kernels_for(p: Product) -> list[CudaKernel[Product, Any]]:
    """The kernels that could be fastest: one, or two whose costs can be compared."""
    first = fastest(p)
    pairs: tuple[tuple[CudaKernel[Product, Any], CudaKernel[Product, Any], Takes], ...] = (
        (FMA_SM90, FMA, FMA_SM90.supports),
        (PADDED_SM90, TENSOR_CORE, PADDED_SM90.supports),
        (TAIL_SM90, TENSOR_CORE_SM90, TAIL_SM90.divides),
    )
    return next(([a, b] for a, b, both in pairs if first in (a, b) and both(p)), [first])


def fastest(p: Product) -> CudaKernel[Product, Any]:
    """The kernel that should be fastest. This is the one place where kernels are chosen."""
    for kernel in (TINY, TINY_FMA):
        if kernel.supports(p):
            return kernel
    if TENSOR_CORE_SM90.supports(p):
        return TAIL_SM90 if TAIL_SM90.pays(p) else TENSOR_CORE_SM90
    if p.step == "mma":
        return PADDED_SM90 if PADDED_SM90.pays(p) else TENSOR_CORE
    if FMA_SM90.supports(p) and FMA_SM90.cost(p, FMA_SM90.choose(p)) < FMA.cost(p, FMA.choose(p)):
        return FMA_SM90
    return FMA
