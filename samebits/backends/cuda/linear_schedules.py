"""How the CUDA kernels of linear attention without the delta rule compute: as ``delta_schedules.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from samebits.backends.cuda import devices
from samebits.backends.recurrent import CHUNK

__all__ = [
    "Linear",
    "LinearGradients",
    "LinearRows",
    "LinearStates",
    "catalogue_of_linear",
    "catalogue_of_linear_gradients",
    "choose_linear",
    "choose_linear_gradients",
    "padded_size",
]


def padded_size(size: int) -> int:
    return -(-size // 16) * 16


@dataclass(frozen=True, slots=True)
class LinearStates:
    """How the kernel goes through the chunks that computes the matrix at each chunk's start.

    Attributes:
        warps: in a block: each has 16 columns of values.
        keys: channels of keys of a block, or all of them if there are fewer; a multiple of 16.
        stages: chunks in shared memory, at least 2.
    """

    warps: int
    keys: int
    stages: int

    def memory(self, key_size: int, weighted: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types."""
        stored = min(self.keys, key_size) + 16 * self.warps + 16
        return self.stages * CHUNK * (2 * stored + 4 * (2 + weighted))


@dataclass(frozen=True, slots=True)
class LinearRows:
    """How the kernel computes that has a chunk's results.

    Attributes:
        tile: columns of values of a block, a multiple of 16 for each warp.
        warps: in a block.
        stages: heads whose operands are in shared memory: 2, while one is computed the next is copied; or 1.
        heads: that a block takes, at most, of those that share one of keys.
    """

    tile: int
    warps: int
    stages: int
    heads: int

    def memory(self, key_size: int, weighted: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types."""
        own = 2 * (CHUNK * (self.tile + 8) + self.tile * key_size) + 4 * (2 + weighted) * CHUNK
        return self.stages * own + 2 * CHUNK * (2 * (key_size + 8) + CHUNK + 8)


@dataclass(frozen=True, slots=True)
class Linear:
    """How the kernels of linear attention without the delta rule compute."""

    states: LinearStates
    rows: LinearRows


def catalogue_of_linear() -> Iterator[Linear]:
    """Every schedule of each of the two kernels, for proofs."""
    shapes = (
        *itertools.product((8, 4), (64,), (2, 3, 4)),
        (2, 64, 3),
        (4, 128, 3),
        (2, 128, 3),
        (4, 32, 3),
    )
    tiles = ((128, 4), (128, 8), (64, 4), (32, 2), (16, 1))
    rows = [LinearRows(*tile, stages, 8) for stages, tile in itertools.product((1, 2), tiles)]
    for states, of_rows in zip(shapes, rows, strict=True):
        yield Linear(LinearStates(*states), of_rows)


def choose_linear(key_size: int, size: int, weighted: bool, device: int) -> Linear:
    """The schedule for heads of these sizes."""
    info = devices.device_info(device)
    states = [LinearStates(4, 64, stages) for stages in (4, 3, 2)]
    rows = [LinearRows(*shape) for shape in ((128, 8, 1, 8), (64, 4, 1, 8), (32, 2, 1, 8), (16, 1, 1, 8))]
    fitting = (
        [s for s in states if s.memory(key_size, weighted) <= info.max_smem],
        [s for s in rows if s.tile < 2 * size and s.memory(key_size, weighted) <= info.max_smem] or rows[-1:],
    )
    return Linear(fitting[0][0], fitting[1][0])


@dataclass(frozen=True, slots=True)
class LinearGradients:
    """How the kernels of gradients of linear attention compute.

    Attributes:
        states: how the forward's kernel goes through the chunks again.
        keys: channels of keys of a block that goes through the chunks backwards, or all of them if there are
            fewer; a multiple of 16.
        stages: chunks in its shared memory, at least 2.
        heads: that a block takes, at most, of those that share one of keys, for gradients of values.
        strips: of 16 columns that a warp of such a block has at a time.
    """

    states: LinearStates
    keys: int
    stages: int
    heads: int
    strips: int = 1

    def warps(self, which: str, size: int) -> int:
        """Of a block of the kernel `which`: matrices (those with sums), values or rows."""
        steps = padded_size(size) // 16
        wanted = {"matrices": steps, "values": -(-steps // self.strips), "rows": 8}[which]
        return min(8, 1 << (wanted - 1).bit_length())

    def tile(self, size: int) -> int:
        """Columns of values that a block has at a time, for their gradients."""
        return 16 * self.strips * self.warps("values", size)

    def threads(self, which: str, key_size: int, size: int) -> int:
        """Of a block. For matrices a lane of more warps has a channel."""
        chains = -(-min(self.keys, key_size) // 32) if which == "matrices" else 0
        return 32 * (self.warps(which, size) + chains)

    def memory(self, which: str, key_size: int, size: int, weighted: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory`` of each kernel, of 16-bit types."""
        padded, keys = padded_size(size), min(self.keys, key_size)
        rows, decays = 2 * CHUNK * (key_size + 8), 4 * CHUNK * (2 + weighted)
        if which == "matrices":
            floats = padded * (keys + 8)
            copied = 2 * CHUNK * (keys + 8 + padded + 8) + 4 * (floats + CHUNK)
            return self.stages * copied + 4 * (floats + CHUNK)
        scores = 2 * CHUNK * (CHUNK + 8)
        if which == "values":
            tile = self.tile(size)
            shared = max(2 * tile * key_size, 4 * CHUNK * (tile + 4))
            return 2 * rows + (1 + weighted) * 2 * CHUNK * (tile + 8) + scores + shared + decays
        shared = max(2 * CHUNK * (padded + 8), 4 * CHUNK * (key_size + 4))
        floats = 3 * CHUNK + key_size + 4
        return 2 * rows + 2 * CHUNK * (padded + 8) + shared + scores + decays + 4 * floats

    def most_memory(self, key_size: int, size: int, weighted: bool) -> int:
        """That of the block which takes most."""
        of_states = self.states.memory(key_size, weighted)
        own = (self.memory(which, key_size, size, weighted) for which in ("matrices", "values", "rows"))
        return max(of_states, *own)


def catalogue_of_linear_gradients() -> Iterator[LinearGradients]:
    """Every schedule, for proofs."""
    for keys, stages, strips in ((32, 2, 1), (32, 3, 2), (64, 2, 1), (16, 2, 2)):
        yield LinearGradients(LinearStates(4, 64, stages), keys, stages, 8, strips)


def choose_linear_gradients(
    key_size: int, size: int, blocks: int, weighted: bool, device: int
) -> LinearGradients | None:
    """The schedule for sequences times heads `blocks`; None: this GPU has too little shared memory."""
    info = devices.device_info(device)
    states = choose_linear(key_size, size, weighted, device).states
    alone = blocks * -(-key_size // 32) <= info.sm_count  # on a multiprocessor
    wanted = [LinearGradients(states, *of, 8) for of in (*([(32, 3)] if alone else []), (32, 2), (16, 2))]
    fitting = (s for s in wanted if s.most_memory(key_size, size, weighted) <= info.max_smem)
    return next(fitting, None)
