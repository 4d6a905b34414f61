"""Products on CUDA tensors: which kernel runs them. Every kernel gives the same bits."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from samebits.backends import Step, broadcast
from samebits.backends.cuda import bmm_tiny, matmul_fma, matmul_sm80, matmul_sm90, runtime
from samebits.contract import FAMILIES, MmaModel, contract_from_key


@functools.cache
def family(device: int) -> MmaModel:
    """The tensor cores that CUDA device `device` has."""
    info = runtime.device_info(device)
    found = FAMILIES.get(info.capability)
    if found is None:
        major, minor = info.capability
        raise runtime.UnavailableError(
            f"samebits: it is not known which bits the tensor cores of {info.name} (sm_{major}{minor}) give;"
            f" known are {', '.join(f'sm_{a}{b}' for a, b in FAMILIES)};"
            " contract=samebits.FMA works on it, and CPU tensors follow any family"
        )
    return found


def check_contract(key: str, device: int) -> None:
    """Refuse a contract that the tensor cores of `device` do not follow."""
    contract = contract_from_key(key)
    if contract.step == "fma":
        return
    found = family(device)
    if contract.mma not in (None, found):
        raise ValueError(
            f"samebits: contract {contract}: expected the family of {runtime.device_info(device).name},"
            f" {found.name}; CPU tensors follow any family"
        )


def matmul(a: Tensor, b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    """``a[*A, M, K] @ b[*B, K, N] (+ bias[N])`` with batch dimensions broadcast as in ``torch.matmul``."""
    if a.ndim == 2 and b.ndim == 2:
        out = runtime.empty_matrix(a.shape[0], b.shape[1], out_dtype, a.get_device())
        _launch(*_planned(a, b, out, contract, bias=bias, fresh=True))
        return out
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    out = a.new_empty((*batch, M, N), dtype=out_dtype)
    if b.ndim == 2:  # one tall product: the rows of every batch share b
        tall, tall_out = a.reshape(batch.numel() * M, K), out.view(batch.numel() * M, N)
        _launch(*_planned(tall, b, tall_out, contract, bias=bias, fresh=True))
        return out
    a3 = a.expand(*batch, M, K).reshape(batch.numel(), M, K)
    b3 = b.expand(*batch, K, N).reshape(batch.numel(), K, N)
    _launch(*_planned(a3, b3, out.view(batch.numel(), M, N), contract, bias=bias, fresh=True))
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
        out = a.new_empty(shape, dtype=out_dtype)
        _run_sequences(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=False)
        return out
    chain = torch.empty(shape, dtype=torch.float32, device=a.device).copy_(acc)
    _run_sequences(a, b, chain, contract, cu_seqlens=cu_seqlens, accumulate=True)
    return rounded(chain, out_dtype)


def addbmm_later(
    out: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, *, accumulate: bool, contract: str
) -> Step:
    """`addbmm` into ``out``, from +0 or from what it holds."""
    return partial(
        _launch, *_sequences_planned(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=accumulate)
    )


def matmul_later(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, contract: str
) -> Step:
    """``a[M, K] @ b[K, N] (+ bias[N])`` into ``out``: plain chains from +0 or from what it holds.

    Under TENSOR_CORE the parts of a chain must be cut at multiples of 16.
    """
    return partial(_launch, *_planned(a, b, out, contract, bias=bias, accumulate=accumulate))


def rounded_later(out: Tensor, chain: Tensor) -> Step:
    """The results, rounded, of the chains in contiguous ``chain``, in which kernels left canonical NaN."""
    if chain.numel() == 0:
        return int
    flat, to = (t.view(-1, t.shape[-1]) for t in (chain, out))
    nothing = to[:, :0], to[:0]  # adds no term
    plan = matmul_fma.plan(*nothing, to, acc=flat)
    return partial(matmul_sm80.run, plan, *nothing, to, None, None, flat)


def rounded(chain: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`rounded_later`, now, into a new tensor."""
    if dtype == torch.float32:
        return chain
    out = torch.empty_like(chain, dtype=dtype)
    rounded_later(out, chain)()
    return out


