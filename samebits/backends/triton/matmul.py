"""Products on GPU tensors by Triton: chooses kernel and schedule, and launches. No choice changes a bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.backends import Step, UnavailableError, broadcast
from samebits.backends.triton import kernels, runtime
from samebits.contract import FAMILIES, FMA, Contract, contract_from_key


@dataclass(frozen=True, slots=True)
class Schedule:
    """How :func:`kernels.matmul` cuts the work.

    Attributes:
        block_m, block_n: a program's share of the output.
        block_k: k in a step of the loop; under FMA always 4.
        warps: in a program.
        stages: tiles in flight.
        group: rows of tiles that run side by side.
        us: microseconds that a multiprocessor takes for a tile over 4096 k, fitted to times on an H200;
            MMA_SCHEDULES have none.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    us: float = 0.0


@dataclass(frozen=True, slots=True)
class TileSchedule(Schedule):
    """How :func:`kernels.matmul_tiles` cuts the work.

    Attributes:
        swap: compute transposed tiles.
        persistent: one program for each multiprocessor takes tile after tile, fetching ahead across them.
        parts: in which a tile is written.
    """

    swap: bool = False
    persistent: bool = False
    parts: int = 1


TILE_SCHEDULES = (
    TileSchedule(128, 256, 64, 8, 4, us=38, persistent=True, parts=2),
    TileSchedule(128, 128, 64, 8, 6, us=23, swap=True),
    TileSchedule(64, 128, 128, 8, 4, us=18, swap=True),
    TileSchedule(128, 64, 128, 4, 4, us=16, swap=True),
    TileSchedule(64, 64, 128, 4, 6, us=9.2, swap=True),
    TileSchedule(32, 64, 256, 4, 4, us=6.6, swap=True),
    TileSchedule(16, 64, 256, 4, 4, us=5.7, swap=True),
)
MMA_SCHEDULES = (
    Schedule(128, 128, 64, 8, 3),
    Schedule(64, 64, 64, 4, 4),
    Schedule(64, 16, 128, 4, 3),
    Schedule(16, 64, 128, 4, 3),
)
FMA_SCHEDULES = (
    Schedule(128, 128, 4, 8, 3, us=660),
    Schedule(128, 64, 4, 8, 4, us=345),
    Schedule(64, 64, 4, 4, 6, us=181),
    Schedule(32, 32, 4, 2, 8, us=70),
    Schedule(16, 32, 4, 2, 12, us=55),
    Schedule(32, 16, 4, 2, 12, us=55),
)


