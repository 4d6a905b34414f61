"""Host side of ``kernels/matmul_sm90.cu``: products of bf16 and f16 matrices on Hopper."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import runtime
from .matmul_sm80 import LARGEST
from .schedule import Product, Schedule, choose

__all__ = ["Case", "Plan", "matmul", "plan", "spec", "supports"]

TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_PARAMS = "128s128s128sPPPqq8i"


@dataclass(frozen=True, slots=True)
class Case:
    """What a compiled kernel is specialised to, besides its schedule."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    a_mn: bool
    b_mn: bool
    bias_dtype: torch.dtype | None = None
    accumulate: bool = False
    aligned: bool = True
    folded: bool = False
    bounds_dtype: torch.dtype | None = None


def spec(case: Case, schedule: Schedule) -> runtime.KernelSpec:
    """The kernel of ``case`` under ``schedule``."""
    s = schedule
    a_mn, b_mn = (case.b_mn, case.a_mn) if s.swap else (case.a_mn, case.b_mn)
    panel = s.panel if case.aligned and case.out_dtype != torch.float32 else 0
    constants = {
        "INPUT_F16": int(case.dtype == torch.float16),
        "A_MN": int(a_mn),
        "B_MN": int(b_mn),
        **s.constants(),
        "FOLDED": int(case.folded and s.block_k > 64),
        "TRANSPOSED": int(s.swap),
        "OUTPUT": TYPES[case.out_dtype],
        "BIAS": TYPES[case.bias_dtype],
        "ACCUMULATE": int(case.accumulate),
        "ALIGNED": int(case.aligned),
        "PANEL": panel,
        "RAGGED": int(case.bounds_dtype is not None),
        "BOUND": "long long" if case.bounds_dtype == torch.int64 else "int",
    }
    return runtime.KernelSpec(
        source="matmul_sm90.cu",
        entry="matmul_sm90",
        params=_PARAMS,
        constants=tuple(constants.items()),
        block=s.threads,
        smem=s.smem(panel, a_mn, b_mn),
        cluster=(s.cluster, 1, 1),
        programmatic=True,
    )


def _k_major(rows: int, k: int, row_stride: int, k_stride: int) -> bool | None:
    """Whether an operand is contiguous along k (or else along its rows); None if TMA cannot read it."""
    if (k_stride == 1 or k == 1) and (rows == 1 or (row_stride > 0 and row_stride % 8 == 0)):
        return True
    if (row_stride == 1 or rows == 1) and (k == 1 or (k_stride > 0 and k_stride % 8 == 0)):
        return False
    return None


def _operand(x: Tensor, rows: int, k: int) -> tuple[int, int, int, int, int]:
    """Rows, k and strides in elements (of the batch, of a row, of k)."""
    batch = x.stride(0) if x.dim() == 3 and x.shape[0] > 1 else 0
    return x.shape[rows], x.shape[k], batch, x.stride(rows), x.stride(k)


def supports(a: Tensor, b: Tensor, *, cu_seqlens: Tensor | None = None) -> bool:
    """Whether :func:`matmul` takes these operands; the universal kernel takes all others."""
    majors = []
    for x, (rows, k, batch, row_stride, k_stride) in ((a, _operand(a, -2, -1)), (b, _operand(b, -1, -2))):
        major = _k_major(rows, k, row_stride, k_stride)
        if major is None or batch % 8 or x.data_ptr() % 16:
            return False
        majors.append(major)
    return cu_seqlens is None or not any(majors)


_MOST_MAPS = 4096


class Maps(dict[int, bytes]):
    """The tensor maps of one geometry, by address."""

    __slots__ = ("_recipe",)

    def __init__(self, *recipe: Any) -> None:
        self._recipe = recipe  # what runtime.tensor_map takes after the address

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MOST_MAPS:
            self.clear()
        made = self[address] = runtime.tensor_map(address, *self._recipe)
        return made


