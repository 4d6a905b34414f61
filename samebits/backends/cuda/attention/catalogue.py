"""For proofs: every kernel and schedule that can compute a call of attention. They give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.backends.attention import Attention
from samebits.backends.cuda import compiler, devices
from samebits.backends.cuda.attention import (
    backward,
    backward_sm90,
    forward,
    sm90,
    universal,
    universal_backward,
)
from samebits.contract import contract_from_key

__all__ = ["Way", "backwards", "forwards", "specs"]

_SPLITS = (1, 2, 5)
"""Blocks that share a tile's segments. There may be more of them than of segments."""


class Way(NamedTuple):
    """A kernel, and what it runs under.

    Attributes:
        kernel: its name.
        schedule: empty for the default choice.
        run: computes the call, as :mod:`samebits.backends.attention` has it. A forward's takes no arguments,
            a backward's those after the call.
    """

    kernel: str
    schedule: object
    run: Callable[..., Any]


def forwards(x: Attention) -> Iterator[Way]:
    """The default choice, then every schedule of each kernel that takes `x`."""
    yield Way("attention", "", partial(forward, x))
    for s in universal.forward_schedules(*_universal(x)):
        for splits in _SPLITS if s.split else (1,):
            run = partial(universal.forward, x, schedule=s, splits=splits)
            yield Way("universal attention", (s, splits), run)
    if sm90.supports(x):
        for schedule in sm90.schedules(sm90.variant(x)):
            yield Way("attention on Hopper", schedule, partial(sm90.forward, x, schedule=schedule))


def backwards(x: Attention, grad: Tensor) -> Iterator[Way]:
    """The same for the gradients."""
    yield Way("attention backward", "", partial(backward, x))
    for s in universal_backward.backward_schedules(*_universal(x, grad)):
        yield Way("universal attention backward", s, partial(universal_backward.backward, x, schedule=s))
    if backward_sm90.supports(x):
        for schedule in backward_sm90.schedules(*backward_sm90.sizes(x)):
            yield Way("attention backward on Hopper", schedule, partial(_without_mask, x, schedule))


def specs(x: Attention, *, grad_mask: bool = False) -> Iterator[compiler.KernelSpec]:
    """All kernels that the ways of `x` load, so that they can be compiled side by side."""
    yield from universal.specs(*_universal(x))
    if x.block_table is None:
        yield from universal_backward.specs(*_universal(x), grad_mask=grad_mask)
    if sm90.supports(x):
        of = sm90.variant(x)
        yield from backward_sm90.specs(x)
        yield from {sm90.spec(of, s): None for s in sm90.schedules(of)}


def _universal(x: Attention, *more: Tensor) -> tuple[universal.Variant, int]:
    of = universal.variant(x, *more)
    if contract_from_key(x.contract).step == "fma":  # which widens its operands
        of = replace(of, dtype=torch.float32)
    return of, devices.device_info(x.q.get_device()).max_smem


def _without_mask(
    x: Attention, schedule: backward_sm90.HopperBackward, *operands: Tensor, grad_mask: bool
) -> Any:
    assert not grad_mask, "these kernels take no masks"
    return backward_sm90.backward(x, *operands, schedule=schedule)