def _run_sequences(
    a: Tensor, b: Tensor, out: Tensor, contract: str, *, cu_seqlens: Tensor | None, accumulate: bool
) -> None:
    _launch(*_sequences_planned(a, b, out, contract, cu_seqlens=cu_seqlens, accumulate=accumulate))


def _sequences_planned(
    a: Tensor, b: Tensor, out: Tensor, contract: str, *, cu_seqlens: Tensor | None, accumulate: bool
) -> _Planned:
    B, S, M, K = a.shape
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    # Under FMA every sequence ends with a zero term.
    tensor_core = contract_from_key(contract).step == "mma"
    together = S > 1 and B == 1 and _one_axis(a, 3) and _one_axis(b, 2)
    if tensor_core and together and S * K <= matmul_sm80.LARGEST:
        # The sequences lie end to end in memory, so they are spans of one K axis.
        if K % 16:
            cu_seqlens = torch.arange(0, S * K + 1, K, dtype=torch.int32, device=a.device)
        a = a.as_strided((1, 1, M, S * K), (0, 0, a.stride(2), a.stride(3)))
        b = b.as_strided((1, 1, S * K, b.shape[3]), (0, 0, b.stride(2), b.stride(3)))
        S = 1
    if S == 1:
        a, b = a[:, 0], b[:, 0]
        if B == 1:
            a, b, out = a[0], b[0], out[0]
    return _planned(a, b, out, contract, sequences=True, cu_seqlens=cu_seqlens, accumulate=accumulate)


def _one_axis(t: Tensor, k: int) -> bool:
    return t.stride(1) == t.shape[k] * t.stride(k)


class Plan(Protocol):
    """A kernel, and everything of a call of it but the addresses."""

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int) -> None:
        """Run on operands at these addresses; 0 where there is none."""


class _Planned(NamedTuple):
    plan: Plan
    addresses: tuple[int, int, int, int, int]
    cu_seqlens: Tensor | None
    """Kept, as it may have been made for this."""


def _launch(plan: Plan, addresses: tuple[int, int, int, int, int], cu_seqlens: Tensor | None) -> None:
    plan.launch(*addresses)


# How products have been run before, by everything that decides it: the checks and the choice are made once.
_plans: dict[tuple[object, ...], Plan] = {}
_MOST_PLANS = 8192


def _planned(
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
) -> _Planned:
    """The fastest kernel that takes these operands, and their addresses.

    With `sequences` the terms belong to sequences, in the contract's sense; with `accumulate` the chains
    start from `out`. `fresh` says that `out` is contiguous and was allocated for this.
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
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(a, b, out, contract, bias, sequences, cu_seqlens, accumulate)
    at = (
        a_at,
        b_at,
        out_at,
        0 if bias is None else bias.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
    )
    return _Planned(plan, at, cu_seqlens)


def _plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    contract: str,
    bias: Tensor | None,
    sequences: bool,
    cu_seqlens: Tensor | None,
    accumulate: bool,
) -> Plan:
    """Choose the fastest kernel that takes these operands."""
    check_contract(contract, a.get_device())
    acc = out if accumulate else None
    fused = contract_from_key(contract).step == "fma"
    if bmm_tiny.supports(a, b, bias=bias, cu_seqlens=cu_seqlens):
        return bmm_tiny.plan(a, b, out, fused=fused, accumulate=accumulate, closing=sequences)
    if fused:
        return matmul_fma.plan(a, b, out, acc=acc, bias=bias, cu_seqlens=cu_seqlens, closing=sequences)
    matmul_sm80.check(a, b, acc, bias, cu_seqlens, out)
    if (
        runtime.device_info(a.get_device()).capability == (9, 0)
        and a.ndim < 4
        and out.numel() > 0
        and a.shape[-1] > 0
        # which refuses what is larger
        and max(*a.shape, *b.shape, 0 if cu_seqlens is None else len(cu_seqlens)) <= matmul_sm80.LARGEST
        and out.stride(-1) == 1
        and (bias is None or bias.is_contiguous())
        and matmul_sm90.supports(a, b, cu_seqlens=cu_seqlens)
    ):
        return matmul_sm90.plan(a, b, out, bias=bias, accumulate=accumulate, cu_seqlens=cu_seqlens)
    return matmul_sm80.plan(a, b, out, acc=acc, bias=bias, cu_seqlens=cu_seqlens)