def operand_maps(
    dtype: torch.dtype,
    layout: tuple[int, int, int, int, int],
    batch: int,
    mn: bool,
    block: int,
    depth: int,
    sharers: int,
    folded: bool,
    l2_promotion: int,
) -> Maps:
    """One operand as the kernel's tensor map sees it."""
    rows, k, batch_stride, row_stride, k_stride = layout
    inner, outer, stride = (rows, k, k_stride) if mn else (k, rows, row_stride)
    stride = stride if outer > 1 else -(-inner // 8) * 8
    batch = batch if batch_stride else 1
    batch_stride = batch_stride or -(-stride * outer // 8) * 8
    columns = depth // 64
    if folded and not mn and columns % sharers == 0:
        shape = (64, outer, inner // 64, batch)
        strides = (stride * 2, 128, batch_stride * 2)
        return Maps(dtype, shape, strides, (64, block, columns // sharers, 1), 128, l2_promotion)
    strides = (stride * 2, batch_stride * 2, batch_stride * 2)
    width = 32 if mn and block % 64 else 64
    box = (width, (depth if mn else block) // sharers, 1, 1)
    return Maps(dtype, (inner, outer, 1, batch), strides, box, width * 2, l2_promotion)


class Plan:
    """Everything about a call but its addresses."""

    __slots__ = ("a", "b", "grid", "kernel", "out", "rest", "swap")

    def __init__(
        self,
        case: Case,
        a: tuple[int, int, int, int, int],
        b: tuple[int, int, int, int, int],
        out: tuple[int, int],
        batch: int,
        sequences: int,
        device: int,
        schedule: Schedule | None,
    ) -> None:
        (m, k, a_batch, *_), (n, _, b_batch, *_) = a, b
        info = runtime.device_info(device)
        moved = case.out_dtype.itemsize * (2 if case.accumulate else 1)
        s = schedule or choose(Product(m, n, k, batch, case.a_mn, case.b_mn, moved), info.sm_count)
        a_block, b_block = (s.block_n, s.block_m) if s.swap else (s.block_m, s.block_n)
        a_sharers, b_sharers = (1, s.cluster) if s.swap else (s.cluster, 1)
        folded = case.folded and s.block_k > 64
        how = folded, s.l2_promotion
        self.a = operand_maps(case.dtype, a, batch, case.a_mn, a_block, s.block_k, a_sharers, *how)
        self.b = operand_maps(case.dtype, b, batch, case.b_mn, b_block, s.block_k, b_sharers, *how)
        self.swap = s.swap
        self.out: Maps | None = None
        row_stride, batch_stride = out
        if case.aligned and case.out_dtype != torch.float32 and s.panel:
            strides = (row_stride * 2, batch_stride * 2)
            self.out = Maps(case.out_dtype, (n, m, batch), strides, (s.panel, 64, 1), s.panel * 2)
        rows, columns = (n, m) if s.swap else (m, n)
        if -(-rows // s.block_m) * -(-columns // (s.block_n * s.cluster)) * batch > LARGEST:
            raise ValueError(
                f"samebits: {batch} products of [{m}, {k}] by [{k}, {n}] have more than {LARGEST} tiles"
            )
        self.grid = s.grid(rows, columns, batch, info.sm_count)
        flags = (int(a_batch != 0), int(b_batch != 0))
        self.rest = (
            row_stride,
            batch_stride,
            rows,
            columns,
            k,
            batch,
            *(flags[::-1] if s.swap else flags),
            sequences,
            s.group,
        )
        self.kernel = runtime.load(spec(case, s), device)

    def launch(self, a: int, b: int, out: int, bias: int, cu_seqlens: int) -> None:
        """Run on operands at these addresses."""
        a_map, b_map = self.a[a], self.b[b]
        if self.swap:
            a_map, b_map = b_map, a_map
        out_map = _NO_MAP if self.out is None else self.out[out]
        self.kernel.launch(self.grid, a_map, b_map, out_map, out, bias, cu_seqlens, *self.rest)


@functools.lru_cache(maxsize=4096)
def _plan(
    case: Case,
    a: tuple[int, int, int, int, int],
    b: tuple[int, int, int, int, int],
    out: tuple[int, int],
    batch: int,
    sequences: int,
    device: int,
    schedule: Schedule | None,
) -> Plan:
    return Plan(case, a, b, out, batch, sequences, device, schedule)


_NO_MAP = bytes(128)


def plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    cu_seqlens: Tensor | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """How :func:`matmul` runs these operands, and others of their shapes, strides, dtypes and alignment."""
    a_layout, b_layout = _operand(a, -2, -1), _operand(b, -1, -2)
    address, row_stride = out.data_ptr(), out.stride(-2)
    batch, batch_stride = (out.shape[0], out.stride(0)) if out.dim() == 3 else (1, 0)
    batch_stride = batch_stride if batch > 1 else -(-row_stride * out.shape[-2] // 8) * 8
    step = 2 if out.dtype == torch.float32 else 8
    aligned = address % 8 == 0 and row_stride % step == 0 and batch_stride % step == 0
    if step == 8:  # the copy engine writes whole 16 bytes, into what follows a row too
        aligned = aligned and address % 16 == 0 and out.shape[-1] % 8 == 0
    case = Case(
        a.dtype,
        out.dtype,
        not _k_major(*a_layout[:2], *a_layout[3:]),
        not _k_major(*b_layout[:2], *b_layout[3:]),
        None if bias is None else bias.dtype,
        accumulate,
        aligned,
        a_layout[1] % 64 == 0,
        None if cu_seqlens is None else cu_seqlens.dtype,
    )
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _plan(
        case, a_layout, b_layout, (row_stride, batch_stride), batch, sequences, a.get_device(), schedule
    )


def matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    cu_seqlens: Tensor | None = None,
    schedule: Schedule | None = None,
) -> None:
    """``out = a @ b + bias``, one chain over ascending k for each element.

    Args:
        a: ``[M, K]`` or ``[batch, M, K]``, bf16 or f16.
        b: ``[K, N]`` or ``[batch, K, N]``, same dtype.
        out: ``[M, N]`` or ``[batch, M, N]``, rows contiguous; bf16, f16 or f32.
        bias: ``[N]``.
        accumulate: start each chain from ``out``, which is f32.
        cu_seqlens: int32 or int64 bounds of sequences along K, each of which starts a new group of 16.
        schedule: instead of the default choice. Never changes a bit.
    """
    plan(a, b, out, bias=bias, accumulate=accumulate, cu_seqlens=cu_seqlens, schedule=schedule).launch(
        a.data_ptr(),
        b.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
    )
