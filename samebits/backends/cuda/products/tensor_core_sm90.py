"""Products of bf16 and f16 matrices on Hopper: host side of ``kernels/tensor_core_sm90.cu``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.products.choice_sm90 import candidates, choose, estimate, variations
from samebits.backends.cuda.products.gemm_sm90 import Gemm, reached
from samebits.backends.cuda.products.kinds_sm90 import catalogue
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule
from samebits.backends.cuda.tensor_maps import Maps, Side, operand_maps
from samebits.backends.product import LARGEST, Product, need, refuse_large

__all__ = [
    "EPILOGUE_TYPES",
    "LAYOUTS",
    "NO_MAP",
    "TENSOR_CORE_SM90",
    "Sm90Variant",
    "gemm",
    "in_units",
    "output_maps",
    "panel",
    "spec",
    "tables",
    "variant",
]

EPILOGUE_TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Types of outputs and biases, as in ``convert.cuh``."""

_PARAMS = "128s128s128sPPPqq8i"


@dataclass(frozen=True, slots=True)
class Sm90Variant:
    """The properties that a kernel is compiled for, besides its schedule.

    Attributes:
        a_mn, b_mn: whether the operand is contiguous along m or n, not along k.
        aligned: whether rows of the output consist of whole units of 16 bytes, see :func:`in_units`.
        folded: whether k is a multiple of 64, so that one box of a tensor map holds several columns of it.
        cu_seqlens_dtype: dtype of ``cu_seqlens``, if there are any.
        segments: of k, each a chain of its own: see :mod:`.segmented_sm90`.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    a_mn: bool
    b_mn: bool
    bias_dtype: torch.dtype | None = None
    accumulate: bool = False
    aligned: bool = True
    folded: bool = False
    cu_seqlens_dtype: torch.dtype | None = None
    segments: int = 1


def panel(variant: Sm90Variant, s: Sm90Schedule) -> int:
    """Columns that leave through shared memory at once; 0 if they leave from registers.

    Panels of 64 columns are also for outputs that TMA cannot write, if registers suffice. Transposed tiles of
    segments leave from registers: with panels they have not been timed.
    """
    if variant.out_dtype == torch.float32:
        return 0
    if s.swap:
        in_panels = variant.aligned and variant.segments == 1
        return s.swapped_panel(variant.b_mn, variant.a_mn) if in_panels else 0
    return s.panel if variant.aligned or (s.panel == 64 and variant.bias_dtype is None) else 0


def spec(variant: Sm90Variant, schedule: Sm90Schedule, *, beside: bool = False) -> compiler.KernelSpec:
    """The kernel of `variant` under `schedule`.

    With `beside`, it runs beside the kernel before it on the stream, which computes another part of the same
    output, and ends after it.
    """
    s = schedule
    a_mn, b_mn = (variant.b_mn, variant.a_mn) if s.swap else (variant.a_mn, variant.b_mn)
    columns = panel(variant, s)
    constants = {
        "INPUT_F16": int(variant.dtype == torch.float16),
        "A_MN": int(a_mn),
        "B_MN": int(b_mn),
        **s.constants(),
        "FOLDED": int(variant.folded and s.block_k > 64),
        "TRANSPOSED": int(s.swap),
        "OUTPUT": EPILOGUE_TYPES[variant.out_dtype],
        "BIAS": EPILOGUE_TYPES[variant.bias_dtype],
        "ACCUMULATE": int(variant.accumulate),
        "ALIGNED": int(variant.aligned),
        "PANEL": columns,
        "RAGGED": int(variant.cu_seqlens_dtype is not None),
        "BOUND": "long long" if variant.cu_seqlens_dtype == torch.int64 else "int",
        **({"BESIDE": 1} if beside else {}),
    }
    return compiler.KernelSpec(
        source="tensor_core_sm90.cu",
        entry="tensor_core_sm90",
        params=_PARAMS,
        constants=tuple(constants.items()),
        block=s.threads,
        smem=s.smem(columns, a_mn, b_mn),
        cluster=(s.cluster, 1, 1),
        programmatic=True,
    )


NO_MAP = bytes(128)


def _sides(p: Product) -> tuple[Side, Side]:
    return Side.of(p.a, -2, -1), Side.of(p.b, -1, -2)


def _output_strides(p: Product) -> tuple[int, int]:
    """Strides of rows and of matrices of the output. Of one row, or one matrix, a dense output's."""
    row = p.out.strides[-2] if p.m > 1 else -(-p.n // 8) * 8
    return row, p.out.strides[0] if p.batch > 1 else -(-row * p.m // 8) * 8


def in_units(dtype: torch.dtype, misalignment: int, *sizes: int) -> bool:
    """Whether an output consists of whole units of 16 bytes, at multiples of 16 bytes.

    Only then the copy engine can write it, or a thread 16 bytes of it at once.

    Args:
        sizes: how long its rows are, and its strides.
    """
    return misalignment == 0 and all(size * dtype.itemsize % 16 == 0 for size in sizes)


def variant(p: Product) -> Sm90Variant:
    """The variant that `p` needs."""
    aligned = in_units(p.out.dtype, p.out.misalignment, p.n, *_output_strides(p))
    a, b = _sides(p)
    return Sm90Variant(
        p.a.dtype,
        p.out.dtype,
        not a.k_major,
        not b.k_major,
        None if p.bias is None else p.bias.dtype,
        p.start == "out",
        aligned,
        p.k % 64 == 0,
        None if p.cu_seqlens is None else p.cu_seqlens.dtype,
    )


def gemm(p: Product) -> Gemm:
    """The product, in the form that schedules are chosen for."""
    a, b = _sides(p)
    moved = p.out.dtype.itemsize * (2 if p.start == "out" else 1)
    hbm = reached(devices.device_info(p.device).memory_rate)
    return Gemm(p.m, p.n, p.k, p.batch, not a.k_major, not b.k_major, moved, hbm)


class TensorCoreSm90Kernel(CudaKernel[Product, Sm90Schedule]):
    name, step = "tensor_core_sm90", "mma"

    @functools.cached_property
    def catalogue(self) -> Sequence[Sm90Schedule]:
        return tuple(dict.fromkeys(s for layout in LAYOUTS for s in catalogue(*layout)))

    def supports(self, p: Product) -> bool:
        """Whether TMA can read operands and output, and chains start from +0 or from the output."""
        if not (
            p.step == self.step
            and devices.device_info(p.device).arch.runs(self.name)
            and p.a.ndim < 4
            and not p.out.empty
            and p.k > 0
            and max(*p.a.shape, *p.b.shape, p.sequence_count) <= LARGEST
            and p.out.strides[-1] == 1
            and isinstance(p.start, str)
            and (p.bias is None or p.bias.strides[0] == 1 or p.n == 1)
            and p.a.misalignment == p.b.misalignment == 0
        ):
            return False
        sides = _sides(p)
        if any(side.k_major is None or side.batch % 8 for side in sides):
            return False
        return p.cu_seqlens is None or not any(side.k_major for side in sides)

    def all(self, p: Product) -> Sequence[Sm90Schedule]:
        a, b = _sides(p)
        return catalogue(not a.k_major, not b.k_major)

    def candidates(self, p: Product) -> Sequence[Sm90Schedule]:
        return candidates(gemm(p), devices.device_info(p.device).sm_count)

    def variations(self, p: Product, s: Sm90Schedule) -> Sequence[Sm90Schedule]:
        return variations(s, gemm(p))

    def choose(self, p: Product) -> Sm90Schedule:
        return choose(gemm(p), devices.device_info(p.device).sm_count)

    def cost(self, p: Product, s: Sm90Schedule) -> float:
        return estimate(s, gemm(p), devices.device_info(p.device).sm_count)

    def plan(self, p: Product, s: Sm90Schedule | None = None) -> CudaPlan:
        need(
            self.supports(p),
            f"{self.name}: expected matrices of 16 bits with terms, which TMA can read, on sm_90",
        )
        return self._plan(p, s or self.choose(p))

    def plan_beside(self, p: Product, s: Sm90Schedule) -> CudaPlan:
        """The plan of a launch right after one of :meth:`plan`, for another part of the same product."""
        return self._plan(p, s, beside=True)

    def _plan(self, p: Product, s: Sm90Schedule, *, beside: bool = False) -> CudaPlan:
        v, swap = variant(p), s.swap
        grid, a_maps, b_maps, out_maps, rest = tables(p, v, s)
        kernel = runtime.load(spec(v, s, beside=beside), p.device)

        def launch(a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
            tall, wide = a_maps[a], b_maps[b]
            if swap:  # the kernel's A is on the tall side of its tiles
                tall, wide = wide, tall
            out_map = NO_MAP if out_maps is None else out_maps[out]
            kernel.launch(grid, tall, wide, out_map, out, bias, cu_seqlens, *rest)

        return CudaPlan(launch, a_maps, b_maps, out_maps)


def tables(
    p: Product, v: Sm90Variant, s: Sm90Schedule
) -> tuple[tuple[int, int, int], Maps, Maps, Maps | None, tuple[int, ...]]:
    """The grid, the tensor maps of a, b and out, and the parameters that follow the addresses."""
    (a, b), swap = _sides(p), s.swap
    a_block, b_block = (s.block_n, s.block_m) if swap else (s.block_m, s.block_n)
    a_sharers, b_sharers = (1, s.cluster) if swap else (s.cluster, 1)
    how = v.folded and s.block_k > 64, s.l2_promotion
    matrices = max(x.shape[0] if x.ndim == 3 else 1 for x in (p.a, p.b))
    a_maps = operand_maps(v.dtype, a, matrices, v.a_mn, a_block, s.block_k, a_sharers, *how)
    b_maps = operand_maps(v.dtype, b, matrices, v.b_mn, b_block, s.block_k, b_sharers, *how)
    row_stride, batch_stride = _output_strides(p)
    out_maps = output_maps(v, s, (p.n, p.m, p.batch), (row_stride, batch_stride))
    rows, columns = (p.n, p.m) if swap else (p.m, p.n)
    batched = int(a.batch != 0), int(b.batch != 0)
    rest = (
        *(row_stride, batch_stride, rows, columns, p.k, p.batch),
        *(batched[::-1] if swap else batched),
        *(0 if p.cu_seqlens is None else p.sequence_count, s.group),
    )
    refuse_large(p, -(-rows // s.block_m) * -(-columns // (s.block_n * s.cluster)) * p.batch)
    grid = s.grid(rows, columns, p.batch, devices.device_info(p.device).sm_count)
    return grid, a_maps, b_maps, out_maps, rest


def output_maps(
    v: Sm90Variant, s: Sm90Schedule, sizes: tuple[int, int, int], strides: tuple[int, int]
) -> Maps | None:
    """The tensor maps of an output that TMA writes in panels; None if it does not.

    Args:
        sizes: columns, rows and matrices.
        strides: of rows and of matrices, in elements.
    """
    columns = panel(v, s)
    if not columns or not v.aligned:
        return None
    box = (64, columns, 1) if s.swap else (columns, 64, 1)
    return Maps(v.out_dtype, sizes, (2 * strides[0], 2 * strides[1]), box, 2 * box[0])


LAYOUTS = tuple(itertools.product((False, True), repeat=2))
TENSOR_CORE_SM90 = TensorCoreSm90Kernel()
