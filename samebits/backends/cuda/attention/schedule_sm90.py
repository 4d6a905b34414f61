"""Schedules of attention on Hopper, forward, and the kernel under each of them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch

from samebits.backends.arch import SM_90
from samebits.backends.attention import BLOCK
from samebits.backends.cuda import compiler
from samebits.backends.cuda.attention import mask
from samebits.backends.cuda.attention.problem import PROBLEM
from samebits.backends.cuda.products.schedule_sm90 import round_up

__all__ = ["HopperSchedule", "HopperVariant", "schedules", "spec"]

_PARAMS = "128s128s128sPPPPPPqqiiiiiiiiii" + PROBLEM
_MASKED_PARAMS = _PARAMS + mask.ROWS + "PP" + 2 * "qqqq" + "i"
_SMEM = 228 * 1024  # of a multiprocessor; each block takes 1 KiB more than it has


@dataclass(frozen=True, slots=True)
class HopperVariant:
    """What a compiled kernel is specialised to, besides its schedule. Sizes are multiples of 16.

    Attributes:
        paged: whether keys and values lie in pages.
        mask: its dtype.
    """

    dtype: torch.dtype
    head: int
    values: int
    softcap: bool
    paged: bool = False
    mask: torch.dtype | None = None

    @property
    def adds(self) -> bool:
        """Whether masks add to scores."""
        return self.mask not in (None, torch.bool)

    @property
    def stage(self) -> int:
        """Bytes of a tile of keys or of values."""
        return BLOCK * 2 * max(_columns(self.head), round_up(self.values, self.width))

    @property
    def width(self) -> int:
        """Columns of values that one copy brings."""
        return 64 if self.values % 64 == 0 else 32


@dataclass(frozen=True, slots=True)
class HopperSchedule:
    """A schedule of ``attention_sm90``.

    Attributes:
        warpgroups: that compute; each has 64 rows.
        stages: tiles of keys or values held at once.
        grouped: whether a tile has all heads that share a head of k and v, side by side; else it has one.
        split: whether tiles share the segments of their rows, and a second kernel merges them.
        dynamic: whether blocks of the grid take tiles as they come; else each has its own.
        few: whether tiles have 8 rows only, so that threads do the arithmetic of one row, not of two.
        resident: blocks on a multiprocessor: 1, or 2 if `few`.
    """

    warpgroups: int
    stages: int
    grouped: bool = False
    split: bool = False
    dynamic: bool = False
    few: bool = False
    resident: int = 1

    @property
    def rows(self) -> int:
        """Of the kernel's products."""
        return 64 * self.warpgroups

    @property
    def most_rows(self) -> int:
        """Of these, the most that hold queries."""
        return 8 if self.few else self.rows

    def static_smem(self, of: HopperVariant) -> int:
        """Bytes that the kernel declares: of tickets, and of the keys that a mask shows."""
        if of.mask is None:
            return 3 * 56
        return 3 * 72 + (4 if self.stages == 3 else 8) * (BLOCK + 1) * 4 + 24

    def smem(self, of: HopperVariant) -> int:
        """Bytes of dynamic shared memory: of barriers and, from a multiple of 1,024 on, of tiles."""
        warps = 0 if not of.adds else 1 if self.few else 4 * self.warpgroups  # with rows to which a mask adds
        in_registers = self.split or (of.values <= 64 and self.warpgroups < 3 and not of.adds)
        total = 0 if in_registers else (16 if self.few else self.rows) * of.values * 4
        biases = 0 if of.mask is None else warps * 16 * BLOCK * of.mask.itemsize
        q = self.most_rows * _columns(of.head) * 2
        begin = round_up(self.static_smem(of), 16)
        barriers = (2 * self.stages + 2 + warps) * 8
        return round_up(begin + barriers, 1024) - begin + q + self.stages * of.stage + biases + total

    def fits(self, of: HopperVariant) -> bool:
        # The registers of three warpgroups hold scores, probabilities and short values, without masks.
        hold = self.warpgroups < 3 or (of.values <= 64 and of.mask is None)
        hold = hold and (self.resident == 1 or of.mask is None)
        smem = round_up(self.static_smem(of), 16) + self.smem(of)
        return self.stages >= 3 and smem <= _SMEM // self.resident - 1024 and hold

    def filled(self, of: HopperVariant) -> HopperSchedule:
        """With as many stages, up to 8, as there is room for."""
        found = (replace(self, stages=n) for n in range(8, 2, -1))
        return next((s for s in found if s.fits(of)), replace(self, stages=0))


def _columns(head: int) -> int:
    return round_up(head, 64)


@functools.cache
def schedules(of: HopperVariant) -> tuple[HopperSchedule, ...]:
    """All that :func:`choose` may return, those with the fewest stages, and those with `resident` 2."""
    flags = (
        (False, False, False),
        (True, False, False),
        (False, False, True),
        (False, True, False),
        (True, True, False),
    )
    found = []
    for warpgroups, (grouped, split, dynamic) in itertools.product((1, 2, 3), flags):
        least = HopperSchedule(warpgroups, 3, grouped, split, dynamic)
        found += [least.filled(of), least]
    for grouped, split, resident in itertools.product((False, True), (False, True), (1, 2)):
        found.append(HopperSchedule(1, 3, grouped, split, few=True, resident=resident).filled(of))
    return tuple(dict.fromkeys(s for s in found if s.fits(of)))


def spec(of: HopperVariant, s: HopperSchedule) -> compiler.KernelSpec:
    """The kernel under a schedule."""
    constants: dict[str, int | str] = {
        "INPUT_F16": int(of.dtype == torch.float16),
        "HEAD": of.head,
        "VALUES": of.values,
        "SOFTCAP": int(of.softcap),
        "WARPGROUPS": s.warpgroups,
        "STAGES": s.stages,
        "RESIDENT": s.resident,
        "SPLIT": int(s.split),
        "FEW": int(s.few),
        "PAGED": int(of.paged),
        "MASK": mask.NAMES[of.mask],
    }
    params = _PARAMS if of.mask is None else "128s" * of.adds + _MASKED_PARAMS
    return compiler.KernelSpec(
        *("attention_sm90.cu", "attention_sm90", params, tuple(constants.items())),
        block=128 * s.warpgroups + 128,
        smem=s.smem(of),
        programmatic=True,
        oldest=SM_90,
    )
