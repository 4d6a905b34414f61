"""Schedules of Hopper's tensor-core kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from samebits.backends.cuda.products.gemm_sm90 import Gemm

__all__ = ["Sm90Schedule", "round_up"]


_SMEM = 227 * 1024
_LEAST_PANEL = 16  # columns of a transposed tile that pay for a store of their own


@dataclass(frozen=True, slots=True)
class Sm90Schedule:
    """A schedule of ``tensor_core_sm90``.

    Attributes:
        block_m: rows of a block's tile.
        block_n: columns of a block's tile.
        block_k: k in one stage of the ring.
        stages: length of the ring.
        warpgroups: warpgroups that multiply.
        share: warpgroups that work on one tile. With 1 of 2, one writes its tile while the other multiplies.
        cluster: adjacent blocks that share a tile of A.
        group: rows of tiles that are computed together.
        blocks: blocks on one multiprocessor.
        ahead: stages of the tall side that are prefetched into L2 while the previous kernel ends.
        early: let blocks of the next kernel start as these blocks end, not only when all have ended.
        swap: compute the transpose, so that B's columns take the tall side of the tile.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warpgroups: int
    share: int
    cluster: int = 1
    group: int = 16
    blocks: int = 1
    ahead: int = 0
    early: bool = False
    swap: bool = False

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + (128 if self.warpgroups > 1 and self.blocks == 1 else 32)

    @property
    def panel(self) -> int:
        """Columns of 16 bits that untransposed tiles write at once through shared memory; 0: they cannot."""
        if self.swap or self.block_m // self.share % 64:
            return 0
        return next((columns for columns in (64, 32, 16) if self.block_n % columns == 0), 0)

    @property
    def panels(self) -> int:
        """Bytes of shared memory that the ring leaves for panels: the least, if the tile is transposed."""
        return self.least_swapped_panels or self._panels(self.panel)

    @property
    def least_swapped_panels(self) -> int:
        """Bytes of shared memory that the ring leaves for panels of a transposed tile, at least.

        0 with few columns, one warpgroup, or rows of a warpgroup that are no multiple of 64: these are
        written straight from the registers.
        """
        if not self.swap or self.warpgroups == 1 or self.block_n < 64 or self.block_m // self.share % 64:
            return 0
        return self._panels(_LEAST_PANEL)

    def swapped_panel(self, a_mn: bool, b_mn: bool) -> int:
        """Columns of a transposed tile of 16-bit elements that are written at once through shared memory.

        They take all that the ring leaves; 0 if that is too little. The layouts are as the kernel sees them.
        """
        if self.least_swapped_panels == 0:
            return 0
        left = self._room - self.smem(0, a_mn, b_mn)
        most = left // self._panels(8) * 8
        return 0 if most < _LEAST_PANEL else round_up(-(-self.block_n // -(-self.block_n // most)), 8)

    def _panels(self, columns: int) -> int:
        """Bytes of two panels of so many columns for each warpgroup."""
        return self.warpgroups * 2 * 128 * columns

    @property
    def _room(self) -> int:
        """Bytes of shared memory that a block may have."""
        return _SMEM // self.blocks - 1024 * (self.blocks > 1)

    @property
    def l2_promotion(self) -> int:
        """The least bytes that L2 fetches. With few rows, weights stream faster without it."""
        return 0 if self.swap else 256

    def fits(self, a_mn: bool, b_mn: bool) -> bool:
        """Whether the schedule can read these layouts.

        Along m, a warpgroup's rows come in columns of 64, or in one of 32; along k, its columns do.
        """
        if self.block_k % 64 and not (a_mn and b_mn):
            return False
        tall_mn = b_mn if self.swap else a_mn
        return not (tall_mn and self.block_m // self.share % 64 and (self.block_m, self.share) != (32, 1))

    def tiles(self, p: Gemm) -> int:
        """Tiles of a product as the kernel sees it: with ``swap``, of ``p.swapped()``."""
        return -(-p.m // self.block_m) * -(-p.n // (self.block_n * self.cluster)) * self.cluster * p.batch

    def resident(self, sms: int) -> int:
        """Clusters that run at once. Clusters of four leave some multiprocessors idle: 30 run on an H200."""
        usable = sms if self.cluster <= 2 else sms * 10 // 11
        return max(1, usable * self.blocks // self.cluster)

    def grid(self, rows: int, columns: int, batch: int, sms: int) -> tuple[int, int, int]:
        """The grid for `rows` and `columns` of the output (with `swap`, of its transpose)."""
        tiles = -(-rows // self.block_m) * -(-columns // (self.block_n * self.cluster))
        return min(tiles * batch, self.resident(sms)) * self.cluster, 1, 1

    def constants(self) -> dict[str, int | str]:
        """Macros for ``pipeline_sm90.cuh``."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "STAGES": self.stages,
            "WARPGROUPS": self.warpgroups,
            "SHARE": self.share,
            "CLUSTER": self.cluster,
            "BLOCKS": self.blocks,
            "AHEAD": self.ahead,
            "EARLY": int(self.early),
        }

    def filled(self, epilogue: int, a_mn: bool = False, b_mn: bool = False) -> Sm90Schedule:
        """This schedule with the longest ring that fits beside `epilogue` bytes."""
        fixed = replace(self, stages=0).smem(0, a_mn, b_mn)
        stage = replace(self, stages=1).smem(0, a_mn, b_mn) - fixed
        return replace(self, stages=(self._room - fixed - epilogue) // stage)

    def smem(self, panel: int, a_mn: bool, b_mn: bool) -> int:
        """Bytes of shared memory for operands with these layouts (as the kernel sees them), and `panel`."""
        rows = round_up(self.block_m, 32) if a_mn else self.block_m
        columns = round_up(self.block_n, 32) if b_mn else self.block_n
        # A warpgroup also reads rows past its share, up to 64, and drops their results. Behind a column of 32
        # along m they are the other operand's.
        own = self.block_m // self.share
        reach = 0 if a_mn else round_up(own, 64) - own
        ring = self.stages * ((rows + columns) * self.block_k * 2 + 16)
        return 1024 + ring + reach * 128 + self._panels(panel)


def round_up(x: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-x // step) * step
