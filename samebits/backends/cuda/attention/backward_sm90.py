"""Gradients of attention on Hopper: host side of ``kernels/attention_backward_sm90.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.arch import SM_90
from samebits.backends.attention import Attention
from samebits.backends.cuda import compiler, runtime
from samebits.backends.cuda.attention import sm90
from samebits.backends.cuda.attention.maps_sm90 import (
    Layout,
    layout,
    readable,
    shared_matrices,
    tile_maps,
)
from samebits.backends.cuda.attention.problem import PROBLEM, check, lse_strides, problem
from samebits.backends.cuda.attention.universal_backward import Gradients, find_dots
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.backends.cuda.tensor_maps import Maps

__all__ = ["HopperBackward", "HopperPass", "backward", "choose", "schedules", "specs", "supports"]

_PARAMS = "128s128s128s128sPPPPPqqiiii" + PROBLEM
_SMEM = 227 * 1024
_LARGEST_HEAD = 256
_DK, _DV, _DQ = 1, 2, 4  # values of the macro GRADS


@dataclass(frozen=True, slots=True)
class HopperPass:
    """A schedule of the kernels of dK and dV, or of dQ.

    Attributes:
        warpgroups: that compute; each has 64 rows.
        step: queries, or keys, of a stage.
        stages: held at once.
    """

    warpgroups: int
    step: int
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def smem(self, head: int, values: int) -> int:
        stage = self.step * ((head + values) * 2 + 8) + 16
        return 1024 + self.rows * (head + values) * 2 + self.stages * stage + 8

    def filled(self, head: int, values: int) -> HopperPass:
        """With as many stages, up to 6, as there is room for."""
        own, one = self.smem(head, values), HopperPass(self.warpgroups, self.step, 1).smem(head, values)
        stage = (own - one) // (self.stages - 1)
        return HopperPass(self.warpgroups, self.step, min(6, self.stages + (_SMEM - own) // stage))


@dataclass(frozen=True, slots=True)
class HopperBackward:
    """The schedules of all kernels."""

    keys: HopperPass
    queries: HopperPass


def sizes(x: Attention) -> tuple[int, int]:
    """Sizes of heads as kernels have them: multiples of 64."""
    return round_up(x.q.shape[-1], 64), round_up(x.v.shape[-1], 64)


def _holds_both(head: int, values: int) -> bool:
    """Whether a warp's registers hold dK and dV."""
    return max(head, values) <= 128


def _key_grads(head: int, values: int) -> tuple[int, ...]:
    """What the kernels of dK and dV give."""
    return (_DK | _DV,) if _holds_both(head, values) else (_DK, _DV)


@functools.cache
def schedules(head: int, values: int) -> tuple[HopperBackward, ...]:
    """All that :func:`choose` may return, the best first, and those with the fewest stages."""
    if not _holds_both(head, values):
        least = HopperPass(2 if head <= 192 else 1, 64, 2)  # of 256 columns one warpgroup takes all registers
        return tuple(dict.fromkeys(HopperBackward(s, s) for s in (least.filled(head, values), least)))
    step = 128 if head + values <= 128 else 64
    found = [
        HopperBackward(
            HopperPass(2, step, 2).filled(head, values), HopperPass(2, 128, 2).filled(head, values)
        ),
        HopperBackward(HopperPass(2, 64, 2).filled(head, values), HopperPass(2, 64, 2).filled(head, values)),
        HopperBackward(HopperPass(2, 64, 2), HopperPass(2, 64, 2)),
    ]
    return tuple(dict.fromkeys(found))


def choose(x: Attention) -> HopperBackward:
    """The schedule for a call."""
    return schedules(*sizes(x))[0]


def spec(x: Attention, s: HopperPass, grads: int) -> compiler.KernelSpec:
    """A kernel under a schedule."""
    head, values = sizes(x)
    constants: dict[str, int | str] = {
        "INPUT_F16": int(x.q.dtype == torch.float16),
        "HEAD": head,
        "VALUES": values,
        "SOFTCAP": int(x.softcap != 0),
        "GRADS": grads,
        "WARPGROUPS": s.warpgroups,
        "STEP": s.step,
        "STAGES": s.stages,
    }
    return compiler.KernelSpec(
        *("attention_backward_sm90.cu", "attention_backward_sm90", _PARAMS, tuple(constants.items())),
        block=128 * s.warpgroups + 128,
        smem=s.smem(head, values),
        programmatic=True,
        oldest=SM_90,
    )


def specs(x: Attention) -> Iterator[compiler.KernelSpec]:
    """All kernels under all schedules, for tests."""
    for s in schedules(*sizes(x)):
        for grads in _key_grads(*sizes(x)):
            yield spec(x, s.keys, grads)
        yield spec(x, s.queries, _DQ)


def supports(x: Attention) -> bool:
    """Whether :func:`backward` takes the call. The universal kernels take all others."""
    return x.mask is None and sm90.supports(x, _LARGEST_HEAD)


@functools.lru_cache(maxsize=256)
def _maps(
    dtype: torch.dtype, layouts: tuple[Layout, ...], lines: tuple[int, ...]
) -> tuple[tuple[Maps, ...], int]:
    """The maps of q, k, v and the gradient, and which of them have one matrix for all."""
    maps = (tile_maps(dtype, of, n, 64, 256) for of, n in zip(layouts, lines, strict=True))
    return tuple(maps), shared_matrices(layouts)


def backward(
    x: Attention, grad: Tensor, out: Tensor, lse2: Tensor, *, schedule: HopperBackward | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.attention`.

    Args:
        x, grad, out, lse2: as there.
        schedule: instead of the default choice. Never changes a bit.
    """
    check(x)
    s = schedule or choose(x)
    if not readable(grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # it may be contiguous, and not aligned
    to = Gradients.empty(x, lse2)
    find_dots(x, grad, out, lse2, to)
    operands = (x.q, x.k, x.v, grad)
    layouts = tuple(map(layout, operands))
    batch = 1 if x.packed else x.batch

    def launch(of: HopperPass, grads: int, rows: int, heads: int, lines: tuple[int, ...]) -> None:
        maps, shared = _maps(x.q.dtype, layouts, lines)
        tiles = -(-rows // of.rows) + (x.batch if x.packed else 0)
        runtime.load(spec(x, of, grads), x.q.get_device()).launch(
            (tiles * heads * batch, 1, 1),
            *(of_operand[t.data_ptr()] for of_operand, t in zip(maps, operands, strict=True)),
            *map(address, (lse2, to.dots, to.dq, to.dk, to.dv)),
            *(*lse_strides(x), tiles, heads * batch, shared, 0),
            *problem(x),
        )

    own, step = s.keys.rows, s.keys.step
    for grads in _key_grads(*sizes(x)):
        launch(s.keys, grads, x.keys, x.kv_heads, (step, own, own, step))
    own, step = s.queries.rows, s.queries.step
    launch(s.queries, _DQ, x.queries, x.heads, (own, step, step, own))
    return to.results()
