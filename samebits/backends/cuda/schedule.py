"""How a product is run on a GPU: pure data, free to look at anything, and never able to change a bit."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["Schedule", "choose"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run ``matmul_sm90``.

    Attributes:
        block_m: rows of a block's tile.
        block_n: columns of it.
        block_k: depth of one stage of the ring.
        stages: length of the ring.
        warpgroups: warpgroups that multiply.
        share: how many of them work on one tile; with 1 of 2, one writes out while the other multiplies.
        cluster_m: blocks of a cluster one below the other, which share a tile of B.
        cluster_n: blocks of a cluster side by side, which share a tile of A.
        group: rows of tiles walked together.
        blocks: blocks on one multiprocessor.
        ahead: stages of the tall side that are brought into L2 while the kernel before this one ends.
        swap: compute the transpose, so that B's columns take the tall side of the tile.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warpgroups: int
    share: int
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 8
    blocks: int = 1
    ahead: int = 0
    swap: bool = False

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + (128 if self.warpgroups > 1 and self.blocks == 1 else 32)

    def resident(self, sms: int) -> int:
        """Clusters at work at once. Those of four leave multiprocessors of some GPCs over (30 run on an H200)."""
        return (
            sms * self.blocks // self.cluster
            if self.cluster <= 2
            else sms * 10 // 11 * self.blocks // self.cluster
        )

    def fits(self, a_mn: bool, b_mn: bool) -> bool:
        """Whether it can read these layouts: contiguous along m or n, tiles come in columns of 64."""
        if self.swap:
            a_mn, b_mn = b_mn, a_mn
        return not ((a_mn and self.block_m // self.share % 64) or (b_mn and self.block_n % 64))

    @property
    def panel(self) -> int:
        """Columns of a 16-bit output that leave at a time through shared memory; 0 where they cannot."""
        if self.swap or self.block_m // self.share % 64 or self.block_n % 32:
            return 0
        return 32 if self.block_n % 64 else 64

    def smem(self, panel: int) -> int:
        """Bytes of shared memory, the output leaving in panels of so many columns."""
        ring = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        # Rows past a tile of fewer than 64 are read too, and their results dropped.
        reach = max(0, -(-self.block_m // self.share // 64) * 64 - self.block_m // self.share) * 128
        return 1024 + ring + self.warpgroups * 2 * 128 * panel + self.stages * 20 + reach


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, batch: int, a_mn: bool, b_mn: bool, sms: int, ragged: bool) -> Schedule:
    """The schedule for a product of [m, k] and [k, n]."""
    return Schedule(128, 256, 64, 4, 2, 2, cluster_m=2)
