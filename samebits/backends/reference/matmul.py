"""Products on CPU tensors: threads run the chains of `kernels` on tiles of the output.

An argument `contract` may also be an operator's key, because CPU tensors have only this backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.reference import kernels
from samebits.backends.segments import refuse_start, segment_bounds
from samebits.contract import contract_from_key

_F32 = npt.NDArray[np.float32]

_MINIMUM_EXPONENT = {
    torch.float32: -126,
    torch.bfloat16: -126,
    torch.float16: -14,
    torch.float8_e5m2: -14,
    torch.float8_e4m3fn: -6,
}
_FINISH: dict[torch.dtype, tuple[Callable[..., None], type[np.unsignedinteger[Any]]]] = {
    torch.float32: (kernels.finish_f32, np.uint32),
    torch.bfloat16: (kernels.finish_bf16, np.uint16),
    torch.float16: (kernels.finish_f16, np.uint16),
}
_TERMS_WORTH_A_THREAD = 1 << 17
_SUBNORMAL_PROBE = np.array([2.0**-126, 0.5], np.float32)


def matmul(a: Tensor, b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    """``a[*A, M, K] @ b[*B, K, N] (+ bias[N])`` with batch dimensions broadcast as in ``torch.matmul``."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    B = batch.numel()
    if b.ndim == 2 and a.ndim > 2:  # one tall product: the rows of every batch share b
        tall = matmul(a.reshape(B * M, K), b, bias=bias, out_dtype=out_dtype, contract=contract)
        return tall.reshape(*batch, M, N)
    a4 = a.expand(*batch, M, K).reshape(B, 1, M, K)
    b4 = b.expand(*batch, K, N).reshape(B, 1, K, N)
    return _finish(_plain(a4, b4, contract), bias, out_dtype).reshape(*batch, M, N)


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
    B, S, M, K = a.shape
    N = b.shape[-1]
    sequences = [(s, 0, K) for s in range(S)]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        sequences = [(0, start, stop) for start, stop in itertools.pairwise(ends)]
    chain = np.zeros((B, M, N), np.float32) if acc is None else _array(acc.detach(), np.float32).copy()
    carry_on(a, b, chain, np.array(sequences, np.int64).reshape(-1, 3), contract, closing_zero=True)
    if (
        acc is not None
        and out_dtype == torch.float32
        and not any(start < stop for _, start, stop in sequences)
    ):
        return torch.from_numpy(chain)  # no term was added, so even a NaN keeps its bits
    return _finish(chain, None, out_dtype)


def addbmm_later(
    out: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, *, accumulate: bool, contract: str
) -> Later:
    """`addbmm` into ``out``. Chains start from +0, or from the values in ``out``."""
    expected = a.shape[0], a.shape[2], b.shape[3]
    if out.shape != expected:
        raise ValueError(f"samebits: out: expected shape {expected}, got {tuple(out.shape)}")
    acc = out if accumulate else None
    return partial(out.copy_, addbmm(acc, a, b, cu_seqlens, out_dtype=out.dtype, contract=contract))


def matmul_later(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, contract: str
) -> Later:
    """``a[M, K] @ b[K, N] (+ bias[N])`` into ``out``. Chains start from +0, or from the values in ``out``.

    All may have a batch dimension in front. Under TENSOR_CORE the parts of a chain must be cut at multiples
    of 16. A contract with segments takes no values to start from. The result is written immediately, because
    no user's tensor is passed as ``out``.
    """
    refuse_start(contract, accumulate)
    a, b, to = (t if t.ndim == 3 else t[None] for t in (a, b, out))
    start = _array(to, np.float32).copy() if accumulate else None
    to.copy_(_finish(_plain(a[:, None], b[:, None], contract, start), bias, out.dtype))
    return int


def tree_later(out: Tensor, partials: Tensor) -> Later:
    """Write the rounded sum of ``partials[S, M, N]``, float32, by pairs of neighbours into ``out[M, N]``.

    S is a power of two. ``out`` may be ``partials[0]``. The result is written immediately.
    """
    require_subnormals()
    out.copy_(_finish(_tree(_array(partials, np.float32))[None], None, out.dtype)[0])
    return int


def _plain(a: Tensor, b: Tensor, contract: str, start: _F32 | None = None) -> _F32:
    """The accumulators of ``a[B, 1, M, K] @ b[B, 1, K, N]``: a chain, or the tree of its segments."""
    (B, _, M, K), N = a.shape, b.shape[-1]
    bounds = segment_bounds(K, contract)
    partials = np.zeros((len(bounds) - 1, B, M, N), np.float32) if start is None else start[None]
    for partial_sum, span in zip(partials, itertools.pairwise(bounds), strict=True):
        carry_on(a, b, partial_sum, np.array([[0, *span]]), contract, closing_zero=False)
    return _tree(partials)


