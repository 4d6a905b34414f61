"""Gradients of attention by the universal kernels: host side of ``kernels/attention_backward.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.attention import Attention
from samebits.backends.cuda import compiler, devices, rows, runtime
from samebits.backends.cuda.attention.problem import PROBLEM, address, check, lse_strides, problem
from samebits.backends.cuda.attention.universal import (
    Variant,
    strides,
    tile_counts,
    to_widen,
    variant,
    widened,
)

__all__ = ["Backward", "backward", "backward_schedules", "choose_backward", "specs"]

_BACKWARD = "PPPPPPPPPPPPP" + 8 * "qqqq" + "qq" + "ii" + PROBLEM


@dataclass(frozen=True, slots=True)
class Backward:
    """How a pass of the backward goes about it. None changes a bit.

    Attributes:
        warps: of a block; each has 16 keys, or 16 rows of queries.
        step: queries, or keys, of a stage.
        stages: of the ring.
        min_blocks: blocks that shall fit on one multiprocessor.
    """

    warps: int
    step: int
    stages: int
    min_blocks: int

    @property
    def rows(self) -> int:
        return 16 * self.warps

    def smem(self, of: Variant) -> int:
        return (self.rows + self.stages * self.step) * (of.pitch(of.head) + of.pitch(of.values))

    @property
    def static_smem(self) -> int:
        return self.stages * self.step * 8


@functools.cache
def backward_schedules(of: Variant, max_smem: int) -> tuple[Backward, ...]:
    """All that :func:`choose_backward` may return, the best first."""
    found = (Backward(4, 32, 2, 1), Backward(4, 16, 2, 1), Backward(2, 16, 2, 1), Backward(1, 16, 2, 1))
    return tuple(s for s in found if s.smem(of) + s.static_smem <= max_smem)


_ROWS, _DK, _DV, _DQ = 0, 1, 2, 4  # values of the macro GRADS


def backward_spec(
    of: Variant, s: Backward, entry: str, grads: int, grad_mask: bool = False
) -> compiler.KernelSpec:
    """A kernel of the backward."""
    constants = of.constants(s.warps, of.values) | {
        "STEP": s.step,
        "STAGES": s.stages,
        "MIN_BLOCKS": s.min_blocks,
        "GRADS": grads,
        "GRAD_MASK": int(grad_mask),
    }
    return compiler.KernelSpec(
        *("attention_backward.cu", entry, _BACKWARD, tuple(constants.items())),
        block=256 if grads == _ROWS else 32 * s.warps,
        smem=0 if grads == _ROWS else s.smem(of),
        oldest=of.oldest,
    )


def _key_grads(of: Variant) -> tuple[int, ...]:
    """What the kernels of dK and dV give: both at once, if a warp's registers hold them."""
    return (_DK | _DV,) if of.head + of.values <= 256 else (_DK, _DV)


def specs(of: Variant, max_smem: int, *, grad_mask: bool = False) -> Iterator[compiler.KernelSpec]:
    """All kernels under all schedules, for tests."""
    for s in backward_schedules(of, max_smem):
        for grads in _key_grads(of):
            yield backward_spec(of, s, "grad_keys", grads)
        yield backward_spec(of, s, "grad_queries", _DQ, grad_mask)
    yield backward_spec(of, backward_schedules(of, max_smem)[0], "grad_dots", _ROWS)


def choose_backward(x: Attention, of: Variant) -> Backward:
    """The backward's schedule."""
    info = devices.device_info(x.q.get_device())
    found = next(iter(backward_schedules(of, info.max_smem)), None)
    if found is None:
        raise UnavailableError(
            f"{info.name} has {info.max_smem} bytes of shared memory, too few for gradients of attention in"
            f" {of.dtype} with heads of {of.head} and {of.values} — use CPU tensors"
        )
    return found


def backward(
    x: Attention,
    grad: Tensor,
    out: Tensor,
    lse2: Tensor,
    *,
    grad_mask: bool = False,
    schedule: Backward | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.attention`.

    Args:
        x, grad, out, lse2, grad_mask: as there.
        schedule: instead of the default choice. Never changes a bit.
    """
    if to_widen(x):
        wide = grad.to(torch.float32), out.to(torch.float32)
        found = backward(widened(x), *wide, lse2, grad_mask=grad_mask, schedule=schedule)
        dq, dk, dv = (t.to(x.q.dtype) for t in found[:3])
        return dq, dk, dv, *found[3:]
    check(x)
    of = variant(x, grad)
    if schedule is None:
        schedule = choose_backward(x, of)
    device = x.q.get_device()
    dots = torch.empty_like(lse2)
    # Tokens of no sequence have zeros, and so have pairs that no block goes over.
    dq = (torch.empty if not x.packed else torch.zeros)(x.q.shape, dtype=x.q.dtype, device=x.q.device)
    dk, dv = (
        (torch.empty if x.whole_keys else torch.zeros)(t.shape, dtype=t.dtype, device=t.device)
        for t in (x.k, x.v)
    )
    mask_shape = (x.batch, x.heads, x.queries, x.keys)
    dmask = torch.zeros(mask_shape, dtype=torch.float32, device=x.q.device) if grad_mask else None
    tokens = x.q.shape[:-2].numel()
    of_sinks = (
        None if x.sinks is None else torch.zeros(tokens, x.heads, dtype=torch.float32, device=x.q.device)
    )
    if out.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dmask, None if x.sinks is None else torch.zeros_like(x.sinks)
    tensors = (x.q, x.k, x.v, grad, out)

    def launch(grid: int, entry: str, grads: int, tiles: int = 0) -> None:
        if grid == 0:
            return
        kernel = runtime.load(backward_spec(of, schedule, entry, grads, grad_mask and grads == _DQ), device)
        kernel.launch(
            (grid, 1, 1),
            *map(address, (*tensors, x.sinks, lse2, dots, dq, dk, dv, dmask, of_sinks)),
            *(s for t in (*tensors, dq, dk, dv) for s in strides(t)),
            *(*lse_strides(x), tiles, 0),
            *problem(x),
        )

    launch(-(-x.q.shape[:-1].numel() // 8), "grad_dots", _ROWS)
    if x.cu_seqlens_k is None:
        key_tiles = -(-x.keys // schedule.rows) * x.batch
    else:
        key_tiles = -(-x.keys // schedule.rows) + x.batch
    for grads in _key_grads(of):
        launch(key_tiles * x.kv_heads, "grad_keys", grads)
    tiles, all_tiles = tile_counts(x, schedule.rows)
    launch(all_tiles * x.kv_heads, "grad_queries", _DQ, tiles)
    dsinks = None if of_sinks is None else rows.column_sum(of_sinks, torch.float32)
    return dq, dk, dv, dmask, dsinks
