"""Schedules of Hopper's tensor-core kernels, and their estimated cost, fitted on an H200."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from samebits.backends.cuda.products.gemm_sm90 import Gemm

__all__ = [
    "Sm90Schedule",
    "candidates",
    "catalogue",
    "choose",
    "estimate",
    "menu",
    "round_up",
    "settle",
    "variations",
]


_SMEM = 227 * 1024


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
        """Columns of a 16-bit output that are written at once through shared memory; 0 if impossible."""
        if self.swap or self.block_m // self.share % 64:
            return 0
        return next((columns for columns in (64, 32, 16) if self.block_n % columns == 0), 0)

    @property
    def panels(self) -> int:
        """Bytes of shared memory for the panels."""
        return self.warpgroups * 2 * 128 * self.panel

    @property
    def l2_promotion(self) -> int:
        """The least bytes that L2 fetches. With few rows, weights stream faster without it."""
        return 0 if self.swap else 256

    def fits(self, a_mn: bool, b_mn: bool) -> bool:
        """Whether the schedule can read these layouts.

        Along m, a warpgroup's rows come in columns of 64; along k, its columns do.
        """
        if self.block_k % 64 and not (a_mn and b_mn):
            return False
        tall_mn = b_mn if self.swap else a_mn
        return not (tall_mn and self.block_m // self.share % 64)

    def resident(self, sms: int) -> int:
        """Clusters that run at once. Clusters of four leave some multiprocessors idle: 30 run on an H200."""
        usable = sms if self.cluster <= 2 else sms * 10 // 11
        return usable * self.blocks // self.cluster

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
        room = _SMEM // self.blocks - 1024 * (self.blocks > 1) - fixed - epilogue
        return replace(self, stages=room // stage)

    def smem(self, panel: int, a_mn: bool, b_mn: bool) -> int:
        """Bytes of shared memory for operands with these layouts (as the kernel sees them), and `panel`."""
        rows = round_up(self.block_m, 32) if a_mn else self.block_m
        columns = round_up(self.block_n, 32) if b_mn else self.block_n
        # A warpgroup also reads rows past its share, up to 64, and drops their results.
        reach = round_up(self.block_m // self.share, 64) - self.block_m // self.share
        ring = self.stages * ((rows + columns) * self.block_k * 2 + 16)
        return 1024 + ring + reach * 128 + self.warpgroups * 2 * 128 * panel


def round_up(x: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-x // step) * step


# Measured on an H200, or fitted to the times of many products and schedules there.
_STEP = {8: 18, 16: 20, 24: 22, 32: 24, 40: 26, 48: 28, 56: 30}  # cycles of a k16 step of 64 rows
_CLOCK = 1750.0  # MHz, if power allows
_POWER = 31_400.0  # MHz that power allows if a cycle of a multiprocessor takes the energy of one multiply-add
_SMEM_ENERGY, _L2_ENERGY = 5.0, 10.0  # energy of a byte to or from there; a multiply-add is 1
_INTAKE = 60  # bytes a cycle that reach one multiprocessor
_INTAKE_AT_ONCE = 73  # the same if all tiles run at once, with neighbours in squares
_OUTSIDE = 9  # cycles to load 128 bytes outside of a matrix; eight such lines cost nothing
_L2 = 15e6  # bytes a microsecond from L2 to all multiprocessors
_GAP = 1.6  # microseconds between kernels
_TALL_MN = 0.99  # factor of the time for tiles of 192 rows contiguous along m, at k of 2048 and more
_TOGETHER = 2048  # the most rows whose tiles are computed together, so that their operands stay in L2
_STORE, _STORE_ROW, _STORE_BYTE = 1000.0, 1.0, 0.0775  # cycles to write a tile, for each row, for each byte
_STAYS = 24 << 20  # bytes of an operand that stay in L2 while rows of tiles pass over it
_IN_TURN = 1.03  # factor of the time for shared tiles of few hundred rows, if a block takes several
_LONG = 40_000  # k over which blocks drift apart, out of L2, unless their tiles are wide and in clusters


def _tiles(s: Sm90Schedule, p: Gemm) -> int:
    """Tiles of a product, which is transposed with ``s.swap``."""
    return -(-p.m // s.block_m) * -(-p.n // (s.block_n * s.cluster)) * s.cluster * p.batch


def _work(s: Sm90Schedule, product: Gemm, sms: int) -> tuple[float, float, float]:
    """The least microseconds for multiplication, for loading of operands (also from L2), and for HBM."""
    p = product.turned() if s.swap else product
    tiles = _tiles(s, p)
    full, last = divmod(tiles / sms, 1)
    # With many rows, blocks drift apart, and the last tiles begin before all others end.
    rounds = full + (0 if last == 0 else 1 if full == 0 or product.hundreds else 0.8 + 0.2 * last)
    bands = round_up(s.block_m // s.share, 64) // 64 * s.share
    multiply = p.k / 16 * bands * _STEP.get(s.block_n, s.block_n / 2 + 1)
    multiply *= _IN_TURN if s.share > 1 and tiles > sms and product.hundreds else 1
    if product.bound_by_writes(sms):
        # Of the tiles of a multiprocessor, one is written while another is multiplied. With many terms, the
        # writes are hidden.
        store = _STORE + s.block_m * (_STORE_ROW + s.block_n * p.out_bytes * _STORE_BYTE)
        multiply = max(multiply, (multiply + store) * s.share / (s.warpgroups * s.blocks))
    rows, columns = float(s.block_m), float(s.block_n)
    if p.a_mn:  # lines of 64 elements load faster along m
        rows *= 0.75
    if p.b_mn and s.block_n % 64 == 0:
        columns *= 0.85
    elif p.b_mn:  # half lines load more slowly
        columns, multiply = 1.2 * round_up(s.block_n, 32), 1.04 * multiply
    # Blocks in a column of tiles read the same of B at the same time anyway. So only sharing of A reduces the
    # loads, and only with a B that is contiguous along k.
    shared = 1 if p.b_mn else s.cluster
    at_once = tiles <= sms and product.m > 128
    rate = _INTAKE_AT_ONCE if at_once else _INTAKE
    intake = (rows / shared + columns) * p.k * 2 / rate
    # Lines along k outside of a matrix smaller than a tile. Not measured for those contiguous along m or n.
    outside = max(0, s.block_m - p.m) * (not p.a_mn) + max(0, s.block_n - p.n) * (not p.b_mn)
    intake += max(0, outside - 8) * p.k / 64 * _OUTSIDE
    l2 = tiles * (s.block_m / s.cluster + columns) * p.k * 2 / _L2
    if at_once and not (s.swap or p.a_mn or p.b_mn):  # only these were measured
        l2 *= _INTAKE / _INTAKE_AT_ONCE
    # No warpgroup multiplies while a shared tile is written. Writing from registers straight to memory takes
    # longer. Transposed tiles of two warpgroups cost as much if each warpgroup has its own tile.
    if s.swap:
        write = 3000.0 * p.out_bytes if s.warpgroups > 1 else 0.0
    elif s.share > 1:
        write = 950.0 * p.out_bytes
    else:
        write = 0.0 if s.panel else 3000.0
    if s.warpgroups == 1 and not s.swap:  # no multiplication between tiles either, except before the first
        write += max(0, rounds - 1) / rounds * 1500
    hbm = ((p.m + p.n) * p.k * 2 + p.m * p.n * p.out_bytes) * p.batch / p.hbm
    if product.m <= 128 and (s.swap or not p.b_mn):
        # HBM is idle while no block reads: while tiles are written, and towards the end.
        idle = -(tiles / (sms * s.blocks)) % 1 if tiles > sms * s.blocks else 0
        hbm += (rounds * write + idle * s.blocks * intake) / _CLOCK
        if s.swap:  # data that is read twice at once loads more slowly
            hbm *= 1 + 0.35 * (-(-p.n // s.block_n) - 1)
    clock = _CLOCK
    if product.m > 128 and p.k > 0:  # few rows never reach the power limit
        # Bytes for each k: A and B are written once, and every 64 rows read their A and all of B.
        smem = 2 * (bands * (64 + s.block_n) + s.block_m + s.block_n)
        from_l2 = 2 * (s.block_m / s.cluster + s.block_n)
        energy = tiles * p.k * (bands * 64 * s.block_n + _SMEM_ENERGY * smem + _L2_ENERGY * from_l2)
        per_cycle = energy / (sms * rounds * (max(multiply, intake) + write))
        clock = min(clock, _POWER / per_cycle**0.4)  # power grows with about the clock to the 2.5
    return rounds * (multiply + write) / clock, max(rounds * (intake + write) / clock, l2), hbm


def estimate(s: Sm90Schedule, product: Gemm, sms: int) -> float:
    """Estimated microseconds, to compare schedules: the slowest part, and a little of the others for ties."""
    work = _work(s, product, sms)
    # Clusters start together. With few rows, B is read again for every further tile.
    extra = 0.2 if s.swap and product.m > s.block_n else 0.1 if s.cluster > 1 else 0
    us = _GAP + max(work) + 0.05 * sum(work) + s.block_m * s.block_n / s.share / 8192 + extra
    return us * (_TALL_MN if product.a_mn and s.block_m == 192 and product.k >= 2048 else 1)


def _schedule(
    p: Gemm,
    block_m: int,
    block_n: int,
    block_k: int,
    warpgroups: int = 1,
    share: int = 1,
    swap: bool = False,
    blocks: int = 1,
) -> Sm90Schedule:
    """The schedule with the longest ring that fits."""
    a_mn, b_mn = (p.b_mn, p.a_mn) if swap else (p.a_mn, p.b_mn)
    s = Sm90Schedule(block_m, block_n, block_k, 0, warpgroups, share, blocks=blocks, swap=swap)
    return s.filled(s.panels, a_mn, b_mn)


_LARGE = ((128, 128), (128, 160), (128, 192), (192, 128), (192, 96), (128, 96), (64, 192), (64, 128))
_WRITTEN = ((128, 128), (128, 192), (192, 128))
_SHARED = ((256, 128), (128, 256), (256, 160), (256, 192))
_NARROW = (24, 32, 48, 64, 80, 96, 112, 128, 160, 192)


def menu(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The schedules whose cost is estimated."""
    found = _many_rows(p, sms) if p.m > 128 else []
    if 32 < p.m <= 128:
        found += _narrow(p)
        if not p.b_mn:  # wide tiles: HBM is idle while one is written, so fewer are better
            found.append(_schedule(p, 64, 224, 64))
            if p.m > 64:
                found += [_schedule(p, 128, block_n, 64, 2, 2) for block_n in (80, 96, 112, 160, 192, 224)]
        elif (
            p.m > 64 and not p.a_mn
        ):  # fewer tiles, where smaller ones would leave a second wave nearly empty
            tall, columns = ((128, 2), (192, 3)), round_up(p.m, 16)
            found += [_schedule(p, rows, columns, 64, n, n, swap=True) for rows, n in tall]
    few_tiles = p.b_mn and not p.a_mn and -(-p.m // 64) * -(-p.n // 64) <= sms
    if p.m <= 128 or p.n <= 512 or few_tiles:
        found += _few_rows(p, sms)
    return [s for s in found if s.fits(p.a_mn, p.b_mn)]


def _narrow(p: Gemm) -> list[Sm90Schedule]:
    deep = 64 if p.m > 128 else 48
    quarters = p.b_mn and not p.a_mn  # of lines: with them, products take up to twice as long
    widths = [block_n for block_n in _NARROW if block_n % 32 == 0 or not quarters]
    return [_schedule(p, 64, block_n, 128 if block_n <= deep else 64) for block_n in widths]


def _many_rows(p: Gemm, sms: int) -> list[Sm90Schedule]:
    # Tiles that two warpgroups share move the fewest bytes, which saves power. But no warpgroup multiplies
    # while one is written.
    shared = [_schedule(p, block_m, block_n, 64, 2, 2) for block_m, block_n in _SHARED]
    pairs = [replace(s, cluster=2) for s in shared]
    if p.k > _LONG and min(p.m, p.n) > 256 and p.m * p.n * p.batch >= sms * 128 * 192:
        return [*pairs, *_rows_across(p, sms)]
    if p.bound_by_writes(sms):  # smaller tiles take up to a third longer
        teams = [_schedule(p, block_m, block_n, 64, 2, 1) for block_m, block_n in _WRITTEN]
        return [*teams, *(replace(s, cluster=2) for s in teams)]
    # A second warpgroup with its own tile has work only if a block takes more than one tile.
    teams = [
        _schedule(p, block_m, block_n, 64, 2, 1)
        for block_m, block_n in _LARGE
        if block_m > 64 or -(-p.m // block_m) * -(-p.n // block_n) * p.batch > sms
    ]
    neighbours = [s for s in teams if _tiles(s, p) > sms]
    if p.m <= 2048 and not (p.a_mn and p.k > 4096):  # only with many rows of tiles
        neighbours = [s for s in neighbours if s.block_n >= 64 and p.m * s.block_n >= 2 * p.n * s.block_m]
    pairs += [replace(s, cluster=2) for s in neighbours]
    few = _narrow(p) + _all_rows(p, sms) + _rows_across(p, sms)
    return [*teams, _schedule(p, 128, 224, 64, 2, 2), *few, *pairs]


def _all_rows(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """Tiles with all rows, 64 for each of three or five warpgroups, for products that gain by it."""
    if p.a_mn or p.b_mn:
        return []
    if p.m <= 192:
        return [_schedule(p, 192, block_n, 64, 3, 3) for block_n in (80, 112, 144)]
    if 256 < p.m <= 320 and p.n <= 80 * sms:
        return [replace(_schedule(p, 320, 80, 64, 5, 5), cluster=2)]
    return []


_ACROSS = ((64, 1, 1, 224), (128, 2, 1, 200), (128, 2, 2, 256), (192, 3, 3, 192))  # and the most columns


def _rows_across(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The transpose, in tiles as wide as an equal part of all rows, to fill the last wave and waste none."""
    if p.a_mn or p.m > 1024:
        return []
    # More rows gain nothing by flat tiles, and x @ weight.T of them by one kind alone.
    one_kind = p.m > 512 and not p.b_mn
    kinds = _ACROSS[2:3] if one_kind else _ACROSS[1:] if p.m > 512 else _ACROSS
    found = []
    for parts in range(-(-p.m // 256), -(-p.m // 80) + 1):
        wide = max(80, -(-p.m // parts))
        for block_m, warpgroups, share, most in kinds:
            columns = round_up(wide, 8 if block_m <= 128 < wide <= 208 else 16)
            # Two warpgroups share a tile if each block has one tile. Otherwise one writes while the other
            # multiplies, if its registers suffice.
            once = -(-p.n // block_m) * parts * p.batch <= sms
            shared = once or columns > 200 or one_kind
            if columns > most or (block_m == 128 and (share == 1) == shared):
                continue
            s = _schedule(p, block_m, columns, 64, warpgroups, share, swap=True)
            # Neighbours that share rows of B gain where blocks take several tiles.
            found.append(replace(s, cluster=2) if (block_m, share) == (128, 1) and parts % 2 == 0 else s)
    return found


def _few_rows(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """As many blocks as multiprocessors. Each has its share of B's columns on the tall side."""
    found = []
    for tokens in (8, 16, 24, 32, 48, 64):
        splits = -(-p.m // tokens)
        if splits > 32 or tokens >= 2 * max(p.m, 8):
            continue
        for rows in _rows(p, splits, sms):
            size, tiles = rows + (64 if p.a_mn else tokens), -(-p.n // rows) * splits
            if tokens == 64 and splits == 1 and tiles > sms:  # many tiles are faster untransposed
                continue
            # One long chain whose operands are already prefetched into L2 has the fewest waits.
            deep = splits == 1 and size <= 24
            # If half of the shared memory is enough, the other half is left to the next kernel's blocks: they
            # may outnumber idle multiprocessors. But few blocks for B along n load too slowly by half a ring.
            enough = tiles <= sms and rows == 64 and (2 * tiles > sms or not p.b_mn)
            half = tokens == 8 and (size <= 40 or enough) and not deep
            blocks = 2 if half or tiles > 2 * sms else 1
            depth = 512 if deep else 256 if size <= 64 else 128 if size <= 112 else 64
            depth = min(depth, 128 if blocks == 2 and size > 40 else 256 if p.a_mn else 512)
            found.append(_schedule(p, rows, tokens, depth, swap=True, blocks=blocks))
    return found


def _rows(p: Gemm, splits: int, sms: int) -> Sequence[int]:
    """Numbers of B's columns that a block may take on the tall side, with the rows in `splits` parts."""
    if p.b_mn:
        return (64,)
    rounds = -(-p.n * splits // (64 * sms))
    if rounds > 1 and splits == 1:  # bound by HBM, so all blocks should end together
        return range(24, 65, 8)
    even = (
        -(-p.n * splits * share // (sms * rounds)) for share in ((1, 2) if splits > 1 == rounds else (1,))
    )
    return [min(64, max(16, round_up(rows, 8))) for rows in even]


@functools.lru_cache(maxsize=4096)
def choose(p: Gemm, sms: int) -> Sm90Schedule:
    """The schedule for ``p`` on a GPU with `sms` multiprocessors."""
    return settle(min(menu(p, sms), key=lambda s: estimate(s, p, sms)), p, sms)


def candidates(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The schedules that :func:`choose` picks from, each as it would run."""
    return list(dict.fromkeys(settle(s, p, sms) for s in menu(p, sms)))


def settle(best: Sm90Schedule, p: Gemm, sms: int) -> Sm90Schedule:
    """`best` with the choices that the estimate leaves out: start of blocks, prefetching, and their order."""
    multiply, intake, hbm = _work(best, p, sms)
    seen = p.turned() if best.swap else p
    tiles, slots = _tiles(best, seen), sms * best.blocks
    if p.m <= 128:
        # Some of few blocks for dX would be in pairs beside idle pairs, and a pair shares its way to L2.
        early = best.cluster > 1 or (best.swap and not (p.b_mn and slots < 2 * tiles <= 1.9 * slots))
    else:
        # An early start scatters neighbouring tiles over the GPU, which is bad if many rows share operands.
        early = best.cluster > 1 or intake <= 1.2 * max(multiply, hbm)
    # At one tile for each block, or two of a transpose, it costs up to a third.
    early = early and tiles > slots * (2 if best.swap and p.m > 128 else p.hundreds and best.cluster == 1)
    ahead = best.stages if best.swap and p.m <= min(best.block_n, 128) and hbm < multiply else 0
    # Neighbouring tiles run side by side. They share the much larger operand, if the other stays in L2.
    tall = not best.swap and best.share == 1 and best.block_m >= 2 * best.block_n and p.m > 8 * best.block_m
    group = together = min(best.group, -(-_TOGETHER // best.block_m))
    if p.n * p.k * 2 <= _STAYS:
        # Blocks that write side by side fill pages of memory, and lines that two tiles share, at once.
        group = 1 if tall else 2 if p.bound_by_writes(sms) else together
    if tiles <= slots and (p.m > 128 or (best.swap and p.b_mn and not p.a_mn)):  # all run at once
        if p.m > 128:  # An early start with two rows of tall tiles costs 2 to 7 % at x @ weight.T.
            early = early and (best.block_m == 128 or best.share > 1) and (p.m > 256 or p.a_mn or p.b_mn)
        # In squares, or whole columns of few tiles, which read the larger operand once.
        rows, columns = -(-seen.m // best.block_m), -(-seen.n // best.block_n)
        group = 2 if rows > 4 and rows >= columns else best.group
    return replace(best, early=early, ahead=ahead, group=group)


def variations(s: Sm90Schedule, p: Gemm) -> list[Sm90Schedule]:
    """`s` with the other start of blocks, and other orders of tiles: what the estimate leaves out.

    The first are the most promising. The catalogue has all of their values.
    """
    orders = [replace(s, group=group) for group in (8, 2, 16, 1) if group != s.group]
    several = -(-(p.n if s.swap else p.m) // s.block_m) > 1  # rows of tiles
    found = [replace(s, early=not s.early), *(orders if several else ())]
    return [*found, *(replace(x, early=not s.early) for x in found[1:])]


@functools.cache
def catalogue(a_mn: bool, b_mn: bool) -> list[Sm90Schedule]:
    """Every kind of schedule that :func:`choose` can return. Verification shows that none changes a bit."""
    found: dict[Sm90Schedule, None] = {}
    rows = (8, 16, 32, 64, 128, *range(136, 257, 8), *range(272, 513, 16), 4096)
    for sms, m in itertools.product((66, 114, 132), rows):
        for n in (256, 512, 1024, *range(2048, 8449, 512), 3 * 8448, 57344):
            found.update(dict.fromkeys(menu(Gemm(m, n, 1024, 1, a_mn, b_mn), sms), None))
    # Many tiles of 64 tokens.
    found.update(dict.fromkeys(menu(Gemm(1344, 496, 1024, 1, a_mn, b_mn), 132), None))
    # Early start, prefetching and the order of tiles alternate.
    return [
        replace(
            s,
            early=i % 2 == 0,
            ahead=s.stages * (i % 3 == 0) if s.swap else 0,
            group=(1, 16, 2, 11, 8)[i % 5],
        )
        for i, s in enumerate(found)
    ]
