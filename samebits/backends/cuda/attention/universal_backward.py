"""Gradients of attention by the universal kernels: host side of ``kernels/attention_backward.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samebits.backends import UnavailableError
from samebits.backends.attention import Attention
from samebits.backends.cuda import compiler, devices, rows, runtime
from samebits.backends.cuda.attention import mask
from samebits.backends.cuda.attention.problem import PROBLEM, check, lse_strides, problem
from samebits.backends.cuda.attention.universal import (
    Variant,
    strides,
    tile_counts,
    to_widen,
    variant,
    widened,
)
from samebits.backends.cuda.operands import address
from samebits.backends.cuda.products.schedule_sm90 import round_up
from samebits.functions import VOCAB_BLOCK

__all__ = ["Backward", "Gradients", "backward", "backward_schedules", "choose_backward", "find_dots", "specs"]

_BACKWARD = "PPPPPPPPPP" + 7 * "qqqq" + "qq" + "ii" + PROBLEM
_DOTS = "PPPPPP" + 2 * "qqqq" + "qqq" + "iiii"


@dataclass(frozen=True, slots=True)
class Backward:
    """A schedule of a pass of the backward.

    Attributes:
        row_warps: warps with 16 keys, or 16 rows of queries, of a tile each.
        parts: warps that share such rows; each has some columns of the result.
        step: queries, or keys, of a stage.
        stages: of the ring.
        min_blocks: blocks that shall fit on one multiprocessor.
    """

    row_warps: int
    parts: int
    step: int
    stages: int
    min_blocks: int

    @property
    def rows(self) -> int:
        return 16 * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.parts

    def sized(self, of: Variant) -> Variant:
        """The variant, with columns that parts can share."""
        head, values = (round_up(n, 16 * self.parts) for n in (of.head, of.values))
        return replace(of, head=head, values=values)

    def smem(self, of: Variant) -> int:
        shown = 0 if of.mask is None else mask.SHOWN_KEYS
        of = self.sized(of)
        return (self.rows + self.stages * self.step) * (of.pitch(of.head) + of.pitch(of.values)) + shown

    def static_smem(self, of: Variant) -> int:
        exchange = self.rows * (self.step + 8) * 4 if self.parts > 1 else 4 * (self.step + 8)
        return self.stages * self.step * (8 if of.mask is None else 12) + exchange


@functools.cache
def backward_schedules(of: Variant, max_smem: int) -> tuple[Backward, ...]:
    """All that :func:`choose_backward` may return, the best first."""
    if max(of.head, of.values) > 256:  # registers do not hold so many columns
        found: tuple[Backward, ...] = (
            Backward(2, 2, 32, 2, 1),
            Backward(1, 2, 32, 2, 1),
            Backward(1, 2, 16, 2, 1),
        )
    else:
        found = (
            *(Backward(4, 1, step, 2, 1) for step in (32, 16)),
            *(Backward(n, 1, 16, 2, 1) for n in (2, 1)),
        )
    return tuple(s for s in found if s.smem(of) + s.static_smem(of) <= max_smem)


_DK, _DV, _DQ = 1, 2, 4  # values of the macro GRADS


def backward_spec(
    of: Variant, s: Backward, entry: str, grads: int, grad_mask: bool = False
) -> compiler.KernelSpec:
    """A kernel of the backward."""
    of = s.sized(of)
    constants = of.constants(s.row_warps * s.parts, of.values) | {
        "PARTS": s.parts,
        "STEP": s.step,
        "STAGES": s.stages,
        "MIN_BLOCKS": s.min_blocks,
        "GRADS": grads,
        "GRAD_MASK": int(grad_mask),
    }
    params = "" if of.mask is None else mask.ROWS + "PP"
    return compiler.KernelSpec(
        *("attention_backward.cu", entry, _BACKWARD + params, tuple(constants.items())),
        block=s.threads,
        smem=s.smem(of),
        oldest=of.oldest,
    )


def _key_grads(of: Variant) -> tuple[int, ...]:
    """What the kernels of dK and dV give: both at once, if a warp's registers hold them."""
    return (_DK | _DV,) if of.head + of.values <= 256 else (_DK, _DV)


def dots_columns(values: int) -> int:
    """Columns for which the kernel of D has lanes: 64, or as many as a block of the sum has."""
    return 64 if values <= 64 else VOCAB_BLOCK


def dots_spec(of: Variant, programmatic: bool) -> compiler.KernelSpec:
    """The kernel of D."""
    constants: dict[str, int | str] = {
        "TYPE": mask.NAMES[of.dtype],
        "COLUMNS": dots_columns(of.values),
        "VECTOR": int(of.vector),
        "HARDWARE_EXP2": int(of.hardware_exp2),
    }
    return compiler.KernelSpec(
        *("attention_dots.cu", "grad_dots", _DOTS, tuple(constants.items())),
        block=256,
        programmatic=programmatic,
        oldest=of.oldest,
    )


