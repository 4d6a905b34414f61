"""The product kernels in Triton, and their plans."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from samebits.backends.kernel import Kernel, Step
from samebits.backends.product import Matrix, Operands, Product, need, refuse_large
from samebits.backends.replay import refuse
from samebits.backends.triton import kernels, runtime, tiles
from samebits.backends.triton.tiles import TileSchedule, TritonSchedule

__all__ = [
    "FMA",
    "FMA_SCHEDULES",
    "MMA_SCHEDULES",
    "PRODUCTS",
    "TENSOR_CORE",
    "TENSOR_CORE_TILES",
    "TILE_SCHEDULES",
    "TritonKernel",
    "TritonPlan",
]

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
    TritonSchedule(128, 128, 64, 8, 3),
    TritonSchedule(64, 64, 64, 4, 4),
    TritonSchedule(64, 16, 128, 4, 3),
    TritonSchedule(16, 64, 128, 4, 3),
)
FMA_SCHEDULES = (
    TritonSchedule(128, 128, 4, 8, 3, us=660),
    TritonSchedule(128, 64, 4, 8, 4, us=345),
    TritonSchedule(64, 64, 4, 4, 6, us=181),
    TritonSchedule(32, 32, 4, 2, 8, us=70),
    TritonSchedule(16, 32, 4, 2, 12, us=55),
    TritonSchedule(32, 16, 4, 2, 12, us=55),
)

S = TypeVar("S", bound=TritonSchedule)


class TritonPlan:
    """A :class:`samebits.backends.product.Plan` of a Triton kernel."""

    __slots__ = ("_device", "_launch")

    def __init__(self, device: int, launch: Callable[[Operands], object]) -> None:
        self._device, self._launch = device, launch

    def run(self, x: Operands) -> None:
        """Run on these operands. Compiles the kernel if it has not been launched before."""
        refuse("launches of Triton's are not seen")
        with torch.cuda.device(self._device):
            self._launch(x)


class TritonKernel(Kernel[Product, S]):
    """A product kernel in Triton, which compiles it at the first launch.

    Attributes:
        takes: the supported products, for error messages.
    """

    can_precompile = False
    takes: str

    def plan(self, p: Product, s: S | None = None) -> TritonPlan:
        dtypes = f"{p.a.dtype} and {p.b.dtype}"
        need(self.supports(p), f"{self.name}: expected {self.takes}, got {dtypes} in {p}")
        refuse_large(p, p.batch * -(-p.m // 16) * -(-p.n // 16))  # tiles have 16 rows and columns at least
        launch = _nothing if p.out.empty else self._launch(p, s or self.choose(p))
        return TritonPlan(p.device, launch)

    @abc.abstractmethod
    def _launch(self, p: Product, s: S) -> Callable[[Operands], object]:
        """A function that launches the kernel on operands of `p`."""


def _nothing(x: Operands) -> None:
    """The launch of a product without elements."""


class GeneralKernel(TritonKernel[TritonSchedule]):
    """``kernels.matmul``, which takes every layout, stride, alignment and size.

    The values that chains start from must have the strides of the output.
    """

    def __init__(self, name: str, step: Step, schedules: Sequence[TritonSchedule]) -> None:
        self.name, self.step, self._schedules = name, step, schedules
        self.takes = ("16-bit operands and " if step == "mma" else "") + "a start laid out as out"

    @property
    def catalogue(self) -> Sequence[TritonSchedule]:
        return self._schedules

    def supports(self, p: Product) -> bool:
        alike = isinstance(p.start, str) or _strides(p.start) == _strides(p.out)
        sixteen_bits = p.a.dtype == p.b.dtype != torch.float32  # tl.dot would use TF32 for float32
        return p.step == self.step and alike and (sixteen_bits or p.step == "fma")

    def choose(self, p: Product) -> TritonSchedule:
        gpu = runtime.gpu(p.device)
        if p.step == "fma":
            return tiles.least_time(self.catalogue, p.m, p.n, p.batch, gpu)
        # The largest tiles that are not mostly padding and keep all multiprocessors busy, or the smallest.
        some = [s for s in self.catalogue if s.block_m <= 2 * max(p.m, 8) and s.block_n <= 2 * max(p.n, 8)]
        busy = (s for s in some if s.tiles(p.m, p.n) * p.batch >= gpu.multiprocessors)
        return next(busy, (some or self.catalogue)[-1])

    def cost(self, p: Product, s: TritonSchedule) -> float:
        us = s.us or s.block_m * s.block_n * 4096 / _PAIRS_A_MICROSECOND
        return s.rounds(p.m, p.n, p.batch, runtime.gpu(p.device)) * us * max(1, p.k) / 4096

    def _launch(self, p: Product, s: TritonSchedule) -> Callable[[Operands], object]:
        a, b = _operand(p.a, -2, -1), _operand(p.b, -1, -2)
        a_strides, b_strides = a.strides, (*b.strides[:2], b.strides[3], b.strides[2])
        bias_stride = 0 if p.bias is None else p.bias.strides[0]
        sizes = p.m, p.n, p.k, p.sequence_count, *a_strides, *b_strides, *_strides(p.out), bias_stride
        constants = {
            "FMA": p.step == "fma",
            "CLOSING_ZERO": p.sequences,
            "A_ALONG": a.along,
            "B_ALONG": b.along,
            "STAGES": s.stages,
            **s.constants,
        }
        kernel = kernels.matmul[(s.tiles(p.m, p.n) * p.batch,)]

        def launch(x: Operands) -> None:
            kernel(x.a, x.b, x.start, x.bias, x.cu_seqlens, x.out, *sizes, **constants)

        return launch


_PAIRS_A_MICROSECOND = 3.7e6
"""The most products that the matrix unit of one multiprocessor of an H200 adds in a microsecond."""


class TileKernel(TritonKernel[TileSchedule]):
    """``kernels.matmul_tiles``: products without sequences, of operands that the copy engine can fetch."""

    name, step = "triton matmul_tiles", "mma"
    takes = "matrices of 16 bits with terms, which the copy engine can fetch"

    @property
    def catalogue(self) -> Sequence[TileSchedule]:
        return TILE_SCHEDULES

    def supports(self, p: Product) -> bool:
        """One product with K > 0, of matrices that the GPU's copy engine can fetch."""
        return (
            TENSOR_CORE.supports(p)
            and p.batch == p.sequence_count == 1
            and p.cu_seqlens is None
            and p.k > 0
            and runtime.gpu(p.device).fetches_tiles
            and any(tiles.moves_along(p.a, inner) for inner in (-1, -2))
            and any(tiles.moves_along(p.b, inner) for inner in (-1, -2))
            and tiles.moves_along(p.out, -1)
            and p.n * p.out.dtype.itemsize % 16 == 0  # the copy engine writes multiples of 16 bytes
            and isinstance(p.start, str)
            and (p.bias is None or p.bias.strides[0] == 1)
        )

    def all(self, p: Product) -> Sequence[TileSchedule]:
        return [s for s in TILE_SCHEDULES if tiles.fits(s, *_held(p))]

    def choose(self, p: Product) -> TileSchedule:
        return tiles.choose_tiles(p.m, p.n, *_held(p), TILE_SCHEDULES)

    def cost(self, p: Product, s: TileSchedule) -> float:
        return s.rounds(p.m, p.n, 1, runtime.gpu(p.device)) * s.us * p.k / 4096

    def _launch(self, p: Product, s: TileSchedule) -> Callable[[Operands], object]:
        a_k_major, b_k_major = tiles.moves_along(p.a, -1), tiles.moves_along(p.b, -2)
        a = tiles.descriptors(p.a, s.block_m, s.block_k, turned=not a_k_major)
        b = tiles.descriptors(p.b, s.block_k, s.block_n, turned=b_k_major)
        out = tiles.descriptors(p.out, s.block_m, s.block_n // s.parts)
        sizes = p.m, p.n, p.k
        constants = {
            "A_K_MAJOR": a_k_major,
            "B_K_MAJOR": b_k_major,
            "ACCUMULATE": p.start == "out",
            "PARTS": s.parts,
            **tiles.tile_constants(s, *_held(p)),
        }
        kernel = kernels.matmul_tiles[tiles.programs(s, p.m, p.n, runtime.gpu(p.device))]

        def launch(x: Operands) -> None:
            kernel(a(x.a), b(x.b), x.bias, out(x.out), *sizes, **constants)

        return launch


def _held(p: Product) -> tuple[int, bool, runtime.Gpu]:
    """Facts that decide which tiles fit: bytes of a result, whether accumulators are read, and the GPU."""
    return p.out.dtype.itemsize, p.start == "out", runtime.gpu(p.device)


def _strides(x: Matrix) -> list[int]:
    """Strides of batch, row and column. 0 for a dimension of size one, whose stride may be anything."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]
    return [0] * (3 - x.ndim) + strides


class _Operand(NamedTuple):
    """Strides of an operand's batch, sequence, row and k, and the dimension of contiguous 16-byte pieces.

    "row" is m of a, n of b. `along` is "k", "row", or neither ("").
    """

    strides: tuple[int, int, int, int]
    along: str


def _operand(x: Matrix, row_dim: int, k_dim: int) -> _Operand:
    lead = [0 if size == 1 else stride for size, stride in zip(x.shape[:-2], x.strides, strict=False)]
    batch, sequence = (*lead, 0, 0)[:2]
    rows, ks = x.shape[row_dim], x.shape[k_dim]
    row, k = (0 if x.shape[d] == 1 else x.strides[d] for d in (row_dim, k_dim))
    along = ""
    if x.misalignment == batch % 8 == sequence % 8 == 0:
        if k == 1 and row % 8 == ks % 8 == 0:
            along = "k"
        elif row == 1 and k % 8 == rows % 8 == 0:
            along = "row"
    return _Operand((batch, sequence, row, k), along)


TENSOR_CORE = GeneralKernel("triton matmul", "mma", MMA_SCHEDULES)
TENSOR_CORE_TILES = TileKernel()
FMA = GeneralKernel("triton matmul, FMA", "fma", FMA_SCHEDULES)
PRODUCTS: tuple[TritonKernel[Any], ...] = (TENSOR_CORE, TENSOR_CORE_TILES, FMA)
"""All product kernels."""
