"""Sums over ranks of one machine in one kernel, on memory that all of them reach.

PyTorch's symmetric memory maps every rank's memory into all others. ``kernels/exchange.cu`` exchanges partial
sums there and adds them. :func:`space_of` says whether a group has such memory. Where it has none, NCCL or
gloo moves the bytes, and the bits are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from math import lcm
from typing import Any

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.distributed._groups import all_gather, group_of
from samebits.ops._memory import capturing

__all__ = ["Space", "space_of"]

_AT_ONCE = 1 << 20
"""Elements that a rank sends to all others together, up to which that is faster than parts."""

_LEAST, _MOST = 1 << 22, 1 << 25
"""Elements that are added at once: what memory is made for first, and at most."""


class Space:
    """A group's memory, and sums over its ranks. All ranks make it, and call its methods, in the same order.

    Raises:
        RuntimeError: ranks cannot reach each other's memory.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from samebits.backends.cuda import exchange

        self._group = group
        self._kernels, self._device = exchange, device
        self._rank: int = group.rank()
        self._ranks: int = group.size()
        self._inbox = _AT_ONCE // (self._ranks - 1) // 4 * 4
        size = exchange.control_bytes(self._ranks, self._inbox)
        _, self._control = self._map(size, size - exchange.INBOXES)
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None) or timedelta(minutes=10)
        self._timeout = int(timeout.total_seconds() * 1e9)
        self._stream: torch.cuda.Stream | None = None
        self._grow(_LEAST)

    def _map(self, size: int, inboxes: int = 0) -> tuple[Any, tuple[int, ...]]:
        """Memory of all ranks, and where each rank's begins: zeros, then so many bytes of empty inboxes.

        It is never freed: a graph may have it.
        """
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)
        memory.zero_()
        memory[size - inboxes :].fill_(self._kernels.EMPTY)
        handle: Any = _symmetric_memory.rendezvous(memory, self._group.group_name)
        ranks = range(self._ranks)
        at = tuple(handle.get_buffer(r, (size,), torch.uint8, 0).data_ptr() for r in ranks)
        if at[self._rank] != memory.data_ptr():
            raise RuntimeError("symmetric memory begins elsewhere than its tensor")
        _kept.append(memory)
        return handle, at

    def _grow(self, count: int) -> None:
        part: int = (_LEAST if count <= _LEAST else _MOST) // self._ranks
        data, at = self._map(self._kernels.data_bytes(self._ranks, part))
        own = torch.tensor([self._kernels.most_blocks(self._ranks, self._device.index)], device=self._device)
        blocks = int(all_gather(own, self._group.group_name).min())  # and all memory is as it starts now
        memory = self._kernels.Memory(
            *(self._device.index, self._rank, self._control, self._inbox, at, part, self._timeout),
            blocks=blocks,
        )
        self._part, self._data, self._memory = part, data, memory  # or none of them, after an error

    def _fit(self, count: int) -> None:
        """Make memory for `count` elements, or as many as are added at once."""
        if min(count, _MOST) > self._part * self._ranks:
            if torch.cuda.is_current_stream_capturing():
                return
            self._grow(count)

    @property
    def _room(self) -> int:
        """Elements that are added at once, as many of each part."""
        return min(self._part * self._ranks, _MOST)

    def _in_order(self) -> None:
        """Let the current stream wait for the last one that used the memory."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def all_reduce(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """The sum of every rank's float32 `x`, plus a bias of its last dimension, on all ranks."""
        self._in_order()
        x, bias = _whole(x), None if bias is None else bias.contiguous()
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        count = x.numel()
        if count <= min(self._inbox, _AT_ONCE // (self._ranks - 1)):
            if count:
                self._kernels.add_small(self._memory, x, bias, out)
            return out
        self._fit(count)
        row = lcm(4, 1 if bias is None else bias.numel())
        step = max(self._room // row, 1) * row
        flat, to = x.view(-1), out.view(-1)
        for start in range(0, count, step):
            some = min(step, count - start)
            part = -(-some // (4 * self._ranks)) * 4
            self._kernels.add_parts(self._memory, flat[start:], some, part, bias, to[start:])
        return out

    def reduce_scatter(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """This rank's part of :meth:`all_reduce`, of those in dimension 0, which have a multiple of 4."""
        self._in_order()
        x, bias = _whole(x), None if bias is None else bias.contiguous()
        out = torch.empty((len(x) // self._ranks, *x.shape[1:]), dtype=out_dtype, device=x.device)
        self._fit(x.numel())
        if out.numel() == 0:
            return out
        row = lcm(4, 1 if bias is None else bias.numel())
        step, stride = max(self._room // self._ranks // row, 1) * row, out.numel()
        flat, to = x.view(-1), out.view(-1)
        for start in range(0, stride, step):
            some = min(step, stride - start)
            self._kernels.add_parts(
                *(self._memory, flat[start:], some * self._ranks, some, bias, to[start:]),
                stride=stride,
                whole=False,
            )
        return out

    def sum_of_products(
        self,
        product: Callable[[slice, Tensor], None],
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """The sum of every rank's product, plus a bias, into ``out[M, N]``, where 4 divides N.

        Args:
            product: computes some rows of this rank's, into a float32 tensor: the memory of the rank that
                adds them. So they are on their way while others are computed.
            bias: of N elements.
            out: contiguous.
        """
        self._in_order()
        bias = None if bias is None else bias.contiguous()
        rows, n = out.shape
        self._fit(rows * n)
        step = max(self._room // self._ranks // n, 1) * self._ranks
        for start in range(0, rows, step):
            some = min(step, rows - start)
            each = -(-some // self._ranks)
            for i in range(1, self._ranks + 1):  # own rows last: those of others travel meanwhile
                owner = (self._rank + i) % self._ranks
                mine = slice(start + min(some, owner * each), start + min(some, (owner + 1) * each))
                if mine.start < mine.stop:
                    shape = mine.stop - mine.start, n
                    product(mine, self._data.get_buffer(owner, shape, torch.float32, self._rank * self._part))
            self._kernels.add_parts(self._memory, None, some * n, each * n, bias, out[start:])


def _whole(x: Tensor) -> Tensor:
    """`x`, contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


_kept: list[Tensor] = []
_spaces: dict[tuple[str, int], tuple[Any, Space | None]] = {}


def space_of(name: str, x: Tensor) -> Space | None:
    """The memory of the group `name` on the device of `x`. The first call of a group tries to make it.

    None where there is none: for tensors on a CPU, on several machines, for more than 8 ranks, and in the
    capture of a CUDA graph, if no call came before.
    """
    if not x.is_cuda:
        return None
    group = group_of(name)
    key = name, x.get_device()
    found = _spaces.get(key)
    if found is None or found[0] is not group:
        if capturing(x):
            return None
        with torch.cuda.device(x.device):
            found = _spaces[key] = group, _make(group, x.device)
    return found[1]


def _make(group: Any, device: torch.device) -> Space | None:
    """The memory, if all ranks can make theirs: they decide together."""
    if not 2 <= group.size() <= 8:
        return None

    def all_ranks(can: bool) -> bool:
        return bool(all_gather(torch.tensor([can], device=device), group.group_name).all())

    try:
        from samebits.backends.cuda import runtime

        runtime.require(device.index)
        importlib.import_module("torch.distributed._symmetric_memory")
        able = True
    except (UnavailableError, ImportError):
        able = False
    if not all_ranks(able):
        return None
    try:
        space: Space | None = Space(group, device)
    except RuntimeError:  # they cannot reach each other's memory
        space = None
    return space if all_ranks(space is not None) else None