def matmul(a: Tensor, b: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    """``a[*A, M, K] @ b[*B, K, N] (+ bias[N])`` with batch dimensions broadcast as in ``torch.matmul``."""
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    out = a.new_empty((*batch, M, N), dtype=out_dtype)
    B = batch.numel()
    if b.ndim == 2:  # one tall product: the rows of every batch share b
        a4, b4, out3 = a.reshape(1, 1, B * M, K), b[None, None], out.view(1, B * M, N)
    else:
        a4 = a.expand(*batch, M, K).reshape(B, 1, M, K)
        b4, out3 = b.expand(*batch, K, N).reshape(B, 1, K, N), out.view(B, M, N)
    run(a4, b4, out3, contract_from_key(contract), bias=bias)
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
    _run_sequences(a, b, out, acc, cu_seqlens, contract_from_key(contract))
    return out


def addbmm_later(
    out: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, *, accumulate: bool, contract: str
) -> Step:
    """`addbmm` into ``out``, from +0 or from what it holds. Triton compiles at its first launch of a kind."""
    acc = out if accumulate else None
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    return partial(_run_sequences, a, b, out, acc, cu_seqlens, contract_from_key(contract))


def matmul_later(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, contract: str
) -> Step:
    """``a[M, K] @ b[K, N] (+ bias[N])`` into ``out``: plain chains from +0 or from what it holds.

    Under TENSOR_CORE the parts of a chain must be cut at multiples of 16.
    """
    to = out[None]
    start = to if accumulate else None
    operands = a[None, None], b[None, None], to, contract_from_key(contract)
    return partial(run, *operands, acc=start, bias=bias)


def rounded_later(out: Tensor, chain: Tensor) -> Step:
    """The results, rounded, of the chains in ``chain[M, N]``, in which kernels left canonical NaN."""
    to = out[None]
    return partial(run, to[:, None, :, :0], to[:, None, :0], to, FMA, acc=chain[None])  # adds no term


def _run_sequences(
    a: Tensor, b: Tensor, out: Tensor, acc: Tensor | None, cu_seqlens: Tensor | None, contract: Contract
) -> None:
    B, S, M, K = a.shape
    if out is acc and (S == 0 or K == 0):
        check(contract, out.device)
        return  # no term was added: not even a NaN changes its bits
    together = B == 1 and S > 1 and a.stride(1) == K * a.stride(3) and b.stride(1) == K * b.stride(2)
    if together and K % 16 == 0 and S * K <= LARGEST and contract.step == "mma":
        # The sequences lie end to end in memory and end with full groups: one sequence.
        a = a.as_strided((1, 1, M, S * K), (0, 0, a.stride(2), a.stride(3)))
        b = b.as_strided((1, 1, S * K, b.shape[3]), (0, 0, b.stride(2), b.stride(3)))
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    run(a, b, out, contract, acc=acc, cu_seqlens=cu_seqlens, closing_zero=True)


def run(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    contract: Contract,
    *,
    acc: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    closing_zero: bool = False,
    schedule: Schedule | None = None,
) -> None:
    """``out = acc + sum over s, k of a[:, s, :, k] * b[:, s, k, :] + bias``, the chains of `contract`.

    Args:
        a: ``[B, S, M, K]``, any strides.
        b: ``[B, S, K, N]``.
        out: ``[B, M, N]``, float32, bfloat16 or float16.
        acc: float32, where the chains start, with the shape and strides of ``out``, which it may be.
        bias: ``[N]``.
        cu_seqlens: int32 or int64 ``[sequences + 1]``: bounds in k, with S = 1.
        closing_zero: under FMA, end every sequence that has a term with a zero term.
        schedule: a :class:`TileSchedule` where :func:`takes_tiles` and it :func:`fits`, or a
            :class:`Schedule`; by default the one that should be fastest.
    """
    check(contract, out.device)
    (B, S, M, K), N = a.shape, b.shape[3]
    if contract.step == "mma" and torch.float32 in (a.dtype, b.dtype):
        raise ValueError(f"contract {contract}: expected 16-bit operands, got {a.dtype} and {b.dtype}")
    if cu_seqlens is not None:
        S = cu_seqlens.numel() - 1
    if max(M, N, K, S, B * -(-M // 16) * -(-N // 16)) > LARGEST:  # tiles have 16 rows and columns at least
        raise ValueError(
            f"samebits: a product of a {tuple(a.shape)} by b {tuple(b.shape)} has a size above {LARGEST}"
        )
    if out.numel() == 0:
        return
    if schedule is None:
        if contract.step == "mma" and cu_seqlens is None and takes_tiles(a, b, out, acc, bias):
            schedule = choose_tiles(M, N, out.element_size(), acc is not None, out.device)
        else:
            choose = choose_fma if contract.step == "fma" else choose_mma
            schedule = choose(M, N, B, _gpu(out.device).multiprocessors)
    with torch.cuda.device_of(out):
        if isinstance(schedule, TileSchedule):
            _launch_tiles(schedule, a[0, 0], b[0, 0], out[0], bias, acc is not None)
        else:
            _launch(schedule, contract, a, b, out, acc, bias, cu_seqlens, S, closing_zero)


LARGEST = 2**31 - 2048
"""Sizes up to this can be counted in 32 bits, and rounded up to all the tiles that are in flight at once."""


@functools.cache
def check(contract: Contract, device: torch.device) -> None:
    """Refuse a contract that the matrix unit of `device` does not follow."""
    if contract.step == "fma" or device.type == "cpu":  # Triton's interpreter has no matrix unit
        return
    p: Any = torch.cuda.get_device_properties(device)
    family = None if torch.version.hip else FAMILIES.get((p.major, p.minor))
    if family is None:
        raise UnavailableError(
            f"samebits: it is not known which bits the matrix unit of {p.name} gives, so {contract.name} has"
            " no MmaModel for it; contract=samebits.FMA works on it"
        )
    if contract.mma not in (None, family):
        raise ValueError(
            f"samebits: contract {contract}: expected the family of {p.name}, {family.name};"
            " CPU tensors follow any family"
        )


class _Gpu(NamedTuple):
    """What schedules depend on."""

    multiprocessors: int
    shared_memory: int
    """Bytes that a program's tiles may take, the last kilobyte being for barriers."""
    fetches_tiles: bool
    """Whether it has a copy engine for tiles; Triton would emulate it elsewhere, slowly."""
    third_half: bool = False
    """Whether an output that is written in two parts takes the shared memory of three, as on sm_100."""


@functools.cache
def _gpu(device: torch.device) -> _Gpu:
    if device.type == "cpu":  # Triton's interpreter
        return _Gpu(1, 1 << 18, True)
    p: Any = torch.cuda.get_device_properties(device)
    hopper = torch.version.hip is None and p.major >= 9
    shared_memory = p.shared_memory_per_block_optin - 1024 if hopper else 0
    return _Gpu(p.multi_processor_count, shared_memory, hopper, hopper and p.major == 10)


def takes_tiles(a: Tensor, b: Tensor, out: Tensor, acc: Tensor | None, bias: Tensor | None) -> bool:
    """Whether :func:`kernels.matmul_tiles` takes these operands of :func:`run`."""
    return (
        a.shape[:2] == b.shape[:2] == (1, 1)
        and a.shape[3] > 0
        and _gpu(out.device).fetches_tiles
        and _k_major(a[0, 0]) is not None
        and _k_major(b[0, 0].mT) is not None
        and out.stride(2) == 1
        and _rows_are_aligned(out[0])
        and out.shape[2] * out.element_size() % 16 == 0  # the copy engine may write whole 16 bytes
        and (acc is None or acc is out)
        and (bias is None or bias.is_contiguous())
    )


def fetches_rows(x: Tensor) -> bool:
    """Whether the copy engine can fetch tiles of ``x[rows, k]``, with k contiguous."""
    return _gpu(x.device).fetches_tiles and _k_major(x) is True


def _k_major(x: Tensor) -> bool | None:
    """Whether ``x[row, k]`` can be fetched with k contiguous, or else rows, or neither (None)."""
    if (x.stride(1) == 1 or x.shape[1] == 1) and _rows_are_aligned(x):
        return True
    if (x.stride(0) == 1 or x.shape[0] == 1) and _rows_are_aligned(x.mT):
        return False
    return None


def _rows_are_aligned(x: Tensor) -> bool:
    pitch = x.stride(0) * x.element_size()
    return x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or (pitch % 16 == 0 and pitch > 0))


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For tiles of ``x[rows, columns]``, whose columns are contiguous."""
    if x.is_cuda:
        runtime.bind(x.get_device())
    pitch = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] // 8) * 8  # a single row's may be anything
    return TensorDescriptor(x, list(x.shape), [pitch, 1], [rows, columns])


@functools.lru_cache(maxsize=1024)
def _stages(s: TileSchedule, element_size: int, accumulate: bool, gpu: _Gpu) -> int:
    """As many as fit beside a part of the output, and all the accumulators that come in."""
    area = s.block_m * s.block_n
    results = area * element_size // s.parts + area * 4 * accumulate
    if gpu.third_half and s.parts == 2:
        results += area * element_size // 4
    return min(s.stages, (gpu.shared_memory - results) // ((s.block_m + s.block_n) * s.block_k * 2))


def fits(s: TileSchedule, element_size: int, accumulate: bool, device: torch.device) -> bool:
    """Whether two tiles of each operand can be in flight, with an output of such elements."""
    return _stages(s, element_size, accumulate, _gpu(device)) >= 2


def _launch_tiles(
    s: TileSchedule, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, accumulate: bool
) -> None:
    (m, n), k = out.shape, a.shape[1]
    a_k_major, b_k_major = _k_major(a), _k_major(b.mT)
    kernels.matmul_tiles[programs(s, m, n, out.device)](
        descriptor(a, s.block_m, s.block_k) if a_k_major else descriptor(a.mT, s.block_k, s.block_m),
        descriptor(b.mT, s.block_n, s.block_k) if b_k_major else descriptor(b, s.block_k, s.block_n),
        bias,
        descriptor(out, s.block_m, s.block_n // s.parts),
        m,
        n,
        k,
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        ACCUMULATE=accumulate,
        PARTS=s.parts,
        **tile_constants(s, out.element_size(), accumulate, out.device),
    )


def programs(s: TileSchedule, m: int, n: int, device: torch.device) -> tuple[int]:
    """The grid for an output of m by n."""
    tiles = -(-m // s.block_m) * -(-n // s.block_n)
    return (min(tiles, _gpu(device).multiprocessors) if s.persistent else tiles,)


def tile_constants(
    s: TileSchedule, element_size: int, accumulate: bool, device: torch.device
) -> dict[str, Any]:
    """What a kernel of tiles is compiled for."""
    stages = _stages(s, element_size, accumulate, _gpu(device))
    return {"SWAP": s.swap, "FLATTEN": s.persistent, **_constants(s), "num_stages": stages}


def _launch(
    s: Schedule,
    contract: Contract,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    acc: Tensor | None,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    sequences: int,
    closing_zero: bool,
) -> None:
    B, M, N = out.shape
    kernels.matmul[(-(-M // s.block_m) * -(-N // s.block_n) * B,)](
        a,
        b,
        acc,
        bias,
        cu_seqlens,
        out,
        M,
        N,
        a.shape[3],
        sequences,
        *_strides(a),
        *_strides(b),
        *_strides(out),
        0 if bias is None else bias.stride(0),
        FMA=contract.step == "fma",
        CLOSING_ZERO=closing_zero,
        A_ALONG=_along(a),
        B_ALONG=_along(b.mT),
        STAGES=s.stages,
        **_constants(s),
    )


def _constants(s: Schedule) -> dict[str, Any]:
    return {
        "BLOCK_M": s.block_m,
        "BLOCK_N": s.block_n,
        "BLOCK_K": s.block_k,
        "GROUP": s.group,
        "num_warps": s.warps,
        "num_stages": s.stages,
        "enable_fp_fusion": False,  # a product and a sum stay two roundings; kernels say tl.fma
    }


def _strides(x: Tensor) -> list[int]:
    """0 for a dimension of one, whose stride may be anything."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _along(x: Tensor) -> str:
    """Along what dimension of ``x[B, S, row, k]`` 16-byte pieces lie in memory."""
    batch, sequence, row, k = _strides(x)
    rows, ks = x.shape[2:]
    if x.data_ptr() % 16 == batch % 8 == sequence % 8 == 0:
        if k == 1 and row % 8 == ks % 8 == 0:
            return "k"
        if row == 1 and k % 8 == rows % 8 == 0:
            return "row"
    return ""


def choose_mma(m: int, n: int, batch: int, sms: int) -> Schedule:
    """The largest tiles that are not mostly padding and give every multiprocessor one, else the smallest."""
    full = [s for s in MMA_SCHEDULES if s.block_m <= 2 * max(m, 8) and s.block_n <= 2 * max(n, 8)]
    busy = (s for s in full if -(-m // s.block_m) * -(-n // s.block_n) * batch >= sms)
    return next(busy, (full or MMA_SCHEDULES)[-1])


def choose_fma(m: int, n: int, batch: int, sms: int) -> Schedule:
    """The schedule whose rounds of tiles, one for each multiprocessor at a time, take the least time."""
    return min(FMA_SCHEDULES, key=lambda s: _time(s, m, n, batch, sms))


def _time(s: Schedule, m: int, n: int, batch: int, sms: int) -> float:
    tiles = -(-m // s.block_m) * -(-n // s.block_n) * batch
    return -(-tiles // sms) * s.us


@functools.lru_cache(maxsize=4096)
def choose_tiles(
    m: int,
    n: int,
    element_size: int,
    accumulate: bool,
    device: torch.device,
    offered: Sequence[TileSchedule] = TILE_SCHEDULES,
) -> TileSchedule:
    """As :func:`choose_fma`, of those that fit."""
    sms = _gpu(device).multiprocessors
    return min(
        (s for s in offered if s.block_m <= 2 * max(m, 8) and fits(s, element_size, accumulate, device)),
        key=lambda s: _time(s, m, n, 1, sms),
    )
