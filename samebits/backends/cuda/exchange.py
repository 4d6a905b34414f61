"""Sums over ranks that reach each other's memory: host side of ``kernels/exchange.cu``.

A kernel takes addresses: what of this rank's it adds, and where the memory of all ranks begins, as this
device sees it. Who maps that memory is in :mod:`samebits.distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.plans import kept
from samebits.backends.cuda.products.plan import TYPES
from samebits.backends.product import need

__all__ = [
    "EMPTY",
    "Memory",
    "add_parts",
    "add_small",
    "at_once_spec",
    "control_bytes",
    "data_bytes",
    "most_blocks",
    "parts_spec",
]

BLOCKS = 1024  # of a launch at most
_THREADS, _QUADS = 256, 2  # as in the source
EMPTY = 0xFF  # each byte of an inbox that nothing has come to
STATE = 2 * BLOCKS * 8 * 4  # bytes of flags, of up to 8 ranks, before the state
INBOXES = STATE + 256


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all ranks of a group. All of it starts as zeros, and inboxes as :data:`EMPTY`.

    Attributes:
        device: this rank's.
        rank: this rank.
        control: where each rank's flags and inboxes begin, :func:`control_bytes` of each.
        inbox: the most elements of :func:`add_small`, a multiple of 4.
        data: where each rank's partial sums and results begin, :func:`data_bytes` of each.
        part: the most elements of a part of :func:`add_parts`, a multiple of 4.
        timeout: nanoseconds after which a rank that does not answer is an assertion.
        blocks: the most blocks of a launch, the same on all ranks: those of one index meet.
    """

    device: int
    rank: int
    control: tuple[int, ...]
    inbox: int
    data: tuple[int, ...]
    part: int
    timeout: int
    blocks: int = BLOCKS

    def slot(self, owner: int) -> int:
        """Where `owner` has this rank's partial sums of its part."""
        return self.data[owner] + self.rank * self.part * 4


def control_bytes(ranks: int, inbox: int) -> int:
    return INBOXES + 2 * ranks * inbox * 4


def data_bytes(ranks: int, part: int) -> int:
    return ranks * part * 8  # partial sums, and results of up to four bytes


def _spec(entry: str, params: str, ranks: int, programmatic: bool) -> compiler.KernelSpec:
    constants = ("RANKS", ranks), ("BLOCKS", BLOCKS)
    return compiler.KernelSpec(
        "exchange.cu", entry, params, constants, block=_THREADS, programmatic=programmatic
    )


def at_once_spec(ranks: int, programmatic: bool) -> compiler.KernelSpec:
    """The kernel of :func:`add_small`."""
    return _spec("at_once", f"3P{ranks + 1}q4q3i", ranks, programmatic)


def parts_spec(ranks: int, programmatic: bool) -> compiler.KernelSpec:
    """The kernel of :func:`add_parts`."""
    return _spec("by_parts", f"5P{3 * ranks + 1}q6q3i", ranks, programmatic)


@kept
def _loaded(entry: str, ranks: int, device: int) -> runtime.Kernel:
    spec = {"at_once": at_once_spec, "parts": parts_spec}[entry]
    return runtime.load(spec(ranks, devices.device_info(device).arch.copies_tiles), device)


def most_blocks(ranks: int, device: int) -> int:
    """Blocks that run at once on a device. With eight ranks, a multiprocessor has registers for three."""
    return min((3 if ranks == 8 else 4) * devices.device_info(device).sm_count, BLOCKS)


def _kinds(out: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return TYPES[out.dtype], 0 if bias is None else TYPES[bias.dtype]


def add_small(memory: Memory, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x of all ranks, added, + bias``. `x` is float32; all are contiguous and begin at 16 bytes."""
    kernel, count = _loaded("at_once", len(memory.control), memory.device), x.numel()
    need(count <= memory.inbox, f"expected up to {memory.inbox} elements, got {count}")
    kernel.launch(
        (min(-(-count // (4 * _THREADS)), memory.blocks), 1, 1),
        *(x.data_ptr(), out.data_ptr(), address(bias)),
        *(at + INBOXES for at in memory.control),
        memory.control[memory.rank] + STATE,
        *(count, 1 if bias is None else bias.numel(), memory.inbox, memory.timeout),
        *(memory.rank, *_kinds(out, bias)),
    )


def add_parts(
    memory: Memory,
    x: Tensor | None,
    count: int,
    part: int,
    bias: Tensor | None,
    out: Tensor,
    *,
    stride: int = 0,
    whole: bool = True,
) -> None:
    """As :func:`add_small`, each rank its part of the `count` elements, of which the last may be shorter.

    Args:
        x: all elements; None if every rank has written its partial sums to :meth:`Memory.slot` of all.
        part: elements of a part, a multiple of 4.
        stride: elements from one part to the next in `x`, a multiple of 4; 0: as many as a part has.
        out: all results if `whole`, or this rank's part of them.
    """
    need(part <= memory.part, f"expected parts of up to {memory.part} elements, got {part}")
    ranks, rank = len(memory.control), memory.rank
    kernel = _loaded("parts", ranks, memory.device)
    size = out.element_size()
    own = memory.slot(rank) if x is None else x.data_ptr() + rank * (stride or part) * 4
    at = out.data_ptr()
    kernel.launch(
        (min(-(-part // (4 * _THREADS * _QUADS)), memory.blocks), 1, 1),
        *(address(x), own),
        *(at if whole else 0, at + rank * part * size if whole else at),
        address(bias),
        *memory.data,
        *(of + ranks * memory.part * 4 for of in memory.data),
        *memory.control,
        memory.control[rank] + STATE,
        *(count, part, stride or part, memory.part, 1 if bias is None else bias.numel(), memory.timeout),
        *(rank, *_kinds(out, bias)),
    )
