"""Products in the form that schedules of Hopper's tensor-core kernels are chosen for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gemm", "reached"]

_H200 = 4.2e6
"""Bytes a microsecond that an H200's memory moves, measured. It is the GPU that is assumed without one."""
_OF_PEAK = 0.854
"""Its share of what the clock and the width of its bus allow. Other memory is assumed to reach as much."""

_FEW_TERMS = 256
"""The most k of products that are bound by their writes."""


def reached(peak: float) -> float:
    """Bytes a microsecond that memory really moves, if it moves `peak` at most; an H200's if that is 0."""
    return _OF_PEAK * peak or _H200


@dataclass(frozen=True, slots=True)
class Gemm:
    """The product that a schedule is chosen for: [m, k] times [k, n]. Each is contiguous along k, or m or n.

    `out_bytes` is the memory traffic of an element of the output: 2 or 4, or 8 if it is also read. `hbm` is
    how many bytes the GPU's memory moves in a microsecond: see :func:`reached`.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    a_mn: bool = False
    b_mn: bool = False
    out_bytes: int = 2
    hbm: float = _H200

    def swapped(self) -> Gemm:
        # Not by `replace`, which takes twice as long: a choice asks some 40 times.
        return Gemm(self.n, self.m, self.k, self.batch, self.b_mn, self.a_mn, self.out_bytes, self.hbm)

    @property
    def hundreds(self) -> bool:
        """Whether few hundred rows are multiplied with a weight, or with its transpose."""
        return 128 < self.m < 512 and not self.a_mn and self.batch == 1

    def bound_by_writes(self, sms: int) -> bool:
        """Whether it is the gradient of a weight over few tokens, in more tiles than multiprocessors."""
        return (
            self.a_mn
            and self.b_mn
            and self.k <= _FEW_TERMS
            and self.m * self.n * self.batch > sms * 128 * 128
        )
