"""Attention on Hopper, forward: host side of ``kernels/attention_sm90.cu``."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.attention import BLOCK, Attention
from samebits.backends.cuda import compiler, devices, runtime
from samebits.backends.cuda.attention.universal import _PROBLEM, _address, _check, _lse_strides, _problem
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.cuda.tensor_maps import Maps
from samebits.contract import contract_from_key

__all__ = ["Schedule", "Variant", "choose", "forward", "schedules", "spec", "supports"]

_PARAMS = "128s128s128sPPPPqqiiii" + _PROBLEM
_LARGEST_HEAD = 128
_LARGEST_STRIDE = 1 << 38
_SMEM = 227 * 1024
_L2 = 24 << 20  # bytes of keys and values that are used side by side


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel is specialised to, besides its schedule. Sizes are multiples of 16."""

    dtype: torch.dtype
    head: int
    values: int
    softcap: bool

    @property
    def stage(self) -> int:
        """Bytes of a tile of keys or of values."""
        return BLOCK * 2 * max(_columns(self.head), round_up(self.values, self.width))

    @property
    def width(self) -> int:
        """Columns of values that one copy brings."""
        return 64 if self.values % 64 == 0 else 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the kernel goes about it. None changes a bit.

    Attributes:
        warpgroups: that compute; each has 64 rows.
        stages: tiles of keys or values held at once.
    """

    warpgroups: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def smem(self, of: Variant) -> int:
        total = 0 if of.values <= 64 and self.warpgroups < 3 else self.rows * of.values * 4
        barriers = (2 * self.stages + 2) * 8
        return 1024 + self.rows * _columns(of.head) * 2 + self.stages * of.stage + total + barriers


def _columns(head: int) -> int:
    return round_up(head, 64)


@functools.cache
def schedules(of: Variant) -> tuple[Schedule, ...]:
    """All that :func:`choose` may return."""
    found = (Schedule(warpgroups, stages) for warpgroups in (3, 2, 1) for stages in (8, 6, 4, 3))
    return tuple(s for s in found if s.smem(of) <= _SMEM)


def spec(of: Variant, s: Schedule) -> compiler.KernelSpec:
    """The kernel under a schedule."""
    constants: dict[str, int | str] = {
        "INPUT_F16": int(of.dtype == torch.float16),
        "HEAD": of.head,
        "VALUES": of.values,
        "SOFTCAP": int(of.softcap),
        "WARPGROUPS": s.warpgroups,
        "STAGES": s.stages,
    }
    return compiler.KernelSpec(
        *("attention_sm90.cu", "attention_sm90", _PARAMS, tuple(constants.items())),
        block=128 * s.warpgroups + 128,
        smem=s.smem(of),
        programmatic=True,
        oldest=(9, 0),
    )


def choose(x: Attention, of: Variant) -> Schedule:
    """The schedule for a call."""
    rows = -(-x.queries // x.batch) if x.packed else x.queries
    warpgroups = 1 if rows <= 64 else 2
    return next(s for s in schedules(of) if s.warpgroups == warpgroups)


def supports(x: Attention) -> bool:
    """Whether :func:`forward` takes the call. The universal kernels take all others."""
    head, values = x.q.shape[-1], x.v.shape[-1]
    return (
        x.q.dtype in (torch.bfloat16, torch.float16)
        and x.mask is None
        and x.block_table is None
        and contract_from_key(x.contract).step == "mma"
        and devices.device_info(x.q.get_device()).capability == (9, 0)
        and 0 < head <= _LARGEST_HEAD
        and 0 < values <= _LARGEST_HEAD
        and head % 8 == values % 8 == 0
        and x.q.numel() > 0
        and x.k.numel() > 0
        and all(map(_readable, (x.q, x.k, x.v)))
    )


def _readable(x: Tensor) -> bool:
    """Whether the copy engine can read ``x[..., tokens, heads, size]``."""
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    tokens = x.stride(-3) if x.shape[-3] > 1 else x.shape[-1]
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(s % 8 == 0 and s < _LARGEST_STRIDE for s in strides)
        and tokens
        >= x.shape[-1]  # one matrix may serve all heads or all of the batch, but rows do not overlap
    )


_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of x[batch, tokens, heads, size]


def _layout(x: Tensor) -> _Layout:
    shape, strides = tuple(x.shape), x.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    return shape, tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))


def _maps(dtype: torch.dtype, layout: _Layout, lines: int, width: int) -> Maps:
    (batch, tokens, heads, size), (of_batch, of_token, of_head, _) = layout
    sizes = (size, tokens, heads if of_head else 1, batch if of_batch else 1)
    strides = tuple(2 * s or 16 for s in (of_token, of_head, of_batch))
    return Maps(dtype, sizes, strides, (width, lines, 1, 1), width * 2)


@functools.lru_cache(maxsize=256)  # a cache of keys that grows makes an entry at each step
def _prepared(
    of: Variant, s: Schedule, layouts: tuple[_Layout, ...], device: int
) -> tuple[runtime.Kernel, tuple[Maps, ...], int]:
    """The kernel, the maps of q, k and v, and which of them have one matrix for all."""
    maps = (
        _maps(of.dtype, layouts[0], s.rows, 64),
        _maps(of.dtype, layouts[1], BLOCK, 64),
        _maps(of.dtype, layouts[2], BLOCK, of.width),
    )
    shared = 0
    for i, (_, (of_batch, _, of_head, _)) in enumerate(layouts):
        shared |= (of_batch == 0) << i | (of_head == 0) << i + 3
    return runtime.load(spec(of, s), device), maps, shared


def forward(x: Attention, *, schedule: Schedule | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`samebits.backends.attention`.

    Args:
        schedule: instead of the default choice. Never changes a bit.
    """
    _check(x)
    of = Variant(x.q.dtype, round_up(x.q.shape[-1], 16), round_up(x.v.shape[-1], 16), softcap=x.softcap != 0)
    s = schedule or choose(x, of)
    device = x.q.get_device()
    out = x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1]))
    lse, lse2 = (torch.empty(x.lse_shape, dtype=torch.float32, device=x.q.device) for _ in range(2))
    if x.packed:  # there may be tokens of no sequence
        out.zero_()
        lse.fill_(-torch.inf)
        lse2.fill_(-torch.inf)
    operands = (x.q, x.k, x.v)
    kernel, maps, shared = _prepared(of, s, tuple(map(_layout, operands)), device)
    tiles = -(-x.queries // s.rows) + (x.batch if x.packed else 0)
    heads = x.heads if x.packed else x.batch * x.heads
    of_head = 2 * x.keys * (x.k.shape[-1] + x.v.shape[-1])
    together = min(heads, x.group * max(1, _L2 // of_head))
    kernel.launch(
        (min(tiles * heads, devices.device_info(device).sm_count), 1, 1),
        *(of_operand[t.data_ptr()] for of_operand, t in zip(maps, operands, strict=True)),
        *map(_address, (out, x.sinks, lse, lse2)),
        *(*_lse_strides(x), tiles, heads, together, shared),
        *_problem(x),
    )
    return out, lse, lse2