def _tree(partials: _F32) -> _F32:
    """The sum over the first dimension, pairs of neighbours first."""
    with np.errstate(all="ignore"):
        while len(partials) > 1:
            partials = partials[0::2] + partials[1::2]
    return cast(_F32, partials[0])


def rounded_later(out: Tensor, chain: Tensor) -> Later:
    """Write the rounded results of chains in ``chain[M, N]`` into ``out``, immediately."""
    out.copy_(rounded(chain, out.dtype))
    return int


def rounded(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """The results of chains in ``acc[M, N]``, rounded to `dtype`."""
    return _finish(_array(acc, np.float32)[None], None, dtype)[0]


def finished(acc: _F32, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The results of accumulators ``acc[M, N]``, with the bias, rounded to `dtype`."""
    return _finish(acc[None], bias, dtype)[0]


def carry_on(
    a: Tensor, b: Tensor, out: _F32, sequences: npt.NDArray[np.int64], contract: str, *, closing_zero: bool
) -> None:
    """Continue the chains in ``out[B, M, N]`` over `sequences` of ``a[B, S, M, K]`` and ``b[B, S, K, N]``.

    A row of `sequences` is ``(s, start, stop)``: index on the axis S, and range of k.
    """
    require_subnormals()
    model = contract_from_key(contract)
    if out.size == 0:
        return
    if out.shape[2] < kernels.TILE_N and out.shape[2] < out.shape[1]:
        # SIMD runs over columns, so the transpose is faster. Products commute and a fused sum has no order.
        # So C^T = B^T A^T bit for bit.
        a, b, out = b.transpose(-1, -2), a.transpose(-1, -2), out.transpose(0, 2, 1)
    arrays = _widen(a), _widen(b), out, sequences
    if model.step == "fma":
        run = partial(kernels.fma_chain_tiles, *arrays, closing_zero)
    else:
        mma = model.mma
        if mma is None or torch.float32 in (a.dtype, b.dtype):
            raise ValueError(
                f"samebits: contract {model}: expected one bound to a family, and operands of 16 or 8 bits"
            )
        data = mma.group, mma.fraction_bits, mma.zero_exponent, mma.significant_bits
        minima = _MINIMUM_EXPONENT[a.dtype], _MINIMUM_EXPONENT[b.dtype]
        run = partial(kernels.mma_chain_tiles, *arrays, *data, *minima)
    B, M, N = out.shape
    tiles = B * -(-M // kernels.TILE_M) * -(-N // kernels.TILE_N)
    terms = out.size * int((sequences[:, 2] - sequences[:, 1]).sum())
    threads = min(torch.get_num_threads(), tiles, 1 + terms // _TERMS_WORTH_A_THREAD)
    if threads == 1:
        run(0, tiles)
        return
    bounds = np.linspace(0, tiles, min(tiles, 8 * threads) + 1).astype(int).tolist()
    in_threads(run, bounds, threads)


def in_threads(run: Callable[[int, int], None], bounds: list[int], threads: int) -> None:
    """Run ``run(start, stop)`` for consecutive `bounds`, in `threads` threads."""
    # A pool for each operation costs 0.1 ms, and leaves no threads that a fork would break.
    with ThreadPoolExecutor(threads) as pool:
        try:
            pool.submit(int)
        except RuntimeError:  # the interpreter is shutting down
            run(bounds[0], bounds[-1])
        else:
            list(pool.map(run, bounds[:-1], bounds[1:]))


def require_subnormals() -> None:
    """Refuse to compute in a thread whose arithmetic flushes subnormals."""
    if not kernels.keeps_subnormals(_SUBNORMAL_PROBE):
        raise RuntimeError(
            "samebits: this thread flushes subnormals to zero, which changes bits; call"
            " torch.set_flush_denormal(False)"
        )


class _Memory:
    """A tensor's elements for numpy. After ``Tensor.numpy``, FSDP could not resize the storage."""

    def __init__(self, t: Tensor, dtype: type[np.generic]) -> None:
        self._tensor = t  # kept alive
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(dtype).str,
            "shape": tuple(t.shape),
            "strides": tuple(n * t.element_size() for n in t.stride()),
            "data": (t.data_ptr(), False),
        }


def _array(t: Tensor, dtype: type[np.generic]) -> Any:
    if t.numel() == 0:  # without an address, which numpy before 2.4 refuses
        return np.empty(t.shape, dtype)
    return np.asarray(_Memory(t, dtype))


def _widen(x: Tensor) -> _F32:
    widened: _F32 = _array(x.detach().to(torch.float32), np.float32)
    return widened


def _finish(acc: _F32, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Add the bias in f32 and round once to `out_dtype`."""
    finish, unsigned = _FINISH[out_dtype]
    out = torch.empty(acc.shape, dtype=out_dtype, device="cpu")
    rows = acc.reshape(acc.shape[0] * acc.shape[1], acc.shape[2])
    out_bits = _array(out, unsigned).reshape(rows.shape)
    finish(rows, np.empty(0, np.float32) if bias is None else _widen(bias), out_bits)
    return out
