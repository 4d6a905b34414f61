"""Host side of ``kernels/attention_sm90.cu``: attention on Hopper, without scores in memory."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.backends.cuda import compiler, devices, matmul, runtime
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.cuda.tensor_maps import Maps
from samebits.contract import contract_from_key
from samebits.functions import VOCAB_BLOCK

__all__ = [
    "AttentionSchedule",
    "AttentionVariant",
    "attention",
    "choose",
    "pays",
    "schedules",
    "spec",
    "supports",
]

_PARAMS = "128s128s128sPPPqqqqqiiiiiiiiiiiiif"
_MASKS = {None: "NONE", torch.float32: "F32", torch.bool: "BOOLEAN"}
_SMEM = 227 * 1024
_L2 = 24 << 20  # of keys and values that are used side by side
_LARGEST_HEAD = 128
_MOST_KEYS = 1 << 18
_FEW_TILES, _MANY_KEYS = 16, 1024
_LARGEST_STRIDE = 1 << 38


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """How the kernel goes about it. None changes a bit.

    Attributes:
        warpgroups: that compute; each has 64 rows.
        stages: tiles of keys or values held at once.
        held: blocks of keys whose statistics fit into shared memory; with more they are in memory.
    """

    warpgroups: int
    stages: int = 0
    held: int = 0

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.warpgroups > 1 else 32)

    def smem(self, head: int, values: int) -> int:
        """Bytes of shared memory for heads of these sizes, multiples of 16."""
        statistics = self.held * self.rows * 8
        return (
            1024
            + self.rows * _columns(head) * 2
            + self.stages * _stage(head, values)
            + statistics
            + (2 * self.stages + 2) * 8
        )

    def filled(self, head: int, values: int) -> AttentionSchedule:
        """With as many stages, up to 8, as there is room for."""
        room = _SMEM - self.smem(head, values)
        return replace(self, stages=max(0, min(8, room // (_stage(head, values) + 16))))


def _columns(head: int) -> int:
    return round_up(head, 64)


def _stage(head: int, values: int) -> int:
    """Bytes of a tile of keys or values."""
    return VOCAB_BLOCK * 2 * max(_columns(head), round_up(values, 64 if values % 64 == 0 else 32))


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What a compiled kernel is specialised to, besides its schedule; sizes are multiples of 16."""

    dtype: torch.dtype
    head: int
    values: int
    mask: torch.dtype | None


def spec(case: AttentionVariant, s: AttentionSchedule) -> compiler.KernelSpec:
    """The kernel of `case` under a schedule."""
    constants: dict[str, int | str] = {
        "INPUT_F16": int(case.dtype == torch.float16),
        "HEAD": case.head,
        "VALUES": case.values,
        "MASK": _MASKS[case.mask],
        "WARPGROUPS": s.warpgroups,
        "STAGES": s.stages,
        "HELD": s.held,
    }
    return compiler.KernelSpec(
        source="attention_sm90.cu",
        entry="attention_sm90",
        params=_PARAMS,
        constants=tuple(constants.items()),
        block=s.threads,
        smem=s.smem(case.head, case.values),
        programmatic=True,
    )


@functools.cache
def schedules(head: int, values: int) -> tuple[AttentionSchedule, ...]:
    """All that :func:`choose` may return: with one warpgroup for few rows, then with two."""
    sizes = itertools.product((1, 2), (32, 64, 128, 0))
    found = (AttentionSchedule(warpgroups, held=held).filled(head, values) for warpgroups, held in sizes)
    return tuple(s for s in found if s.stages >= 3)


def choose(head: int, values: int, rows: int, blocks: int) -> AttentionSchedule:
    """The schedule for heads of these sizes, so many rows that share a head of k, and blocks of keys."""
    warpgroups = 1 if rows <= 64 else 2
    fitting = (s for s in schedules(head, values) if s.warpgroups == warpgroups)
    return next(s for s in fitting if s.held >= blocks or s.held == 0)


def supports(q: Tensor, k: Tensor, v: Tensor, contract: str) -> bool:
    """Whether :func:`attention` takes these operands; kernels that store scores take all others."""
    head, values = q.shape[-1], v.shape[-1]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and contract_from_key(contract).step == "mma"
        and devices.device_info(q.get_device()).capability == (9, 0)
        and 0 < head <= _LARGEST_HEAD
        and 0 < values <= _LARGEST_HEAD
        and head % 8 == values % 8 == 0
        and q.numel() > 0
        and 0 < k.shape[2] <= _MOST_KEYS
        and q.shape[3] <= _MOST_KEYS
        and q.numel() // head < 1 << 30
        and _readable(q)
        and _readable(k)
        and _readable(v)
    )


