"""How the CUDA kernels of delta rules compute: schedules, all of them, and which one a call takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samebits.backends import UnavailableError
from samebits.backends.cuda import devices
from samebits.backends.cuda.linear_schedules import LinearStates, padded_size
from samebits.backends.delta import BLOCK
from samebits.backends.recurrent import CHUNK

__all__ = [
    "FEW",
    "GRADIENT_SCORE_BYTES",
    "SCORE_BYTES",
    "STEP_KEYS",
    "DeltaChunks",
    "DeltaGradients",
    "DeltaStates",
    "Schedule",
    "Step",
    "catalogue",
    "catalogue_of_chunks",
    "catalogue_of_gradients",
    "catalogue_of_states",
    "catalogue_of_steps",
    "choose",
    "choose_chunks",
    "choose_of_gradients",
    "choose_states",
    "choose_step",
    "prepared_memory",
    "record_bytes",
    "system_bytes",
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
    rows = CHUNK * (2 * dtype.itemsize * (key_size + 16 // dtype.itemsize) + 4 * (key_size + 4))
    return rows + 3 * CHUNK // BLOCK * 64


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
        few: whether ``delta_step_few.cu`` computes, with 32 columns and 8 warps, or with a decay for each
            channel ``delta_step_few_channels.cu``, with a warp for each 8 columns and 8 others.
    """

    tile: int
    warps: int = 4
    few: bool = False

    def memory(self, dtype: torch.dtype, key_size: int, by_channel: bool = False) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, ``struct Few`` or ``struct Shared``."""
        keys, columns = (n + 16 // dtype.itemsize for n in (key_size, self.tile))
        own, decays = (6, key_size + 4) if by_channel else (2, 1)
        stored = CHUNK * (keys + columns) + own * keys + CHUNK + self.tile
        few = 8 * 2 * 4 * CHUNK // 16 if self.few else 0
        few += 49 * 4 * decays if self.few and by_channel else 0
        return few + stored * dtype.itemsize + 4 * (CHUNK * (1 + decays) + self.tile)


STEP_KEYS = 256
"""The largest keys of that kernel: it is unrolled along them."""


def catalogue_of_steps(by_channel: bool) -> tuple[Step, ...]:
    """Every schedule, for proofs."""
    if by_channel:
        return Step(64, 8), Step(128, 8), Step(32, 12, few=True), Step(64, 16, few=True)
    return Step(32), Step(64), Step(128), Step(32, 8, few=True)


def choose_step(
    dtype: torch.dtype, key_size: int, size: int, blocks: int, by_channel: bool, delta: bool, device: int
) -> Step | None:
    """The schedule for sequences times heads `blocks`: wide tiles, if all multiprocessors have one.

    With the delta rule ``delta_step_few*.cu`` are for blocks that have a multiprocessor of their own each;
    without it they are not known to take less time.
    None: this GPU has too little shared memory for all.
    """
    info = devices.device_info(device)

    def tiles(schedule: Step) -> int:
        return blocks * -(-size // schedule.tile)

    def fits(schedule: Step) -> bool:
        return schedule.memory(dtype, key_size, by_channel) <= info.max_smem

    few = [schedule for schedule in catalogue_of_steps(by_channel) if schedule.few and delta]
    wide = [Step(128, 8), Step(64, 8)] if by_channel else [Step(128), Step(64), Step(32)]
    wanted = [schedule for schedule in few if tiles(schedule) <= info.sm_count]
    wanted += [s for s in wide if size > s.tile // 2 and tiles(s) >= info.sm_count]
    return next((schedule for schedule in (*wanted, wide[-1]) if fits(schedule)), None)


CHUNK_KEYS = 128
"""The largest keys of the kernels that go through whole chunks with the delta rule."""
SCORE_BYTES = 10 * 512
"""``struct QueryScores``."""


def system_bytes(by_channel: bool) -> int:
    """``struct System``: what a chunk's triangular system has of keys and decays."""
    return 4 * (BLOCK + (1 if by_channel else 4)) * CHUNK + 6 * 512


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """How the kernel goes through the chunks that has updates and results of the delta rule, too.

    Attributes:
        warps: in a block, of 16 columns of values each; as many more compute results, half as many solve.
        stages: chunks in shared memory: at least 3.
    """

    warps: int
    stages: int = 3

    @property
    def threads(self) -> int:
        """Of a block, with those that copy."""
        return 32 * (2 * self.warps + -(-self.warps // 2) + (1 if self.warps > 2 else 2))

    def memory(self, key_size: int, by_channel: bool = False) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types."""
        rows = 2 * CHUNK * (key_size + 8)
        of_keys = 2 * rows + SCORE_BYTES + system_bytes(by_channel)
        of_keys += (rows + 4 * key_size) if by_channel else 0
        of_warp = 4 * 16 * (CHUNK + 4) + 2 * 2 * 16 * key_size
        of_values = self.stages * 2 * CHUNK * (16 * self.warps + 8)
        return (self.stages - by_channel) * of_keys + of_values + self.warps * of_warp


def catalogue_of_chunks() -> tuple[DeltaChunks, ...]:
    """Every schedule, for proofs."""
    return DeltaChunks(1), DeltaChunks(2), DeltaChunks(4), DeltaChunks(1, 4)


def takes_chunks(key_size: int, by_channel: bool, device: int) -> bool:
    """Whether those kernels take keys of this size, a multiple of 16."""
    least = DeltaChunks(1).memory(key_size, by_channel)
    return key_size <= CHUNK_KEYS and least <= devices.device_info(device).max_smem


def choose_chunks(key_size: int, size: int, blocks: int, by_channel: bool, device: int) -> DeltaChunks:
    """The schedule for sequences times heads `blocks`: wide tiles, if all multiprocessors have one."""
    info = devices.device_info(device)
    wide = size > 32 and blocks * -(-size // 64) >= info.sm_count
    wanted = (DeltaChunks(4), DeltaChunks(2), DeltaChunks(1))[0 if wide else 1 if size > 16 else 2 :]
    return next((s for s in wanted if s.memory(key_size, by_channel) <= info.max_smem), wanted[-1])


@dataclass(frozen=True, slots=True)
class DeltaStates(LinearStates):
    """The same where the delta rule's updates come from z of the forward, for gradients."""

    def memory(self, key_size: int, by_channel: bool) -> int:
        """Bytes of shared memory of a block: ``struct Memory``, of 16-bit types."""
        keys, columns = min(self.keys, key_size), 16 * self.warps
        decays = keys if by_channel else 2 * CHUNK
        return self.stages * (CHUNK * (4 * (columns + 4) + 2 * (keys + 8)) + 4 * (CHUNK + decays))


def catalogue_of_states() -> tuple[DeltaStates, ...]:
    """Every schedule, for proofs."""
    shapes = (4, 64, 4), (4, 64, 3), (4, 64, 2), (2, 64, 4), (2, 128, 3), (4, 128, 3), (8, 64, 3), (1, 32, 2)
    return tuple(DeltaStates(*shape) for shape in shapes)


def choose_states(key_size: int, by_channel: bool, device: int) -> DeltaStates:
    """The schedule for heads of this size: with as many chunks on their way as fit."""
    most = devices.device_info(device).max_smem
    wanted = [DeltaStates(4, 64, stages) for stages in (4, 3, 2)]
    return next((s for s in wanted if s.memory(key_size, by_channel) <= most), wanted[-1])


def chains_memory(size: int) -> int:
    """Bytes of shared memory of a block of the kernel that has gradients along rows of records."""
    width = min(padded_size(size), 128)
    piece = min(width, 32)
    return 2 * 32 * 4 * (-(-width // piece) * piece + 4)


REGISTER_KEYS = 128
"""The largest keys whose gradient of the matrix lies in registers."""


def record_bytes(dtype: torch.dtype, key_size: int, size: int, by_channel: bool, weighted: bool) -> int:
    """Of ``struct Record``."""
    decays = 0 if by_channel else 1 + weighted
    floats = CHUNK * (decays + 2 * size) + 2 * key_size * size
    stored = CHUNK * (key_size + 2 * size)
    rights = 2 * 2 * padded_size(key_size) * padded_size(size) if dtype.itemsize == 2 else 0
    lines = -(-(4 * floats + dtype.itemsize * stored) // 16) + -(-key_size // 4)
    return 16 * lines + rights


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
        registers: whether the gradient of the matrix lies in registers: with tensor cores, the delta rule and
            keys up to 128. `tile` is then a multiple of 32, with a decay for each channel up to 64, and
            `stages` are 2.
    """

    tile: int
    staged: bool
    stages: int
    registers: bool = False

    def warps(self, which: str, tensor_core: bool, by_channel: bool) -> int:
        """Of a block of the kernel `which`."""
        if which == "scores":
            return CHUNK // 16
        if which == "chains":
            return 1
        if which == "matrices" and self.registers:
            return self.tile // 32 * 3 + (2 if self.tile == 64 else 4)  # up to 8, or up to 16, have registers
        return 16 if which == "rows" and self.staged and tensor_core and by_channel else 8

    def takes(self, key_size: int, tensor_core: bool, delta: bool, by_channel: bool) -> bool:
        """Whether the kernels are there for such operands, if these fit into shared memory."""
        if self.registers:
            narrow = self.tile <= 64 or not by_channel
            return tensor_core and delta and narrow and key_size <= REGISTER_KEYS
        return delta or not (tensor_core and self.staged)

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
            if by_channel:
                of_scores = 2 * CHUNK * columns + 6 * 512 + 4 * ((BLOCK + 1) * CHUNK + key_size)
                copied = 2 * CHUNK * (3 * keys + self.tile + 8) + of_scores
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
