"""What kernels of attention need to know of a mask: host side of ``kernels/attention_mask.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.arch import SM_75
from samebits.backends.attention import BLOCK, SEGMENT, Attention
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.attention.problem import PROBLEM, problem
from samebits.backends.cuda.operands import address
from samebits.contract import GROUP

__all__ = ["NAMES", "ROWS", "SHOWN_KEYS", "Rows", "find_rows", "place_queries", "specs"]

NAMES: dict[torch.dtype | None, str] = {
    None: "NONE",
    torch.bool: "BOOLEAN",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""The macros of ``convert.cuh`` and ``attention_mask.cuh``."""

SHOWN_KEYS = 4 * BLOCK * 4 + 24
"""Bytes of ``struct ShownKeys``."""

ROWS = "PPii"
"""The ``struct`` format of :attr:`Rows.values`."""

_PARAMS = "PPPPiiii" + PROBLEM


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of each row of a mask: ``struct Rows``.

    Attributes:
        found: int32 ``[batch, heads, queries, 2]``.
        begins: int32 ``[batch, heads, queries, segments + 2]``.
    """

    found: Tensor
    begins: Tensor

    @property
    def heads(self) -> int:
        """Of q, or 1 if the mask is the same for all."""
        return self.found.shape[1]

    @property
    def values(self) -> tuple[int, ...]:
        return address(self.found), address(self.begins), self.heads, self.begins.shape[3]


def _spec(mask: torch.dtype, entry: str, block: int) -> compiler.KernelSpec:
    constants = (("MASK", NAMES[mask]),)
    return compiler.KernelSpec("attention_mask.cu", entry, _PARAMS, constants, block=block, oldest=SM_75)


def specs(mask: torch.dtype) -> Iterator[compiler.KernelSpec]:
    """All kernels for a mask of this dtype."""
    yield _spec(mask, "find_rows", 256)
    yield _spec(mask, "place_queries", 32)


def find_rows(x: Attention, *, by_head: bool = False) -> Rows:
    """What each row of ``x.mask`` shows.

    Args:
        by_head: tiles have rows of one head, not of all heads that share one of k, side by side.
    """
    assert x.mask is not None
    device = x.q.get_device()
    heads = 1 if x.mask.stride(1) == 0 or x.heads == 1 else x.heads
    rows = (x.batch, heads, x.queries)
    found = Rows(
        runtime.empty((*rows, 2), torch.int32, device),
        runtime.empty((*rows, -(-x.keys // SEGMENT) + 2), torch.int32, device),
    )
    count = x.batch * heads * x.queries
    if count:
        kernel = runtime.load(_spec(x.mask.dtype, "find_rows", 256), device)
        kernel.launch((-(-count // 8), 1, 1), *_values(x, found, None, None, 1 if by_head else x.group))
    return found


def place_queries(x: Attention, rows: Rows) -> tuple[Tensor, Tensor]:
    """The chain over queries of each head.

    Returns:
        Queries in groups of 16, or -1 for none: int32 ``[batch, heads, queries + 1, 16]``. How many groups:
        int32 ``[batch, heads]``.
    """
    assert x.mask is not None
    device = x.q.get_device()
    order = runtime.empty((x.batch, rows.heads, x.queries + 1, GROUP), torch.int32, device)
    groups = runtime.empty((x.batch, rows.heads), torch.int32, device)
    order.fill_(-1)
    kernel = runtime.load(_spec(x.mask.dtype, "place_queries", 32), device)
    kernel.launch((x.batch * rows.heads, 1, 1), *_values(x, rows, order, groups, x.group))
    return order, groups


def _values(
    x: Attention, rows: Rows, order: Tensor | None, groups: Tensor | None, side_by_side: int
) -> tuple[object, ...]:
    own_keys = x.align != "first" or x.queries == x.keys
    found, begins, heads, segments = rows.values
    numbers = (heads, segments, int(own_keys), side_by_side)
    return (found, begins, address(order), address(groups), *numbers, *problem(x))
