"""How the CUDA kernels of delta rules compute: schedules, all of them, and which one a call takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samebits.backends import UnavailableError
from samebits.backends.cuda import devices
from samebits.backends.delta import BLOCK
from samebits.backends.recurrent import CHUNK

__all__ = [
    "FEW",
    "GRADIENT_SCORE_BYTES",
    "SCORE_BYTES",
    "STEP_KEYS",
    "SYSTEM_BYTES",
    "DeltaChunks",
    "DeltaGradients",
    "Linear",
    "LinearGradients",
    "LinearRows",
    "LinearStates",
    "Schedule",
    "Step",
    "catalogue",
    "catalogue_of_chunks",
    "catalogue_of_gradients",
    "catalogue_of_linear",
    "catalogue_of_linear_gradients",
    "catalogue_of_steps",
    "choose",
    "choose_chunks",
    "choose_linear",
    "choose_linear_gradients",
    "choose_of_gradients",
    "choose_step",
    "padded_size",
    "prepared_memory",
    "takes_chunks",
]

FEW = 16
"""Tokens of a sequence, on average, up to which windows are small."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the kernel computes.

    Attributes:
        tile: columns of values that a block takes.
        rows: rows that it computes together: a chunk's, or 16.
        warps: in a block.
        stages: whether the next rows are copied while some are computed: 2, else 1.
    """

    tile: int
    rows: int
    warps: int
    stages: int

    def memory(
        self,
        dtype: torch.dtype,
        key_size: int,
        tensor_core: bool,
        by_channel: bool = False,
        weighted: bool = False,
    ) -> int:
        """Bytes of shared memory of a block: ``struct Memory``."""
        size, pad = dtype.itemsize, 16 // dtype.itemsize
        keys, values, columns = key_size + pad, self.tile + pad, CHUNK + pad
        stored = self.stages * ((CHUNK + self.rows) * keys + self.rows * values) + self.tile * columns
        scores, weights = self.rows * columns, self.rows * (CHUNK + 8)
        floats = self.tile * (key_size + 8) + self.rows * (self.tile + 8) + self.stages * self.rows + 1
        floats += self.rows * (self.tile + 8) if not tensor_core else 0
        if by_channel:
            stored += self.stages * (self.rows * keys + scores)
            floats += self.stages * (weights + key_size)
        else:
            stored += self.tile * columns + scores
            floats += weights + CHUNK * (1 + weighted) + self.stages * self.rows
        return stored * size + 4 * floats


def prepared_memory(dtype: torch.dtype, key_size: int) -> int:
    """Bytes of shared memory of a block of the kernel before that, with a decay for each channel."""
    return CHUNK * (2 * dtype.itemsize * (key_size + 16 // dtype.itemsize) + 4 * (key_size + 4))


def catalogue() -> Iterator[Schedule]:
    """Every schedule, for proofs."""
    for tile in (16, 32, 64):
        yield Schedule(tile, 16, 4, 1)
        for warps, stages in ((4, 1), (8, 1), (8, 2))[tile == 64 :]:  # four warps of 64 columns spill
            yield Schedule(tile, CHUNK, warps, stages)


def choose(
    dtype: torch.dtype,
    key_size: int,
    size: int,
    blocks: int,
    few: bool,
    tensor_core: bool,
    by_channel: bool,
    device: int,
    weighted: bool = False,
) -> Schedule:
    """The schedule for sequences times heads `blocks`, with `few` tokens each or with more."""
    info = devices.device_info(device)
    if few:
        wanted = [Schedule(tile, 16, 4, 1) for tile in (32, 16)]
    else:
        wide = blocks * -(-size // 64) >= info.sm_count
        tiles = (64, 32, 16) if wide and size > 32 else (32, 16)
        wanted = [Schedule(tile, CHUNK, 8, stages) for tile in tiles for stages in (2, 1)]
        wanted.append(Schedule(16, 16, 4, 1))
    least = prepared_memory(dtype, key_size) if by_channel else 0
    for schedule in wanted:
        if max(schedule.memory(dtype, key_size, tensor_core, by_channel, weighted), least) <= info.max_smem:
            return schedule
    raise UnavailableError(
        f"samebits' CUDA kernel for delta rules does not take keys of {key_size} in {dtype} on this GPU — use"
        " CPU tensors"
    )


@dataclass(frozen=True, slots=True)
class Step:
    """How the kernel for one token of each sequence computes.

    Attributes:
        tile: columns of values that a block takes.
        warps: in a block.
        few: whether ``delta_step_few.cu`` computes: one decay for each head, 32 columns and 8 warps.
    """

    tile: int
    warps: int = 4
    few: bool = False

    def memory(self, dtype: torch.dtype, key_size: int, by_channel: bool = False) -> int:
        """Bytes of shared memory of a block: ``struct Memory``."""
        keys, columns = (n + 16 // dtype.itemsize for n in (key_size, self.tile))
        own, decays = (6, key_size + 4) if by_channel else (2, 1)
        stored = CHUNK * (keys + columns) + own * keys + CHUNK + self.tile
        return stored * dtype.itemsize + 4 * (CHUNK * (1 + decays) + self.tile)


STEP_KEYS = 256
"""The largest keys of that kernel: it is unrolled along them."""


def catalogue_of_steps(by_channel: bool) -> tuple[Step, ...]:
    """Every schedule, for proofs."""
    if by_channel:
        return Step(64, 12), Step(64, 8), Step(128, 8)
    return Step(32), Step(64), Step(128), Step(32, 8, few=True)


def choose_step(
    dtype: torch.dtype, key_size: int, size: int, blocks: int, by_channel: bool, delta: bool, device: int
) -> Step | None:
    """The schedule for sequences times heads `blocks`: wide tiles, if all multiprocessors have one.

    Without the delta rule ``delta_step_few.cu`` is not known to take less time.
    None: this GPU has too little shared memory for all.
    """
    info = devices.device_info(device)

    def tiles(tile: int) -> int:
        return blocks * -(-size // tile)

    alone = tiles(64 if by_channel else 32) <= info.sm_count  # on a multiprocessor
    if by_channel:
        wanted = [Step(128, 8), Step(64, 12 if alone else 8)]
    else:
        wanted = [Step(128), Step(64), Step(32, 8, few=True) if alone and delta else Step(32)]
    for schedule in wanted:
        fills = size > schedule.tile // 2 and tiles(schedule.tile) >= info.sm_count
        fits = schedule.memory(dtype, key_size, by_channel) <= info.max_smem
        if fits and (fills or schedule is wanted[-1]):
            return schedule
    return None


@dataclass(frozen=True, slots=True)
class LinearStates:
    """How the kernel goes through the chunks that computes the matrix at each chunk's start.

    Attributes:
        warps: in a block: each has 16 columns of values.
        keys: channels of keys of a block, or all of them if there are fewer; a multiple of 16.
        stages: chunks in shared memory, at least 2.
        split: warps that share their columns, and have as many channels each, if those are multiples of 16.
    """

    warps: int
    keys: int
    stages: int
    split: int = 1

    def of_keys(self, key_size: int) -> tuple[int, int]:
        """Channels of a block, and warps that share columns."""
        keys = min(self.keys, key_size)
        return keys, self.split if keys % (16 * self.split) == 0 else 1

    def columns(self, key_size: int) -> int:
        """Of values, of a block."""
        return 16 * self.warps // self.of_keys(key_size)[1]

    def memory(self, key_size: int, weighted: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types."""
        stored = self.of_keys(key_size)[0] + self.columns(key_size) + 16
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
        *itertools.product((8, 4), (64,), (2, 3, 4), (2,)),
        (8, 64, 3),
        (4, 128, 3),
        (2, 128, 3),
        (4, 32, 3),
    )
    tiles = ((128, 4), (128, 8), (64, 4), (32, 2), (16, 1))
    rows = [LinearRows(*tile, stages, 8) for stages, tile in itertools.product((1, 2), tiles)]
    for states, of_rows in zip(shapes, rows, strict=True):
        yield Linear(LinearStates(*states), of_rows)


