"""The families of NVIDIA's GPUs: what each can do. This is the one place that looks at a compute capability.

Everything else asks the :class:`Arch` of a GPU: which bits its tensor cores give, which kernels it runs, what
its launches can do. *A new GPU* in ARCHITECTURE.md says what to add for one, step by step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from samebits.contract import AMPERE, HOPPER, HOPPER_FP8, MmaModel

__all__ = ["ARCHS", "OLDEST", "SM_75", "SM_80", "SM_90", "Arch", "arch_of"]

Capability = tuple[int, int]

SM_75, SM_80, SM_90 = (7, 5), (8, 0), (9, 0)
"""Compute capabilities that kernels name as the oldest that they run on."""
OLDEST = SM_75
"""The oldest that any kernel runs on."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One compute capability.

    Attributes:
        capability: the compute capability.
        mma: the bits of its tensor cores on bf16 and f16, and of its ``ex2``. None: nobody has measured them,
            and contracts of the step ``mma`` are refused there.
        fp8: the bits of its tensor cores on FP8, in the same way.
        smem: bytes of shared memory that a block may use.
        own: how names of kernels end that run on it alone, such as ``"sm90"``. Empty: it has none.
        fast_silu: whether its fast exponential and division give bf16 the bits of the exact silu. That was
            compared for every value.
    """

    capability: Capability
    mma: MmaModel | None = None
    fp8: MmaModel | None = None
    smem: int = 0
    own: str = ""
    fast_silu: bool = False

    def __str__(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def target(self) -> str:
        """What NVRTC compiles for. From Hopper on it ends with ``a``, which enables specific instructions."""
        return f"{self}a" if self.at_least(SM_90) else str(self)

    @property
    def copies_tiles(self) -> bool:
        """Whether it has a copy engine for tiles, and kernels may start before the last one has ended."""
        return self.at_least(SM_90)

    @property
    def third_half(self) -> bool:
        """Whether Triton's output in two parts takes the shared memory of three."""
        return self.capability[0] == 10

    def at_least(self, oldest: Capability) -> bool:
        """Whether it is of this compute capability, or of a newer one."""
        return self.capability >= oldest

    def runs(self, kernel: str) -> bool:
        """Whether it runs the kernel of this name: all do, but for those that end like ``_sm90``."""
        ending = kernel.rpartition("_")[2]
        return not ending.startswith("sm") or ending == self.own


_KNOWN = (
    Arch(SM_75, smem=64 << 10),
    Arch(SM_80, AMPERE, smem=163 << 10),
    Arch((8, 6), AMPERE, smem=99 << 10),
    Arch((8, 9), AMPERE, smem=99 << 10),
    Arch(SM_90, HOPPER, HOPPER_FP8, smem=227 << 10, own="sm90", fast_silu=True),
    Arch((10, 0), HOPPER, smem=227 << 10),
    Arch((10, 3), HOPPER, smem=227 << 10),
    Arch((12, 0), HOPPER, smem=99 << 10),
)
ARCHS: dict[Capability, Arch] = {arch.capability: arch for arch in _KNOWN}
"""What is known, by compute capability. Kernels are compiled for each of these in tests."""


@functools.cache
def arch_of(capability: Capability) -> Arch:
    """That of a compute capability. Of an unknown one nothing is known, so that only FMA works there."""
    return ARCHS.get(capability) or Arch(capability)
