"""Tile schedules of Triton's kernels, and tensor descriptors for the copy engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.backends.product import Matrix
from samebits.backends.triton import runtime
from samebits.backends.triton.runtime import Gpu


@dataclass(frozen=True, slots=True)
class TritonSchedule:
    """The schedule of :func:`kernels.matmul`.

    Attributes:
        block_m, block_n: a program's share of the output.
        block_k: k in a step of the loop; under FMA always 4.
        warps: warps in a program.
        stages: tiles in flight.
        group: rows of tiles that run side by side.
        us: microseconds that a multiprocessor takes for a tile over 4096 k, fitted to times on an H200.
            MMA_SCHEDULES have none.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    us: float = 0.0

    def tiles(self, m: int, n: int) -> int:
        """Tiles in an output of m by n."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def rounds(self, m: int, n: int, batch: int, gpu: Gpu) -> int:
        """The most tiles that one multiprocessor takes, one after another."""
        return -(-self.tiles(m, n) * batch // gpu.multiprocessors)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of every kernel."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": False,  # a product and a sum stay two roundings; kernels call tl.fma
        }


@dataclass(frozen=True, slots=True)
class TileSchedule(TritonSchedule):
    """The schedule of :func:`kernels.matmul_tiles`.

    Attributes:
        swap: compute transposed tiles.
        persistent: one program for each multiprocessor takes tile after tile, and prefetches across tiles.
        parts: number of parts in which a tile is written.
    """

    swap: bool = False
    persistent: bool = False
    parts: int = 1


S = TypeVar("S", bound=TritonSchedule)


def least_time(schedules: Sequence[S], m: int, n: int, batch: int, gpu: Gpu) -> S:
    """The schedule with the least time for its rounds. A round is one tile for each multiprocessor."""
    return min(schedules, key=lambda s: s.rounds(m, n, batch, gpu) * s.us)


@functools.lru_cache(maxsize=4096)
def choose_tiles(
    m: int, n: int, element_size: int, accumulate: bool, gpu: Gpu, offered: Sequence[TileSchedule]
) -> TileSchedule:
    """The schedule with :func:`least_time` among those that fit and are not mostly padding."""
    some = [s for s in offered if s.block_m <= 2 * max(m, 8) and fits(s, element_size, accumulate, gpu)]
    return least_time(some, m, n, 1, gpu)


@functools.lru_cache(maxsize=1024)
def _stages(s: TileSchedule, element_size: int, accumulate: bool, gpu: Gpu) -> int:
    """As many stages as fit beside a part of the output, and all the accumulators that are read."""
    area = s.block_m * s.block_n
    results = area * element_size // s.parts + area * 4 * accumulate
    if gpu.third_half and s.parts == 2:
        results += area * element_size // 4
    return min(s.stages, (gpu.shared_memory - results) // ((s.block_m + s.block_n) * s.block_k * 2))


def fits(s: TileSchedule, element_size: int, accumulate: bool, gpu: Gpu) -> bool:
    """Whether two tiles of each operand can be in flight, with elements of the output of this size."""
    return _stages(s, element_size, accumulate, gpu) >= 2


def programs(s: TileSchedule, m: int, n: int, gpu: Gpu) -> tuple[int]:
    """The grid for an output of m by n."""
    tiles = s.tiles(m, n)
    return (min(tiles, gpu.multiprocessors) if s.persistent else tiles,)


def tile_constants(s: TileSchedule, element_size: int, accumulate: bool, gpu: Gpu) -> dict[str, Any]:
    """Compile-time constants of a kernel with tiles."""
    stages = _stages(s, element_size, accumulate, gpu)
    return {"SWAP": s.swap, "FLATTEN": s.persistent, **s.constants, "num_stages": stages}


def moves_along(x: Matrix, inner: int) -> bool:
    """Whether the copy engine can move tiles of `x`, contiguous along `inner`: dimension -1 or -2."""
    outer = -3 - inner
    pitch = x.strides[outer] * x.dtype.itemsize
    return (
        x.misalignment == 0
        and (x.strides[inner] == 1 or x.shape[inner] == 1)
        and (x.shape[outer] == 1 or (pitch % 16 == 0 and pitch > 0))
    )


def fetches_rows(x: Tensor, gpu: Gpu) -> bool:
    """Whether the copy engine can fetch tiles of ``x[rows, k]``, with k contiguous."""
    return gpu.fetches_tiles and moves_along(Matrix.of(x), -1)


def descriptors(
    x: Matrix, rows: int, columns: int, *, turned: bool = False
) -> Callable[[Tensor], TensorDescriptor]:
    """A function that makes descriptors of tensors like `x`, for tiles of the last two dimensions.

    Columns are contiguous. With `turned`, rows are contiguous, and the descriptors are of the transpose.
    """
    outer, inner, block = (-1, -2, [columns, rows]) if turned else (-2, -1, [rows, columns])
    shape = [x.shape[outer], x.shape[inner]]
    pitch = (
        x.strides[outer] if shape[0] > 1 else -(-shape[1] // 8) * 8
    )  # the stride of a single row may be anything

    def describe(t: Tensor) -> TensorDescriptor:
        if t.is_cuda:
            runtime.bind(t.get_device())
        return TensorDescriptor(t, shape, [pitch, 1], block)

    return describe


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor for tiles of ``x[rows, columns]``, whose columns are contiguous."""
    return descriptors(Matrix.of(x), rows, columns)(x)
