"""The kernels of attention, and for proofs all ways to compute a call. They give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    latent_sm90,
    sm90,
    universal,
    universal_backward,
)
from samebits.backends.cuda.attention.backward_sm90 import HopperBackward
from samebits.backends.cuda.attention.latent_sm90 import LatentSchedule
from samebits.backends.cuda.attention.sm90 import HopperSchedule
from samebits.backends.cuda.attention.universal import Forward
from samebits.backends.cuda.attention.universal_backward import Backward
from samebits.backends.kernel import Kernel, Plan
from samebits.contract import contract_from_key

__all__ = ["BACKWARD", "FORWARD", "AttentionGradients", "Way", "backwards", "forwards", "specs"]

_SPLITS = (1, 2, 5)
"""Blocks that share a tile's segments. There may be more of them than of segments."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan that is made anew by each run."""

    run: Callable[..., Any]


class UniversalKernel(Kernel[Attention, tuple[Forward, int]]):
    """Schedules have the number of blocks that share a tile's segments."""

    name, step = "attention", "mma"  # and "fma"

    def supports(self, p: Attention) -> bool:
        return True

    def all(self, p: Attention) -> Sequence[tuple[Forward, int]]:
        of = universal.forward_schedules(*_universal(p))
        return [(s, splits) for s in of for splits in (_SPLITS if s.split else (1,))]

    def choose(self, p: Attention) -> tuple[Forward, int]:
        return universal.choose(p, _universal(p)[0])

    def plan(self, p: Attention, s: tuple[Forward, int] | None = None) -> Plan:
        if s is None:
            return _Made(universal.forward)
        return _Made(partial(universal.forward, schedule=s[0], splits=s[1]))


class HopperKernel(Kernel[Attention, HopperSchedule]):
    name, step = "attention_sm90", "mma"

    def supports(self, p: Attention) -> bool:
        return sm90.supports(p)

    def all(self, p: Attention) -> Sequence[HopperSchedule]:
        return sm90.schedules(sm90.variant(p))

    def candidates(self, p: Attention) -> Sequence[HopperSchedule]:
        return sm90.candidates(p)

    def choose(self, p: Attention) -> HopperSchedule:
        return sm90.choose(p, sm90.variant(p))

    def cost(self, p: Attention, s: HopperSchedule) -> float:
        return sm90.cost(p, s, devices.device_info(p.q.get_device()).sm_count)

    def plan(self, p: Attention, s: HopperSchedule | None = None) -> sm90.Plan:
        return sm90.make_plan(p, s)


class LatentKernel(Kernel[Attention, LatentSchedule]):
    name, step = "attention_latent_sm90", "mma"

    def supports(self, p: Attention) -> bool:
        return latent_sm90.supports(p)

    def all(self, p: Attention) -> Sequence[LatentSchedule]:
        return latent_sm90.schedules(p)

    def choose(self, p: Attention) -> LatentSchedule:
        return latent_sm90.choose(p)

    def plan(self, p: Attention, s: LatentSchedule | None = None) -> latent_sm90.LatentPlan:
        return latent_sm90.make_plan(p, s)


class AttentionGradients(NamedTuple):
    """A call's gradients: the call, and the gradient of its result."""

    x: Attention
    grad: Tensor
    of_mask: bool = False


class UniversalBackwardKernel(Kernel[AttentionGradients, Backward]):
    name, step = "attention_backward", "mma"  # and "fma"

    def supports(self, p: AttentionGradients) -> bool:
        return True

    def all(self, p: AttentionGradients) -> Sequence[Backward]:
        return universal_backward.backward_schedules(*_universal(p.x, p.grad))

    def choose(self, p: AttentionGradients) -> Backward:
        return self.all(p)[0]

    def plan(self, p: AttentionGradients, s: Backward | None = None) -> Plan:
        run = partial(universal_backward.backward, grad_mask=p.of_mask, schedule=s)
        return _Made(lambda of: run(*of))


class HopperBackwardKernel(Kernel[AttentionGradients, HopperBackward]):
    name, step = "attention_backward_sm90", "mma"

    def supports(self, p: AttentionGradients) -> bool:
        return backward_sm90.supports(p.x) and not p.of_mask

    def all(self, p: AttentionGradients) -> Sequence[HopperBackward]:
        return backward_sm90.schedules(*backward_sm90.sizes(p.x))

    def choose(self, p: AttentionGradients) -> HopperBackward:
        return self.all(p)[0]

    def plan(self, p: AttentionGradients, s: HopperBackward | None = None) -> Plan:
        return _Made(lambda of: backward_sm90.backward(*of, schedule=s))


FORWARD: tuple[Kernel[Attention, Any], ...] = (UniversalKernel(), HopperKernel(), LatentKernel())
BACKWARD: tuple[Kernel[AttentionGradients, Any], ...] = (UniversalBackwardKernel(), HopperBackwardKernel())
"""All kernels of each direction. The first is universal: it supports every call."""

_SAID = {
    "attention": "universal attention",
    "attention_sm90": "attention on Hopper",
    "attention_latent_sm90": "latent attention on Hopper",
    "attention_backward": "universal attention backward",
    "attention_backward_sm90": "attention backward on Hopper",
}
"""What reports call them."""


class Way(NamedTuple):
    """A kernel, and what it runs under.

    Attributes:
        kernel: what reports call it.
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
    for kernel in FORWARD:
        for s in kernel.all(x) if kernel.supports(x) else ():
            yield Way(_SAID[kernel.name], s, partial(_forward, kernel, x, s))


def _forward(kernel: Kernel[Attention, Any], x: Attention, s: Any) -> Any:
    return kernel.plan(x, s).run(x)


def backwards(x: Attention, grad: Tensor) -> Iterator[Way]:
    """The same for the gradients."""
    yield Way("attention backward", "", partial(backward, x))
    for kernel in BACKWARD:
        p = AttentionGradients(x, grad)
        for s in kernel.all(p) if kernel.supports(p) else ():
            yield Way(_SAID[kernel.name], s, partial(_backward, kernel, x, s))


def _backward(
    kernel: Kernel[AttentionGradients, Any], x: Attention, s: Any, grad: Tensor, *of: Tensor, grad_mask: bool
) -> Any:
    p = AttentionGradients(x, grad, grad_mask)
    assert kernel.supports(p), f"{kernel.name} does not take {p}"
    return kernel.plan(p, s).run((x, grad, *of))


def specs(x: Attention, *, grad_mask: bool = False) -> Iterator[compiler.KernelSpec]:
    """All kernels that the ways of `x` load, so that they can be compiled side by side."""
    yield from universal.specs(*_universal(x))
    if x.block_table is None:
        yield from universal_backward.specs(*_universal(x), grad_mask=grad_mask)
    if backward_sm90.supports(x):
        yield from backward_sm90.specs(x)
    if sm90.supports(x):
        of = sm90.variant(x)
        yield from {sm90.spec(of, s): None for s in sm90.schedules(of)}
    if latent_sm90.supports(x):
        yield from latent_sm90.specs(x)


def _universal(x: Attention, *more: Tensor) -> tuple[universal.Variant, int]:
    of = universal.variant(x, *more)
    if contract_from_key(x.contract).step == "fma":  # which widens its operands
        of = replace(of, dtype=torch.float32)
    return of, devices.device_info(x.q.get_device()).max_smem
