"""Attention by the universal kernels: host side of ``kernels/attention.cu``.

They take all that docs/contract.md, "Attention", allows: on tensor cores from sm_80 on, under FMA from
sm_75 on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.arch import SM_75, SM_80
from samebits.backends.attention import BLOCK, SEGMENT, Attention
from samebits.backends.cuda import compiler, devices, matmul, runtime
from samebits.backends.cuda.attention import mask
from samebits.backends.cuda.attention.problem import (
    PROBLEM,
    check,
    empty_results,
    lse_strides,
    problem,
    sequences,
    with_tokens,
)
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.contract import INTERPOLATION, contract_from_key

__all__ = ["Forward", "Merge", "Variant", "choose", "forward", "forward_schedules", "specs", "variant"]

_SCRATCH = 512 << 20  # bytes that the segments of split keys may take

_LONG = 256  # values of which four warps share a row's, in 16 bits

# The parameter structs.
_FORWARD = "PPPPPPPP" + 3 * "qqqq" + "qqqqq" + "iiii" + PROBLEM


@dataclass(frozen=True, slots=True)
class Variant:
    """What kernels are specialised to, besides their schedules. Sizes are multiples of 16."""

    dtype: torch.dtype
    head: int
    values: int
    vector: bool
    mask: torch.dtype | None
    softcap: bool
    paged: bool
    hardware_exp2: bool

    def constants(self, warps: int, values: int) -> dict[str, int | str]:
        return {
            "TYPE": mask.NAMES[self.dtype],
            "HEAD": self.head,
            "VALUES": values,
            "WARPS": warps,
            "VECTOR": int(self.vector),
            "MASK": mask.NAMES[self.mask],
            "SOFTCAP": int(self.softcap),
            "PAGED": int(self.paged),
            "HARDWARE_EXP2": int(self.hardware_exp2),
        }

    @property
    def oldest(self) -> tuple[int, int]:
        return SM_75 if self.dtype == torch.float32 else SM_80

    def pitch(self, columns: int) -> int:
        """Bytes of a line in shared memory."""
        return (columns * self.dtype.itemsize // 16 | 1) * 16


@dataclass(frozen=True, slots=True)
class Forward:
    """A schedule of the forward.

    Attributes:
        row_warps: warps with 16 rows of a tile each.
        parts: warps that share such rows; each has some of the keys, and some columns of the values.
        key_step: keys of a stage.
        stages: of the ring.
        min_blocks: blocks that shall fit on one multiprocessor.
        split: whether blocks share the segments of a tile, and a second kernel merges them.
    """

    row_warps: int
    parts: int
    key_step: int
    stages: int
    min_blocks: int
    split: bool

    @property
    def rows(self) -> int:
        return 16 * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.parts

    def values(self, of: Variant) -> int:
        return round_up(of.values, 16 * self.parts)

    def smem(self, of: Variant) -> int:
        values = self.values(of)
        shown = 0 if of.mask is None else mask.SHOWN_KEYS
        merged = 0 if self.split else self.threads * values // self.parts * 2
        exchange = 0 if self.parts == 1 else self.rows * (self.parts + BLOCK + 8) * 4
        stage = self.key_step * max(of.pitch(of.head), of.pitch(values))
        return self.rows * of.pitch(of.head) + self.stages * stage + exchange + shown + merged


def _forward_candidates(of: Variant) -> Iterator[Forward]:
    narrow = of.dtype.itemsize == 2
    for row_warps, split in itertools.product((4, 2, 1), (False, True)):
        # Two warps for 16 rows where the columns of values take too many registers; four where few rows are
        # to be done soon.
        if of.values > _LONG:
            all_parts: tuple[int, ...] = (4,) if narrow else (2,)
        else:
            all_parts = (2,) if of.values > 128 else (1,) if row_warps > 1 or of.values % 64 else (1, 4)
        for parts in all_parts:
            step = (32 if narrow else 16) if parts == 1 else 16 * parts
            for stages in (6, 3, 2) if row_warps * parts == 1 else (3, 2):
                blocks = {1: 2, 4: 3}.get(parts, 1) if row_warps * parts == 4 and of.head <= 128 else 1
                yield Forward(row_warps, parts, step, stages, blocks if narrow else 1, split)


@functools.cache
def forward_schedules(of: Variant, max_smem: int) -> tuple[Forward, ...]:
    """All that :func:`choose` may return, on a GPU with so much shared memory for a block."""
    return tuple(s for s in _forward_candidates(of) if s.smem(of) <= max_smem)


def _constants(of: Variant, s: Forward) -> dict[str, int | str]:
    return of.constants(s.row_warps * s.parts, s.values(of)) | {
        "PARTS": s.parts,
        "KEY_STEP": s.key_step,
        "STAGES": s.stages,
        "MIN_BLOCKS": s.min_blocks,
        "SPLIT": int(s.split),
    }


def _params(of: Variant) -> str:
    return _FORWARD + (mask.ROWS if of.mask is not None else "")


def forward_spec(of: Variant, s: Forward, programmatic: bool) -> compiler.KernelSpec:
    """The forward under a schedule."""
    return compiler.KernelSpec(
        *("attention.cu", "attention", _params(of), tuple(_constants(of, s).items())),
        block=s.threads,
        smem=s.smem(of),
        programmatic=programmatic,
        oldest=of.oldest,
    )


def merge_spec(of: Variant, s: Forward, programmatic: bool) -> compiler.KernelSpec:
    """The merge of the segments that the forward under a schedule leaves."""
    return compiler.KernelSpec(
        *("attention.cu", "merge_segments", _params(of), tuple(_constants(of, s).items())),
        block=min(512, 4 * round_up(of.values, 32)),
        programmatic=programmatic,
        oldest=of.oldest,
    )


def specs(of: Variant, max_smem: int) -> Iterator[compiler.KernelSpec]:
    """All kernels under all schedules, for tests."""
    for s in forward_schedules(of, max_smem):
        yield forward_spec(of, s, programmatic=False)
    yield merge_spec(of, next(s for s in forward_schedules(of, max_smem) if s.split), programmatic=False)
    if of.mask is not None:
        yield from mask.specs(of.mask)


def variant(x: Attention, *more: Tensor) -> Variant:
    """What kernels are specialised to for a call, and further tensors that they read as they read q."""
    step = contract_from_key(x.contract).step
    return Variant(
        dtype=x.q.dtype,
        head=round_up(x.q.shape[-1], 16),
        values=round_up(x.v.shape[-1], 16),
        vector=all(map(_aligned, (x.q, x.k, x.v, *more))),
        mask=None if x.mask is None else x.mask.dtype,
        softcap=x.softcap != 0,
        paged=x.block_table is not None,
        hardware_exp2=step == "mma" and matmul.family(x.q.get_device()).exp2 == INTERPOLATION,
    )


def _aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and consist of aligned chunks of 16 bytes."""
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    sizes = (x.shape[-1], *strides)
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in sizes)


