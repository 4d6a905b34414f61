"""The schedule of a product on Hopper: the cheapest candidate, by a model that was fitted on an H200."""

from __future__ import annotations

import functools
from dataclasses import replace

from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.kinds_sm90 import kinds
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up

__all__ = ["candidates", "choose", "completed", "estimate", "variations"]

# All constants of the model. They were measured on an H200, or fitted to the times of many products and
# schedules there: docs/kernels/tensor_core_sm90.md says to which. A new one has to change choices there.
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
_TURNED = {128: 1.01, 192: 1.02, 256: 1.01}  # factors for transposed tiles, by their rows, above 1024 rows
# For pairs of 128 and 192, unless two of these hold: a tile for each warpgroup; several tiles for a block;
# over 1024 rows.
_TURNED_PAIRS = 1.03
_TURNED_LIKE = 1.01  # for 256 x 192, which are there untransposed, too, and 1 to 2 % faster
_TURNED_ALONE = 0.96  # for those of 64 rows, above 512 rows
_TURNED_WIDE = 1.02  # for those of 64 rows and over 128 columns, from 129 to 512 rows
_TURNED_IN_TURN = 1.03  # for those of 192 rows, up to 1024 rows, if a block takes several: beside _IN_TURN
_LINES = 0.95  # factor for dX of up to 32 rows by tiles of 128 columns
_TURNED_STORE = 3000.0, 1000.0  # cycles to write a transposed tile, for each byte of an element; in units
TOGETHER = 2048  # the most rows whose tiles are computed together, so that their operands stay in L2
_STORE, _STORE_ROW, _STORE_BYTE = 1000.0, 1.0, 0.0775  # cycles to write a tile, for each row, for each byte
_STAYS = 24 << 20  # bytes of an operand that stay in L2 while rows of tiles pass over it
_IN_TURN = 1.03  # factor of the time for shared tiles of few hundred rows, if a block takes several


def _work(s: Sm90Schedule, product: Gemm, sms: int) -> tuple[float, float, float]:
    """The least microseconds for multiplication, for loading of operands (also from L2), and for HBM."""
    p = product.swapped() if s.swap else product
    tiles = s.tiles(p)
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
    if p.a_mn:  # lines of 64 elements load faster along m, half of them more slowly
        rows *= 0.75 if s.block_m % 64 == 0 else 1.2
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
    # longer. Transposed tiles cost two warpgroups as much if each has its own tile.
    if s.swap:
        turns = bands // s.share if s.share > 1 else 1
        units = p.out_bytes == 2 and product.n % 8 == 0
        write = _TURNED_STORE[units] * p.out_bytes * turns if s.warpgroups > 1 else 0.0
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
    return us * _factor(s, product, sms)


def _factor(s: Sm90Schedule, p: Gemm, sms: int) -> float:
    """A factor that measured times ask for, and that no part of the work explains."""
    if s.swap:
        if s.block_m == 128 and p.m <= 32:
            return _LINES
        if s.warpgroups == s.blocks == 1 and s.block_n > 64:
            if p.m > 512:
                return _TURNED_ALONE
            return _TURNED_WIDE if s.block_n > 128 < p.m else 1.0
        in_turn = s.tiles(p.swapped()) > sms
        factor = _TURNED[s.block_m] if s.warpgroups > 1 and p.m > 1024 else 1.0
        if s.block_m == 192 and p.m <= 1024 and in_turn:
            factor *= _TURNED_IN_TURN
        if factor > 1 and (s.block_m, s.block_n) == (256, 192):
            factor *= _TURNED_LIKE
        if s.cluster > 1 and s.block_m < 256:
            factor *= 1 if (s.share == 1) + in_turn + (p.m > 1024) > 1 else _TURNED_PAIRS
        return factor
    return _TALL_MN if p.a_mn and s.block_m == 192 and p.k >= 2048 else 1


@functools.lru_cache(maxsize=4096)
def choose(p: Gemm, sms: int) -> Sm90Schedule:
    """The schedule for ``p`` on a GPU with `sms` multiprocessors."""
    return completed(min(kinds(p, sms), key=lambda s: estimate(s, p, sms)), p, sms)


def candidates(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The schedules that :func:`choose` picks from, each as it would run."""
    return list(dict.fromkeys(completed(s, p, sms) for s in kinds(p, sms)))


def completed(best: Sm90Schedule, p: Gemm, sms: int) -> Sm90Schedule:
    """The schedule of this kind for `p`: with the start of blocks, their order, and prefetching.

    The estimate leaves these out.
    """
    multiply, intake, hbm = _work(best, p, sms)
    seen = p.swapped() if best.swap else p
    tiles, slots = best.tiles(seen), sms * best.blocks
    if p.m <= 128:
        # Some of few blocks for dX would be in pairs beside idle pairs, and a pair shares its way to L2. With
        # more than two blocks on a multiprocessor, an early start took up to 15 % longer.
        paired = p.b_mn and slots < 2 * tiles <= 1.9 * slots
        early = best.cluster > 1 or (best.swap and best.blocks < 3 and not paired)
    else:
        # An early start scatters neighbouring tiles over the GPU, which is bad if many rows share operands.
        early = best.cluster > 1 or intake <= 1.2 * max(multiply, hbm)
    # At one tile for each block, or two of a transpose, it costs up to a third.
    early = early and tiles > slots * (2 if best.swap and p.m > 128 else p.hundreds and best.cluster == 1)
    ahead = best.stages if best.swap and p.m <= min(best.block_n, 128) and hbm < multiply else 0
    # Neighbouring tiles run side by side. They share the much larger operand, if the other stays in L2.
    tall = not best.swap and best.share == 1 and best.block_m >= 2 * best.block_n and p.m > 8 * best.block_m
    group = together = min(best.group, -(-TOGETHER // best.block_m))
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