def pays(q: Tensor, k: Tensor) -> bool:
    """Whether it is faster: not for a few queries over many keys, which few multiprocessors would go over."""
    batch, heads, group, queries, _ = q.shape
    return batch * heads * -(-group * queries // 64) >= _FEW_TILES or k.shape[2] <= _MANY_KEYS


def _tiles(s: AttentionSchedule, group: int, queries: int) -> tuple[int, int, int, int]:
    """Queries of a member in a tile, as a power of two; members in it; tiles of queries and of members."""
    power = min((queries - 1).bit_length(), (s.rows - 1).bit_length())
    members = s.rows >> power
    return power, members, -(-queries // (1 << power)), -(-group // members)


def _readable(x: Tensor) -> bool:
    """Whether the copy engine can read ``x[batch, heads, ..., size]``."""
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    inner = [s for n, s in zip(x.shape[2:-1], x.stride()[2:-1], strict=True) if n > 1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s % 8 == 0 and s < _LARGEST_STRIDE for s in strides[:-1])
        # One matrix may serve all of the batch or all heads, but rows do not overlap.
        and all(s >= x.shape[-1] for s in inner)
    )


_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def _maps(dtype: torch.dtype, layout: _Layout, box: tuple[int, ...], swizzle: int) -> Maps:
    """Tensor maps of ``x[batch, heads, ..., size]``, in which one matrix may serve all of a dimension."""
    sizes, strides = [], []
    for n, stride in zip(*layout, strict=True):
        sizes.append(1 if stride == 0 else n)
        strides.append(16 if stride == 0 or n == 1 else stride * 2)
    return Maps(dtype, tuple(sizes[::-1]), tuple(strides[-2::-1]), box, swizzle)


def _shared(layout: _Layout) -> tuple[bool, bool]:
    """Whether one matrix serves all of the batch, and all heads."""
    batch, heads, *_ = layout[1]
    return batch == 0, heads == 0


@functools.lru_cache(maxsize=256)  # a cache of keys that grows makes an entry at each step
def _prepared(
    case: AttentionVariant,
    layouts: tuple[_Layout, _Layout, _Layout],
    causal: bool,
    device: int,
    schedule: AttentionSchedule | None,
) -> tuple[runtime.Kernel, int, tuple[Maps, Maps, Maps], tuple[int, ...], int]:
    """The kernel, its grid, the maps, the parameters from `heads` on, and how many floats of scratch."""
    (batch, heads, group, queries, _), (keys, values) = layouts[0][0], layouts[2][0][2:]
    blocks = -(-keys // VOCAB_BLOCK)
    s = schedule or choose(case.head, case.values, group * queries, blocks)
    if s.held < blocks:
        s = replace(s, held=0)
    power, members, query_tiles, member_tiles = _tiles(s, group, queries)
    tiles = batch * heads * query_tiles * member_tiles
    together = max(1, min(batch * heads, _L2 // (2 * keys * (layouts[1][0][3] + values))))
    flags = [_shared(layout) for layout in layouts]
    shared = sum(all_batch << i | all_heads << i + 3 for i, (all_batch, all_heads) in enumerate(flags))
    grid = tiles if s.held else min(tiles, devices.device_info(device).sm_count)
    width = 64 if case.values % 64 == 0 else 32
    maps = (
        _maps(case.dtype, layouts[0], (64, 1 << power, members, 1, 1), 128),
        _maps(case.dtype, layouts[1], (64, VOCAB_BLOCK, 1, 1), 128),
        _maps(case.dtype, layouts[2], (width, VOCAB_BLOCK, 1, 1), width * 2),
    )
    parameters = (
        *(heads, group, queries, keys, values, batch * heads, shared, power),
        *(tiles, query_tiles, member_tiles, together, int(causal)),
    )
    scratch = 0 if s.held else grid * s.rows * blocks * 2
    return runtime.load(spec(case, s), device), grid, maps, parameters, scratch


def _layout(x: Tensor) -> _Layout:
    return tuple(x.shape), tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    contract: str,
    *,
    out: Tensor | None = None,
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """``softmax(q @ k.mT * scale + mask) @ v`` as ``[batch, heads, group, queries, values]``, contiguous.

    Args:
        q: ``[batch, heads, group, queries, size]``.
        k, v: ``[batch, heads, keys, size]``.
        mask: ``[batch, heads, group, queries, keys]``, boolean or float32, any strides.
        causal: query i sees keys 0 to i.
        scale: float32.
        contract: of tensor cores.
        out: where to write it.
        schedule: instead of the default choice. Never changes a bit.
    """
    device = q.get_device()
    matmul.check_contract(contract, device)
    if out is None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    case = AttentionVariant(
        q.dtype, round_up(q.shape[-1], 16), round_up(v.shape[-1], 16), None if mask is None else mask.dtype
    )
    layouts = _layout(q), _layout(k), _layout(v)
    kernel, grid, maps, parameters, scratch = _prepared(case, layouts, causal, device, schedule)
    room = torch.empty(scratch, dtype=torch.float32, device=q.device) if scratch else None
    kernel.launch(
        (grid, 1, 1),
        *(of[x.data_ptr()] for of, x in zip(maps, (q, k, v), strict=True)),
        *(out.data_ptr(), 0 if mask is None else mask.data_ptr(), 0 if room is None else room.data_ptr()),
        *((0,) * 5 if mask is None else mask.stride()),
        *(*parameters, scale),
    )
    return out