def specs(of: Variant, max_smem: int, *, grad_mask: bool = False) -> Iterator[compiler.KernelSpec]:
    """All kernels under all schedules, for tests."""
    for s in backward_schedules(of, max_smem):
        for grads in _key_grads(of):
            yield backward_spec(of, s, "grad_keys", grads)
        yield backward_spec(of, s, "grad_queries", _DQ, grad_mask)
    yield dots_spec(of, programmatic=False)


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


@dataclass(frozen=True, slots=True)
class Gradients:
    """What kernels of the backward fill.

    Attributes:
        dots: D, as the log-sum-exp lies.
        dq, dk, dv, dmask: results.
        of_sinks: ``[tokens, heads]``: what each row adds to the gradient of its sink.
    """

    dots: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor | None
    of_sinks: Tensor | None

    @classmethod
    def empty(cls, x: Attention, lse2: Tensor, grad_mask: bool = False) -> Gradients:
        """Zeros where no kernel writes: at tokens of no sequence, and at pairs that no block goes over."""

        device = x.q.get_device()

        def like(t: Tensor, whole: bool) -> Tensor:
            return (runtime.empty if whole else runtime.zeros)(t.shape, t.dtype, device)

        def zeros(*shape: int) -> Tensor:
            return runtime.zeros(shape, torch.float32, device)

        return cls(
            dots=runtime.empty(lse2.shape, lse2.dtype, device),
            dq=like(x.q, not x.packed),
            dk=like(x.k, x.whole_keys),
            dv=like(x.v, x.whole_keys),
            dmask=zeros(x.batch, x.heads, x.queries, x.keys) if grad_mask else None,
            of_sinks=None if x.sinks is None else zeros(x.q.shape[:-2].numel(), x.heads),
        )

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        dsinks = None if self.of_sinks is None else rows.column_sum(self.of_sinks, torch.float32)
        return self.dq, self.dk, self.dv, self.dmask, dsinks


def _launch(
    kernel: compiler.KernelSpec,
    grid: int,
    x: Attention,
    grad: Tensor,
    lse2: Tensor,
    to: Gradients,
    shown: tuple[int, ...],
    tiles: int = 0,
) -> None:
    if grid == 0:
        return
    tensors = (x.q, x.k, x.v, grad)
    results = (to.dq, to.dk, to.dv)
    runtime.load(kernel, x.q.get_device()).launch(
        (grid, 1, 1),
        *map(address, (*tensors, lse2, to.dots, *results, to.dmask)),
        *(s for t in (*tensors, *results) for s in strides(t)),
        *(*lse_strides(x), tiles, 0),
        *problem(x),
        *shown,
    )


def find_dots(x: Attention, grad: Tensor, out: Tensor, lse2: Tensor, to: Gradients) -> None:
    """Fill ``to.dots`` and ``to.of_sinks``."""
    device = x.q.get_device()
    of = variant(x, grad, out)
    rows, abreast = x.q.shape[:-1].numel(), 32 * 16 // of.dtype.itemsize // dots_columns(of.values)
    of_warp = 4 * abreast  # in four passes
    kernel = runtime.load(dots_spec(of, devices.device_info(device).arch.copies_tiles), device)
    kernel.launch(
        (-(-rows // (8 * of_warp)), 1, 1),
        *map(address, (grad, out, x.sinks, lse2, to.dots, to.of_sinks)),
        *(*strides(grad), *strides(out), *lse_strides(x)),
        *(rows, x.queries, x.heads, x.v.shape[-1], 0),
    )


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
    s = schedule or choose_backward(x, of)
    to = Gradients.empty(x, lse2, grad_mask)
    if out.numel() == 0:
        to.dk.zero_()
        to.dv.zero_()
        return to.results()
    shown: tuple[int, ...] = ()
    if x.mask is not None:
        of_mask = mask.find_rows(x)
        places = mask.place_queries(x, of_mask)
        shown = (*of_mask.values, *map(address, places))
    operands = (x, grad, lse2, to, shown)
    find_dots(x, grad, out, lse2, to)
    key_tiles = -(-x.keys // s.rows)
    key_tiles = key_tiles * x.batch if x.cu_seqlens_k is None else key_tiles + x.batch
    for grads in _key_grads(of):
        _launch(backward_spec(of, s, "grad_keys", grads), key_tiles * x.kv_heads, *operands)
    tiles, all_tiles = tile_counts(x, s.rows)
    of_queries = backward_spec(of, s, "grad_queries", _DQ, grad_mask)
    _launch(of_queries, all_tiles * x.kv_heads, *operands, tiles)
    return to.results()