def choose_linear(key_size: int, size: int, blocks: int, weighted: bool, device: int) -> Linear:
    """The schedule for sequences times heads `blocks`."""
    info = devices.device_info(device)
    states = [LinearStates(8 if size > 32 else 4, 64, stages, 2) for stages in (4, 3, 2)]
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
        yield LinearGradients(LinearStates(8, 64, stages, 2), keys, stages, 8, strips)


def choose_linear_gradients(
    key_size: int, size: int, blocks: int, weighted: bool, device: int
) -> LinearGradients | None:
    """The schedule for sequences times heads `blocks`; None: this GPU has too little shared memory."""
    info = devices.device_info(device)
    states = choose_linear(key_size, size, blocks, weighted, device).states
    alone = blocks * -(-key_size // 32) <= info.sm_count  # on a multiprocessor
    wanted = [LinearGradients(states, *of, 8) for of in (*([(32, 3)] if alone else []), (32, 2), (16, 2))]
    fitting = (s for s in wanted if s.most_memory(key_size, size, weighted) <= info.max_smem)
    return next(fitting, None)


CHUNK_KEYS = 128
"""The largest keys of the kernels that go through whole chunks with the delta rule."""
SYSTEM_BYTES = 4 * (4 + BLOCK) * CHUNK + 6 * 512
"""``struct System``: what a chunk's triangular system has of keys and decays."""
SCORE_BYTES = 10 * 512
"""``struct Scores``."""


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """How the kernel goes through the chunks that has updates and results of the delta rule, too.

    Attributes:
        warps: in a block, of 16 columns of values each; as many more compute results.
        stages: chunks in shared memory: at least 3.
    """

    warps: int
    stages: int = 3

    def memory(self, key_size: int, keep: bool = False) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types; `keep` is for gradients."""
        of_stage = 2 * CHUNK * (key_size + 8 + 16 * self.warps + 8) + SYSTEM_BYTES
        of_warp = 4 * 16 * 20 + 2 * 16 * key_size
        if keep:
            of_warp += 2 * 4 * (key_size // 8 * 136 + 16 + 16 * (CHUNK + 4))
        else:
            of_stage += 2 * CHUNK * (key_size + 8) + SCORE_BYTES
            of_warp += 2 * 16 * key_size
        return self.stages * of_stage + self.warps * of_warp


def catalogue_of_chunks() -> tuple[DeltaChunks, ...]:
    """Every schedule, for proofs."""
    return DeltaChunks(1), DeltaChunks(2), DeltaChunks(4), DeltaChunks(1, 4)


def takes_chunks(key_size: int, device: int) -> bool:
    """Whether those kernels take keys of this size, a multiple of 16."""
    least = DeltaChunks(1).memory(key_size)
    return key_size <= CHUNK_KEYS and least <= devices.device_info(device).max_smem


def choose_chunks(key_size: int, size: int, blocks: int, keep: bool, device: int) -> DeltaChunks:
    """The schedule for sequences times heads `blocks`: wide tiles, if all multiprocessors have one."""
    info = devices.device_info(device)
    wide = size > 32 and blocks * -(-size // 64) >= info.sm_count
    wanted = (DeltaChunks(4), DeltaChunks(2), DeltaChunks(1))[0 if wide else 1 if size > 16 else 2 :]
    return next((s for s in wanted if s.memory(key_size, keep) <= info.max_smem), wanted[-1])


def padded_size(size: int) -> int:
    return -(-size // 16) * 16


def chains_memory(size: int) -> int:
    """Bytes of shared memory of a block of the kernel that has gradients along rows of records."""
    width = min(padded_size(size), 128)
    piece = min(width, 32)
    return 2 * 32 * 4 * (-(-width // piece) * piece + 4)


REGISTER_KEYS = 128
"""The largest keys whose gradient of the matrix lies in registers."""


GRADIENT_SCORE_BYTES = 2 * CHUNK**2 + 6 * 512 + 4 * (BLOCK + 4) * CHUNK + 16
"""``struct Scores`` of ``include/delta_scores.cuh``."""


@dataclass(frozen=True, slots=True)
class DeltaGradients:
    """How the kernels of gradients compute.

    Attributes:
        tile: columns of values that a block takes, which goes through the chunks.
        staged: whether a block that computes a chunk's rows copies what it reads to shared memory. With
            tensor cores it does so for the delta rule alone.
        stages: whether it copies the keys and queries of the chunk before while it computes one: 2, else 1.
        registers: whether the gradient of the matrix lies in registers: with tensor cores, one decay for each
            head and keys up to 128. `tile` is then a multiple of 32, and `stages` are 2.
    """

    tile: int
    staged: bool
    stages: int
    registers: bool = False

    def warps(self, which: str) -> int:
        """Of a block of the kernel `which`."""
        if which == "scores":
            return CHUNK // 16
        if which == "chains":
            return 1
        if which == "matrices" and self.registers:
            return self.tile // 32 * 3 + (2 if self.tile == 64 else 4)  # up to 8, or up to 16, have registers
        return 8

    def takes(self, key_size: int, tensor_core: bool, delta: bool, by_channel: bool) -> bool:
        """Whether the kernels are there for such operands, if these fit into shared memory."""
        if not delta:
            return not (tensor_core and self.staged)
        return not self.registers or (tensor_core and not by_channel and key_size <= REGISTER_KEYS)

    def memory(
        self, dtype: torch.dtype, key_size: int, size: int, tensor_core: bool, by_channel: bool = False
    ) -> tuple[int, int]:
        """Bytes of shared memory of the two kernels: ``struct Memory`` of each."""
        bytes_, pad = dtype.itemsize, 16 // dtype.itemsize
        keys, values, columns = key_size + pad, padded_size(size) + pad, CHUNK + pad
        scores, weights, decays = CHUNK * columns, CHUNK * (CHUNK + 8), CHUNK * (key_size + 4)
        floats = self.tile * (key_size + 8) + CHUNK * (self.tile + 8) + CHUNK
        if by_channel:
            stored = self.stages * (3 * CHUNK * keys + scores) + 2 * self.tile * columns
            floats += self.stages * (weights + key_size)
        else:
            stored, decays = self.stages * 2 * CHUNK * keys + 3 * self.tile * columns + scores, CHUNK
            floats += weights + CHUNK
        matrices = stored * bytes_ + 4 * floats
        if self.registers:
            copied = 2 * CHUNK * (2 * keys + self.tile + 8) + GRADIENT_SCORE_BYTES
            matrices = self.stages * copied + self.tile * (4 * (CHUNK + 4) + 2 * 2 * columns)
        if tensor_core and self.staged:
            shared = max(2 * CHUNK * values * bytes_, 4 * CHUNK * (key_size + 4))
            stored = 2 * CHUNK * keys + CHUNK * values + 2 * CHUNK * columns
            floats = 2 * CHUNK * 16 + decays if by_channel else 5 * CHUNK + 4
            return matrices, stored * bytes_ + shared + 4 * (floats + key_size)
        stored, floats = 0, 2 * CHUNK * (key_size + 1) + decays + 2 * CHUNK + key_size
        if by_channel:
            floats += 2 * CHUNK * (CHUNK + 8)
        else:
            stored += 2 * CHUNK * columns
        if self.staged or by_channel:
            stored += 2 * CHUNK * keys
        if self.staged:
            stored += 3 * CHUNK * values + (0 if by_channel else key_size * values)
        rows = stored * bytes_ + 4 * floats
        return matrices, rows


def catalogue_of_gradients() -> Iterator[DeltaGradients]:
    """Every schedule, for proofs."""
    for tile, staged, stages in itertools.product((16, 32, 64), (True, False), (2, 1)):
        yield DeltaGradients(tile, staged, stages)
    for tile in (32, 64, 128):
        yield DeltaGradients(tile, True, 2, registers=True)


def choose_of_gradients(
    dtype: torch.dtype,
    key_size: int,
    size: int,
    blocks: int,
    tensor_core: bool,
    delta: bool,
    by_channel: bool,
    device: int,
) -> DeltaGradients:
    """The schedule for sequences times heads `blocks`."""
    info = devices.device_info(device)
    wide = blocks * -(-size // 64) >= info.sm_count and size > 32
    operands = dtype, key_size, size, tensor_core, by_channel
    of_registers = [
        DeltaGradients(tile, True, 2, registers=True)
        for tile in (128, 64, 32)
        if tile == 32 or (blocks * -(-size // tile) >= info.sm_count and size > tile // 2)
    ]
    for schedule in of_registers:
        fits = max(schedule.memory(*operands)) <= info.max_smem
        if fits and schedule.takes(key_size, tensor_core, delta, by_channel):
            return schedule
    staged = (delta or not tensor_core) and DeltaGradients(16, True, 1).memory(*operands)[1] <= info.max_smem
    tiles = (64, 32, 16) if wide else (32, 16)
    for tile, stages in itertools.product(tiles, (2, 1) if tensor_core else (1,)):
        schedule = DeltaGradients(tile, staged, stages)
        if max(schedule.memory(*operands)) <= info.max_smem:
            return schedule
    raise UnavailableError(
        f"samebits' CUDA kernels for gradients of delta rules do not take keys of {key_size} in {dtype} on"
        " this GPU — use CPU tensors"
    )
