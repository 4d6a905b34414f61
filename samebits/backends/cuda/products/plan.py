"""Plans of CUDA product kernels, and the launch arguments of the universal kernels."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.tensor_maps import Maps
from samebits.backends.grouped import GroupedOperands, GroupedProduct
from samebits.backends.kernel import Kernel
from samebits.backends.product import Matrix, Operands, Product

__all__ = [
    "GROUPED_PARAMS",
    "PARAMS",
    "TYPES",
    "CudaKernel",
    "CudaPlan",
    "ScratchPlan",
    "TileLayout",
    "tile_layout",
    "tile_plan",
]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of dtypes in the kernels."""

Launch = Callable[..., None]
"""Launch on the addresses of a call: of :meth:`Operands.addresses`, of those of groups, or with scales."""


class CudaPlan:
    """A :class:`samebits.backends.kernel.Plan` of a CUDA kernel: a launch without the addresses."""

    __slots__ = ("_maps", "launch")

    def __init__(self, launch: Launch, *maps: dict[int, Any] | None) -> None:
        """`maps`: the tensor maps of a, b and out that the launch takes, by address."""
        self.launch, self._maps = launch, maps

    def encode(self, *addresses: int) -> None:
        """Make the tensor maps for these addresses of a, b and out. Nothing else of a launch can fail."""
        for maps, address in zip(self._maps, addresses, strict=False):
            if maps is not None:
                maps[address]

    def later(self, *addresses: int) -> Callable[[], None]:
        """A launch on these addresses, which cannot fail: all that it needs is there."""
        self.encode(*addresses[:3])
        return partial(self.launch, *addresses)

    def run(self, x: Operands | GroupedOperands) -> None:
        """Run on these operands."""
        self.launch(*x.addresses())


class ScratchPlan(CudaPlan):
    """A plan whose launches need memory for a while."""

    __slots__ = ("_device", "_floats", "_launch")

    def __init__(
        self,
        device: int,
        floats: int,
        launch: Callable[[int, int, int, int, int, int, int], None],
        *maps: Maps | None,
    ) -> None:
        """`launch`: on the address of `floats` floats, and then as a plan's. `maps`: as of a plan."""
        super().__init__(self._launch_now, *maps)
        self._device, self._floats, self._launch = device, floats, launch

    def encode_in(self, room: int, *addresses: int) -> None:
        """:meth:`encode` for launches with memory at `room`."""
        self.encode(*addresses)

    def later(self, *addresses: int) -> Callable[[], None]:
        room = self._room()
        self.encode_in(0 if room is None else room.data_ptr(), *addresses[:3])
        return partial(self._launch_in, room, *addresses)

    def _room(self) -> torch.Tensor | None:
        return runtime.empty((self._floats,), torch.float32, self._device) if self._floats else None

    def _launch_in(self, room: torch.Tensor | None, *addresses: int) -> None:
        self._launch(0 if room is None else room.data_ptr(), *addresses)

    def _launch_now(self, a: int, b: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
        self._launch_in(self._room(), a, b, out, bias, cu_seqlens, start)


P = TypeVar("P", Product, GroupedProduct)
S = TypeVar("S")


class CudaKernel(Kernel[P, S]):
    """A kernel in CUDA of products, or of products of groups. It is launched with addresses."""

    @abc.abstractmethod
    def plan(self, p: P, s: S | None = None) -> CudaPlan: ...


def nothing(*addresses: int) -> None:
    """The launch of a product without elements."""


PARAMS = "P4q P4q P3q P3q Pq P 10i".replace(" ", "")
"""``struct Params`` of the universal kernels."""

GROUPED_PARAMS = f"{PARAMS}PP2iq"
"""The same of their grouped form."""


class TileLayout(NamedTuple):
    """How an operand's tiles are loaded, and its strides in elements. "row" is m of a, n of b."""

    k_major: bool
    vector: bool
    strides: tuple[int, int, int, int]  # batch, sequence, row, k


def tile_layout(x: Matrix, row_dim: int, k_dim: int, *, chunk: int, ragged: bool) -> TileLayout:
    """The dimension along which aligned chunks of `chunk` elements lie in memory: k, rows, or neither."""
    batch = x.strides[0] if x.ndim > 2 and x.shape[0] > 1 else 0
    sequence = x.strides[1] if x.ndim > 3 and x.shape[1] > 1 else 0
    row, k = x.strides[row_dim], x.strides[k_dim]
    one_row, one_k = x.shape[row_dim] <= 1, x.shape[k_dim] <= 1
    aligned = x.misalignment % (chunk * x.dtype.itemsize) == batch % chunk == sequence % chunk == 0
    # Chunks are not used along a dimension with fewer elements, because they could reach past an allocation.
    along_k = (k == 1 or one_k) and (row % chunk == 0 or one_row) and not ragged  # sequences start at any k
    along_k = along_k and x.shape[k_dim] >= chunk
    along_rows = (row == 1 or one_row) and (k % chunk == 0 or one_k) and x.shape[row_dim] >= chunk
    strides = (batch, sequence, 0 if one_row else row, 0 if one_k else k)
    if aligned and along_k:
        return TileLayout(True, True, strides)
    if aligned and along_rows:
        return TileLayout(False, True, strides)
    return TileLayout(k <= row, False, strides)


def matrix_strides(x: Matrix) -> tuple[int, ...]:
    """Strides of batch, row and column. 0 for a dimension of size one, whose stride may be anything."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.strides, strict=True)]
    strides[-1] = strides[-1] or 1
    return (0,) * (3 - x.ndim) + tuple(strides)


def start_strides(p: Product) -> tuple[int, ...]:
    """Strides of the values that chains start from. Zeros if they start at +0."""
    if p.start == "zero":
        return 0, 0, 0
    return matrix_strides(p.out if isinstance(p.start, str) else p.start)


def writes_vectors(out: Matrix) -> bool:
    """Whether four adjacent elements can be written at once."""
    strides = matrix_strides(out)
    aligned = out.misalignment % (4 * out.dtype.itemsize) == 0
    return strides[2] == 1 and aligned and strides[0] % 4 == strides[1] % 4 == 0


def tile_plan(
    p: Product,
    spec: compiler.KernelSpec,
    a: TileLayout,
    b: TileLayout,
    tiles_m: int,
    tiles_n: int,
    last: int,
) -> CudaPlan:
    """The plan of a universal kernel. `last` is the size that only one of the two kernels has."""
    kernel = runtime.load(spec, p.device)
    grid = tiles_m * tiles_n * p.batch, 1, 1
    out_strides = matrix_strides(p.out)
    from_start = start_strides(p)
    bias_stride = 0 if p.bias is None else p.bias.strides[0]
    sizes = (
        *(p.m, p.n, p.k, p.sequence_count, tiles_m, tiles_n, last, writes_vectors(p.out)),
        0 if p.bias is None else TYPES[p.bias.dtype],
        p.cu_seqlens is not None and p.cu_seqlens.dtype == torch.int64,
    )

    def launch(a_at: int, b_at: int, out: int, bias: int, cu_seqlens: int, start: int) -> None:
        kernel.launch(
            grid,
            a_at,
            *a.strides,
            b_at,
            *b.strides,
            out,
            *out_strides,
            start,
            *from_start,
            bias,
            bias_stride,
            cu_seqlens,
            *sizes,
        )

    return CudaPlan(launch)
