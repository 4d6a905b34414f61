"""Schedules that a product may have on Hopper: the kinds that could be fastest, and the catalogue of all."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up

__all__ = ["LONG", "catalogue", "kinds"]

LONG = 40_000  # k over which blocks drift apart, out of L2, unless their tiles are wide and in clusters


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
    layout = (p.b_mn, p.a_mn) if swap else (p.a_mn, p.b_mn)
    return _filled(
        *layout, Sm90Schedule(block_m, block_n, block_k, 0, warpgroups, share, blocks=blocks, swap=swap)
    )


@functools.cache  # of some thousand; without it, most of the time of a choice goes here
def _filled(a_mn: bool, b_mn: bool, s: Sm90Schedule) -> Sm90Schedule:
    return s.filled(s.panels, a_mn, b_mn)


_LARGE = ((128, 128), (128, 160), (128, 192), (192, 128), (192, 96), (128, 96), (64, 192), (64, 128))
_WRITTEN = ((128, 128), (128, 192), (192, 128))
_SHARED = ((256, 128), (128, 256), (256, 160), (256, 192))
_NARROW = (24, 32, 48, 64, 80, 96, 112, 128, 160, 192)


def kinds(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The kinds of schedule whose cost is estimated, of which ``choice_sm90.completed`` makes candidates."""
    found = _many_rows(p, sms) if p.m > 128 else []
    if p.m <= 128 and p.b_mn and not p.a_mn:
        found += _many_blocks(p, sms)
    if 32 < p.m <= 128:
        found += _narrow(p)
        if not p.b_mn:  # wide tiles: HBM is idle while one is written, so fewer are better
            found.append(_schedule(p, 64, 224, 64))
            if p.m > 64:
                found += [_schedule(p, 128, block_n, 64, 2, 2) for block_n in (80, 96, 112, 160, 192, 224)]
        elif p.m > 64 and not p.a_mn and -(-p.n // 64) * p.batch > sms:
            # Fewer tiles, where smaller ones would leave a second wave nearly empty.
            # The narrower ones are from 11 % faster to 9 % slower: tables may choose the others.
            tall, widths = ((128, 2), (192, 3)), dict.fromkeys((round_up(p.m, 8), round_up(p.m, 16)))
            found += [
                _schedule(p, rows, columns, 64, n, n, swap=True) for columns in widths for rows, n in tall
            ]
    few_tiles = p.b_mn and not p.a_mn and -(-p.m // 64) * -(-p.n // 64) <= sms
    if p.m <= 128 or p.n <= 512 or few_tiles:
        found += _few_rows(p, sms)
    return [s for s in found if s.fits(p.a_mn, p.b_mn)]


_DEEP = 12_000  # k from which on all rows in one tile may be faster, if each block has one
# Up to 32 rows get tiles of 128 columns if these occupy at least this part of the multiprocessors.
_ONCE = 0.845
# Where several blocks must end together, tiles must fill at least this part of the slots.
_ENDING = 0.9


def _many_blocks(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """Transposed tiles that hold all rows, one or more than two on a multiprocessor. Most run at once.

    Of more than 64 rows, they must also end together. Up to 32 rows may have tiles of 128 columns, one on a
    multiprocessor, with half of its shared memory: two lines side by side load faster than one.
    """
    tiles = -(-p.n // 64) * p.batch
    each = -(-tiles // sms)
    columns = round_up(p.m, 8)
    if p.m <= 32 and p.batch == 1 and _ONCE * sms <= -(-p.n // 128) <= sms:
        return [_schedule(p, 128, columns, 64, 2, 2, swap=True, blocks=2)]
    if p.m <= 32:
        some = [4, 5, 6] if 3 <= each <= 7 else []
    elif each == 1:  # with few terms, untransposed tiles are faster
        some = [1] if p.m > 64 and p.k >= _DEEP and 2 * tiles > sms else []
    else:
        ends = tiles >= _ENDING * each * sms
        some = [each] if 3 <= each <= 4 and (ends or p.m <= 64) else []
    deep = (8, 4), (96, 1), (112, 1)  # timed: five stages of 128 are faster than ten of 64
    found = [
        _schedule(p, 64, columns, 128 if (columns, blocks) in deep else 64, swap=True, blocks=blocks)
        for blocks in some
    ]
    return [s for s in found if s.stages >= 3]


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
    if p.k > LONG and min(p.m, p.n) > 256 and p.m * p.n * p.batch >= sms * 128 * 192:
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
    neighbours = [s for s in teams if s.tiles(p) > sms]
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


class _Across(NamedTuple):
    """A kind of transposed tile."""

    block_m: int
    warpgroups: int
    share: int
    most: int  # columns


_ALONE, _TEAM, _SHARED_ACROSS = _Across(64, 1, 1, 224), _Across(128, 2, 1, 200), _Across(128, 2, 2, 256)
_TALL = _Across(192, 3, 3, 192)
_AT_ONCE = _Across(64, 1, 1, 240)  # if one wave has all tiles
_IN_WAVES = _AT_ONCE, _TEAM, _SHARED_ACROSS, _TALL, _Across(256, 2, 2, 200)
_FILLED = 0.8  # the least part of all waves that has tiles
_LEAST_PART, _LEAST_OF_MANY = 112, 160  # rows of a part; of more than 4096 rows


def _rows_across(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """Transposed tiles, each with an equal part of all rows. They fill the last wave, and waste few rows."""
    if p.a_mn:
        return []
    found = _rows_in_full_waves(p, sms) if p.m > 256 else []
    if p.m > 1024:
        return found
    # Where waves are not full, more than 512 rows gain nothing by flat tiles, and x @ weight.T by one kind.
    one_kind = p.m > 512 and not p.b_mn
    kinds = (_SHARED_ACROSS,) if one_kind else (_TEAM, _SHARED_ACROSS, _TALL)
    if p.m <= 512:
        kinds = _ALONE, *kinds
    for parts in range(-(-p.m // 256), -(-p.m // 80) + 1):
        columns = round_up(max(80, -(-p.m // parts)), 8)
        for block_m, warpgroups, share, most in kinds:
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


def _rows_in_full_waves(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """The same for more rows, in all widths whose tiles nearly fill their waves."""
    found = []
    for columns, kind in itertools.product(_widths(p.m), _IN_WAVES):
        waves = -(-p.n // kind.block_m) * -(-p.m // columns) * p.batch / sms
        if waves >= _FILLED * math.ceil(waves) and (kind != _AT_ONCE or waves <= 1):
            found += [s for s in _across(p, columns, kind) if p.k <= LONG or s.cluster > 1]
    return found


def _widths(m: int) -> list[int]:
    """Multiples of 8 that hold equal parts of `m` rows: no smaller one holds them in as few parts."""
    least = _LEAST_PART if m <= 4096 else _LEAST_OF_MANY
    parts = {wide: -(-m // -(-m // wide)) for wide in range(least, 257, 8)}
    return [wide for wide, rows in parts.items() if rows >= least and wide == round_up(rows, 8)]


def _across(p: Gemm, columns: int, kind: _Across) -> list[Sm90Schedule]:
    """Transposed tiles of a kind with so many columns, alone and in pairs; none if it cannot have so many."""
    if columns > kind.most:
        return []
    s = _schedule(p, kind.block_m, columns, 64, kind.warpgroups, kind.share, swap=True)
    return [s, replace(s, cluster=2)] if kind.warpgroups > 1 and -(-p.m // columns) % 2 == 0 else [s]


def _few_rows(p: Gemm, sms: int) -> list[Sm90Schedule]:
    """As many blocks as multiprocessors. Each has its share of B's columns on the tall side."""
    found = []
    for tokens in (8, 16, 24, 32, 48, 64):
        splits = -(-p.m // tokens)
        if splits > 32 or tokens >= 2 * max(p.m, 8):
            continue
        for rows in _rows(p, splits, sms):
            size, tiles = rows + (64 if p.a_mn else tokens), -(-p.n // rows) * splits
            # Of dX, two blocks on some multiprocessors end at once, where one alone would take a second tile.
            paired = splits == 1 and p.b_mn and not p.a_mn and sms < tiles <= 2 * sms
            if tokens == 64 and splits == 1 and tiles > sms and not paired:  # many are faster untransposed
                continue
            # One long chain whose operands are already prefetched into L2 has the fewest waits.
            deep = splits == 1 and size <= 24
            # If half of the shared memory is enough, the other half is left to the next kernel's blocks: they
            # may outnumber idle multiprocessors. But few blocks for B along n load too slowly by half a ring.
            enough = tiles <= sms and rows == 64 and (2 * tiles > sms or not p.b_mn)
            half = tokens == 8 and ((size <= 40 and not p.b_mn) or enough) and not deep
            blocks = 2 if half or paired or tiles > 2 * sms else 1
            depth = 512 if deep else 256 if size <= 64 else 128 if size <= (96 if paired else 112) else 64
            depth = min(depth, 128 if blocks == 2 and size > 40 else 256 if p.a_mn else 512)
            found.append(_schedule(p, rows, tokens, depth, swap=True, blocks=blocks))
    return found


def _rows(p: Gemm, splits: int, sms: int) -> Sequence[int]:
    """Numbers of B's columns that a block may take on the tall side, with the rows in `splits` parts."""
    if p.b_mn:
        # Half lines load more slowly: only for dX, where three quarters of the GPU would be idle.
        idle = splits == 1 and not p.a_mn and 4 * -(-p.n // 64) * p.batch <= sms
        return (64, 32) if idle else (64,)
    rounds = -(-p.n * splits // (64 * sms))
    if rounds > 1 and splits == 1:  # bound by HBM, so all blocks should end together
        return range(24, 65, 8)
    even = (
        -(-p.n * splits * share // (sms * rounds)) for share in ((1, 2) if splits > 1 == rounds else (1,))
    )
    return [min(64, max(16, round_up(rows, 8))) for rows in even]


@functools.cache
def catalogue(a_mn: bool, b_mn: bool) -> list[Sm90Schedule]:
    """Every kind of schedule that ``choice_sm90.choose`` can return. ``verify`` runs them all."""
    found: dict[Sm90Schedule, None] = {}
    in_one_tile = range(72, 121, 8) if b_mn and not a_mn else ()
    rows = (8, 16, 32, 64, *in_one_tile, 128, *range(136, 257, 8), *range(272, 513, 16), 4096)
    for sms, m in itertools.product((66, 114, 132), rows):
        for n in (256, 512, 1024, *range(2048, 8449, 512), 3 * 8448, 57344):
            found.update(dict.fromkeys(kinds(Gemm(m, n, 1024, 1, a_mn, b_mn), sms), None))
    if not a_mn:
        for wide, kind in itertools.product(range(_LEAST_PART, 257, 8), _IN_WAVES):
            found.update(dict.fromkeys(_across(Gemm(2 * wide, 4096, _DEEP, 1, a_mn, b_mn), wide, kind)))
    if b_mn and not a_mn:  # any number of blocks on a multiprocessor
        for m, blocks in itertools.product((24, *range(40, 129, 8)), (1, 2, 3, 4)):
            found.update(dict.fromkeys(_many_blocks(Gemm(m, blocks * 132 * 64, _DEEP, 1, a_mn, b_mn), 132)))
    # Many tiles of 64 tokens.
    found.update(dict.fromkeys(kinds(Gemm(1344, 496, 1024, 1, a_mn, b_mn), 132), None))
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