def tile_counts(x: Attention, rows: int) -> tuple[int, int]:
    """Tiles of so many rows in a sequence, and no fewer than there are for a head of k."""
    if not x.packed:
        tiles = -(-x.queries * x.group // rows)
        return tiles, tiles * x.batch
    # How long sequences are is not known here. Each has at most one tile that is not full.
    return 0, -(-x.queries * x.group // rows) + x.batch


def choose(x: Attention, of: Variant) -> tuple[Forward, int]:
    """The forward's schedule for a call, and how many blocks share a tile."""
    info = devices.device_info(x.q.get_device())
    rows = x.queries * x.group
    if x.packed:
        rows = -(-rows // with_tokens(x))
    warps = next((w for w in (1, 2) if rows <= 16 * w), 4)
    schedules = forward_schedules(of, info.max_smem)
    segments = -(-x.keys // SEGMENT)
    if of.values > _LONG:  # no more rows fit, and one block
        warps = 1 if tile_counts(x, 32)[1] * x.kv_heads * segments < info.sm_count else min(warps, 2)
    tiles = max(1, tile_counts(x, 16 * warps)[1] * x.kv_heads)
    # Few rows: four warps share a segment if there are no more of those than warps that run at once; else
    # there are to be many streams of keys, of equal length. Many rows: a multiprocessor needs a block.
    hurried = warps == 1 and tiles * segments <= 4 * info.sm_count
    full = 4 * info.sm_count
    shares = (
        max(2, info.sm_count // tiles)
        if of.values > _LONG
        else segments
        if hurried
        else -(-4 * full // tiles)
        if warps < 4 and tiles < 2 * full
        else full // (4 * tiles)
    )
    scratch = x.q.shape[:-1].numel() * segments * (round_up(of.values, 64) + 2) * 4
    split = segments > 1 and shares > 1 and scratch <= _SCRATCH
    wanted = (
        lambda s: s.split == split and (s.parts == 4) == hurried,
        lambda s: s.split == split,
        lambda s: True,
    )
    fitting = [s for s in schedules if s.row_warps <= warps]
    found = next((s for want in wanted for s in fitting if want(s)), None)
    if found is not None and found.split != split:
        shares = 1
    if found is None:
        raise UnavailableError(
            f"{info.name} has {info.max_smem} bytes of shared memory, too few for attention in"
            f" {of.dtype} with heads of {of.head} and {of.values} — use CPU tensors"
        )
    return found, max(1, min(segments, shares)) if found.split else 1


def strides(x: Tensor) -> tuple[int, int, int, int]:
    """Strides of batch (or page), token, head and column."""
    token, head, column = x.stride()[-3:]
    return 0 if x.ndim == 3 else x.stride(0), token, head, column


def to_widen(x: Attention) -> bool:
    """Whether operands of 16 bits are to be computed with in float32, under FMA."""
    return contract_from_key(x.contract).step == "fma" and x.q.dtype != torch.float32


def widened(x: Attention) -> Attention:
    q, k, v = (t.to(torch.float32) for t in (x.q, x.k, x.v))
    return replace(x, q=q, k=k, v=v)


def forward(
    x: Attention, out: Tensor | None = None, *, schedule: Forward | None = None, splits: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`samebits.backends.attention`.

    Args:
        x, out: as there.
        schedule: instead of the default choice, with `splits` blocks for a tile. Never changes a bit.
    """
    if to_widen(x):
        wide, lse, lse2 = forward(widened(x), schedule=schedule, splits=splits)
        return wide.to(x.q.dtype), lse, lse2
    check(x)
    of = variant(x)
    if schedule is None:
        schedule, splits = choose(x, of)
    out, lse, lse2 = empty_results(x, out)
    if out.numel() == 0:
        return out, lse, lse2
    device = x.q.get_device()
    programmatic = devices.device_info(device).arch.copies_tiles
    tiles, all_tiles = tile_counts(x, schedule.rows)
    segments = -(-x.keys // SEGMENT)
    scratch = None
    if schedule.split:
        floats = x.q.shape[:-1].numel() * segments * (schedule.values(of) + 2)
        scratch = runtime.empty((max(floats, 1),), torch.float32, device)
    rows = None if x.mask is None else mask.find_rows(x)
    values = (
        *map(address, (x.q, x.k, x.v, x.sinks, out, lse, lse2, scratch)),
        *_sizes(x, tiles, splits),
        *problem(x),
        *(() if rows is None else rows.values),
    )
    grid = all_tiles * x.kv_heads * splits
    runtime.load(forward_spec(of, schedule, programmatic), device).launch((grid, 1, 1), *values)
    if schedule.split:
        merge = runtime.load(merge_spec(of, schedule, programmatic), device)
        merge.launch((x.q.shape[:-1].numel(), 1, 1), *values)
    return out, lse, lse2


def _sizes(x: Attention, tiles: int, splits: int) -> tuple[int, ...]:
    """Members of the forward's ``struct Params`` between the addresses of tensors and the problem."""
    by_row = x.heads * x.v.shape[-1]
    of_out = (0 if x.packed else x.queries * by_row, by_row, x.v.shape[-1])
    segments = -(-x.keys // SEGMENT)
    of_tensors = (*strides(x.q), *strides(x.k), *strides(x.v), *of_out)
    return (*of_tensors, *lse_strides(x), tiles, splits, segments, 0)


@dataclass(frozen=True, slots=True)
class Merge:
    """Merges segments that another kernel left in scratch, ``[rows, segments, values + 2]``.

    Attributes:
        kernel: ``merge_segments``.
        rows: how many there are.
        sizes: members of ``struct Params`` between the addresses of tensors and those of sequences.
        problem: those after the mask's.
    """

    kernel: runtime.Kernel
    rows: int
    sizes: tuple[int, ...]
    problem: tuple[Any, ...]

    @classmethod
    def of(cls, x: Attention) -> Merge:
        """For calls of this geometry."""
        kernel = runtime.load(cls.spec(x), x.q.get_device())
        return cls(kernel, x.q.shape[:-1].numel(), _sizes(x, 0, 0), problem(x)[7:])

    @staticmethod
    def spec(x: Attention) -> compiler.KernelSpec:
        """Its kernel for such a call."""
        of, info = variant(x), devices.device_info(x.q.get_device())
        schedules = forward_schedules(of, info.max_smem)
        s = next(s for s in schedules if s.split and s.values(of) == of.values)
        return merge_spec(of, s, info.arch.copies_tiles)

    def run(
        self, x: Attention, out: Tensor, lse: Tensor, lse2: Tensor, scratch: Tensor, rows: mask.Rows | None
    ) -> None:
        self.kernel.launch(
            (self.rows, 1, 1),
            *map(address, (x.q, x.k, x.v, x.sinks, out, lse, lse2, scratch)),
            *self.sizes,
            *sequences(x),
            *self.problem,
            *(() if rows is None else rows.values),
        )
