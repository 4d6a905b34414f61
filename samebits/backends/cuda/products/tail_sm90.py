"""Products on Hopper in two launches of :mod:`.tensor_core_sm90`: some tiles, and a tail of another kind.

A wave is as many tiles as run at once. If a few tiles are left of the last one, most multiprocessors are
idle meanwhile: 136 tiles take as long as 264. There are two ways out:

- The first launch has the rows, or the columns, of whole waves, and the second one has the others, in tiles
  of its own, which end sooner.
- Both launches together are one wave: the second one has its tiles on the multiprocessors that the first one
  leaves idle. So 140 tiles that would need two waves become 112, and 20 of another kind.

The tail waits for nothing but multiprocessors: both parts read the same operands, and write different
elements. Its blocks only end after the first launch has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samebits.backends.cuda import devices, runtime
from samebits.backends.cuda.products.choice_sm90 import choose, completed, estimate
from samebits.backends.cuda.products.gemm_sm90 import Gemm
from samebits.backends.cuda.products.kinds_sm90 import catalogue, kinds
from samebits.backends.cuda.products.plan import CudaKernel, CudaPlan
from samebits.backends.cuda.products.schedule_sm90 import Sm90Schedule, round_up
from samebits.backends.cuda.products.tensor_core_sm90 import LAYOUTS, TENSOR_CORE_SM90, gemm, spec, variant
from samebits.backends.product import Matrix, Product, need

__all__ = ["TAIL_SM90", "TailSchedule"]

Dim = Literal["m", "n"]

_UNIT = 8  # parts begin at multiples of it, as all tiles do: of 16 bytes, as TMA wants
_LINE = 64  # columns of a tail begin at lines of memory
_MOST = 0.4  # of all rows or columns that are in a tail behind whole waves
_FULL = 0.9  # the least part of the slots of its waves that a first launch fills
_TOGETHER = 0.96  # the part of them from which on its blocks end together
_TRIED = 12  # the cheapest first launches of either way whose tails are chosen
_FEW_ROWS, _MOST_ROWS = 128, 4096  # few are bound by HBM: two launches gain nothing. More were hardly timed
_TWO_KINDS_ROWS = 512  # up to these, and with smaller tiles, two kinds in one wave are not reliably faster
_TWO_KINDS_TILE = 256
_EFFICIENT = 0.85  # of the elements that fit into idle multiprocessors by area, how many a tail may compute
_TWO_KINDS = 1.02  # factor of the time of two kinds of tiles in one wave
_CHEAPER = 0.99  # how much less than one launch two must cost


@dataclass(frozen=True, slots=True)
class TailSchedule:
    """Two launches.

    Attributes:
        dim: whether rows (m) or columns (n) are divided.
        at: how many of them are of the first launch.
        main, tail: the schedules of both. With `main.early`, the tail's blocks may run beside the first ones.
    """

    dim: Dim
    at: int
    main: Sm90Schedule
    tail: Sm90Schedule


def _divided(p: Gemm, dim: Dim, at: int) -> tuple[Gemm, Gemm]:
    if dim == "m":
        return replace(p, m=at), replace(p, m=p.m - at)
    return replace(p, n=at), replace(p, n=p.n - at)


def _sides(s: Sm90Schedule, p: Gemm) -> Iterator[tuple[Dim, int, int, int]]:
    """Along each side of the tiles: how many there are, how many across, and the size of one."""
    seen = p.swapped() if s.swap else p
    wide = s.block_n * s.cluster
    rows, columns = -(-seen.m // s.block_m), -(-seen.n // wide)
    yield "n" if s.swap else "m", rows, columns, s.block_m
    yield "m" if s.swap else "n", columns, rows, wide


def _places(s: Sm90Schedule, p: Gemm, sms: int) -> Iterator[tuple[Dim, int]]:
    """Where the tiles of whole waves end, if few are left: along either side of the tiles."""
    slots = s.resident(sms)
    for dim, count, across, size in _sides(s, p):
        waves = count * across // slots
        whole = waves * slots // across
        at, every = whole * size, p.m if dim == "m" else p.n
        filled = whole * across >= _FULL * waves * slots
        lines = dim == "m" or at % _LINE == 0
        if 0 < whole < count and filled and lines and every - at <= _MOST * every:
            yield dim, at


@functools.lru_cache(maxsize=4096)
def _candidates(p: Gemm, sms: int) -> dict[TailSchedule, float]:
    """Schedules of both ways and what they cost, the cheapest first."""
    if not _FEW_ROWS < p.m <= _MOST_ROWS or p.a_mn or p.batch > 1:
        return {}
    every = [*dict.fromkeys(kinds(p, sms))]
    found = _whole_waves(p, every, sms) | _one_wave(p, every, sms)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _whole_waves(p: Gemm, every: Sequence[Sm90Schedule], sms: int) -> dict[TailSchedule, float]:
    firsts = []
    for i, s in enumerate(every):
        for dim, at in _places(s, p, sms):
            firsts.append((estimate(s, _divided(p, dim, at)[0], sms), i, dim, at, s))
    found: dict[TailSchedule, float] = {}
    for cost, _, dim, at, s in sorted(firsts, key=lambda first: first[:4])[:_TRIED]:
        if found and cost >= min(found.values()):
            break
        first, rest = _divided(p, dim, at)
        # Beside blocks that all end together, blocks of a tail would only be scattered.
        tiles = _tiles(s, first)
        main = replace(completed(s, first, sms), early=tiles < _TOGETHER * math.ceil(tiles / sms) * sms)
        made = TailSchedule(dim, at, main, choose(rest, sms))
        found[made] = _cost(made, p, sms)
    return found


def _one_wave(p: Gemm, every: Sequence[Sm90Schedule], sms: int) -> dict[TailSchedule, float]:
    """For products that one wave would hold if no tile lay across an edge."""
    firsts = []
    for i, s in enumerate(every):
        area = s.block_m * s.block_n
        large = p.m > _TWO_KINDS_ROWS and s.block_m >= _TWO_KINDS_TILE
        if not large or p.m * p.n > sms * area or _tiles(s, p) <= sms:
            continue
        for dim, count, _, size in _sides(s, p):
            for whole in range(max(1, count // 4), count):
                at = whole * size
                first, rest = _divided(p, dim, at)
                room = (sms - _tiles(s, first)) * area
                if rest.m * rest.n <= room and (dim == "m" or at % _LINE == 0):
                    full = rest.m * rest.n / room
                    expected = estimate(s, first, _tiles(s, first)) * max(1, full / _EFFICIENT)
                    firsts.append((expected, full, i, dim, at, s))
    found: dict[TailSchedule, float] = {}
    for *_, dim, at, s in sorted(firsts, key=lambda first: first[:5])[:_TRIED]:
        first, rest = _divided(p, dim, at)
        idle = sms - _tiles(s, first)
        # Idle multiprocessors are not in pairs.
        alone = [t for t in kinds(rest, idle) if t.cluster == t.blocks == 1 and _tiles(t, rest) <= idle]
        if alone:
            tail = completed(min(alone, key=lambda t: estimate(t, rest, idle)), rest, idle)
            made = TailSchedule(dim, at, replace(completed(s, first, sms), early=True), tail)
            found[made] = _cost(made, p, sms)
    return found


def _tiles(s: Sm90Schedule, p: Gemm) -> int:
    return s.tiles(p.swapped() if s.swap else p)


def _cost(s: TailSchedule, p: Gemm, sms: int) -> float:
    """Estimated microseconds of both launches."""
    first, rest = _divided(p, s.dim, s.at)
    if s.main.early and _tiles(s.main, first) + _tiles(s.tail, rest) <= sms:
        both = (estimate(of, part, _tiles(of, part)) for of, part in ((s.main, first), (s.tail, rest)))
        return _TWO_KINDS * max(both)
    return estimate(s.main, first, sms) + estimate(s.tail, rest, sms)


def _halves(p: Gemm, sms: int) -> TailSchedule:
    """The schedule of a product that neither way divides."""
    dim: Dim = "m" if p.m >= p.n else "n"
    at = round_up(max(p.m, p.n) // 2, _UNIT)
    first, rest = _divided(p, dim, at)
    return TailSchedule(dim, at, choose(first, sms), choose(rest, sms))


@functools.cache
def _catalogue(a_mn: bool, b_mn: bool) -> list[TailSchedule]:
    """A tail of each kind. :mod:`.tensor_core_sm90` verifies all schedules, but not as tails."""
    of = catalogue(a_mn, b_mn)
    mains = [next(s for s in of if s.swap == swap and s.block_m == 64) for swap in (False, True)]
    tails = {(s.warpgroups, s.share, s.cluster, s.swap): s for s in of if s.blocks == 1}
    dims: tuple[Dim, Dim] = ("m", "n")
    return [
        # Along both dimensions, by both first launches, beside them and behind.
        TailSchedule(dims[i % 2], 64, replace(mains[i // 2 % 2], early=i // 4 % 2 == 0), tail)
        for i, tail in enumerate(tails.values())
    ]


def _parts(p: Product, dim: Dim, at: int) -> tuple[Product, Product]:
    """The products of both launches."""

    def sized(x: Matrix, axis: int, size: int) -> Matrix:
        shape = [*x.shape]
        shape[axis] = size
        return x._replace(shape=tuple(shape))

    def part(size: int) -> Product:
        if dim == "m":
            return replace(p, a=sized(p.a, -2, size), out=sized(p.out, -2, size))
        bias = None if p.bias is None else sized(p.bias, 0, size)
        return replace(p, b=sized(p.b, -1, size), out=sized(p.out, -1, size), bias=bias)

    return part(at), part((p.m if dim == "m" else p.n) - at)


class TailSm90Kernel(CudaKernel[Product, TailSchedule]):
    name, step = "tail_sm90", "mma"
    sources = ("tensor_core_sm90.cu",)

    @functools.cached_property
    def catalogue(self) -> Sequence[TailSchedule]:
        return tuple(dict.fromkeys(s for layout in LAYOUTS for s in _catalogue(*layout)))

    def supports(self, p: Product) -> bool:
        """Whether :mod:`.tensor_core_sm90` does, and its parts, too."""
        return TENSOR_CORE_SM90.supports(p) and p.k > 1 and max(p.m, p.n) > _UNIT

    def all(self, p: Product) -> Sequence[TailSchedule]:
        of, sizes = gemm(p), {"m": p.m, "n": p.n}
        return [s for s in _catalogue(of.a_mn, of.b_mn) if s.at < sizes[s.dim]]

    def candidates(self, p: Product) -> Sequence[TailSchedule]:
        found = _candidates(gemm(p), devices.device_info(p.device).sm_count)
        return [*found] or [self.choose(p)]

    def choose(self, p: Product) -> TailSchedule:
        of = gemm(p), devices.device_info(p.device).sm_count
        return next(iter(_candidates(*of)), None) or _halves(*of)

    def cost(self, p: Product, s: TailSchedule) -> float:
        """Estimated microseconds of both launches."""
        return _cost(s, gemm(p), devices.device_info(p.device).sm_count)

    def divides(self, p: Product) -> bool:
        """Whether whole waves leave few tiles, or two kinds can fill one wave."""
        return self.supports(p) and bool(_candidates(gemm(p), devices.device_info(p.device).sm_count))

    def pays(self, p: Product) -> bool:
        """Whether two launches should take less time than one, of a product that one can compute."""
        of = gemm(p), devices.device_info(p.device).sm_count
        least = next(iter(_candidates(*of).values()), math.inf)
        return p.k > 1 and least < _CHEAPER * estimate(choose(*of), *of)

    def plan(self, p: Product, s: TailSchedule | None = None) -> CudaPlan:
        need(
            self.supports(p),
            f"{self.name}: expected 16-bit matrices that TMA can read, with over {_UNIT} rows or columns and"
            " over one term, on sm_90",
        )
        s = s or self.choose(p)
        both = [*zip(_parts(p, s.dim, s.at), (s.main, s.tail), strict=True)]
        (first, main), (rest, tail) = both
        runtime.announce((spec(variant(first), main), spec(variant(rest), tail, beside=True)), p.device)
        plans = TENSOR_CORE_SM90.plan(first, main), TENSOR_CORE_SM90.plan_beside(rest, tail)
        return _TailPlan(p, s, *plans)


class _TailPlan(CudaPlan):
    """The plans of both launches."""

    __slots__ = ("_main", "_steps", "_tail")

    def __init__(self, p: Product, s: TailSchedule, main: CudaPlan, tail: CudaPlan) -> None:
        """`p`: all of the product."""
        self._main, self._tail = main, tail
        out = s.at * p.out.strides[-2 if s.dim == "m" else -1] * p.out.dtype.itemsize
        a = s.at * p.a.strides[-2] * p.a.dtype.itemsize if s.dim == "m" else 0
        b = s.at * p.b.strides[-1] * p.b.dtype.itemsize if s.dim == "n" else 0
        bias = s.at * p.bias.dtype.itemsize if p.bias is not None and s.dim == "n" else 0
        start = out if p.start == "out" else 0
        self._steps = a, b, out, bias, 0, start  # from an address of the first launch to one of the second
        super().__init__(self._launch_both)

    def encode(self, *addresses: int) -> None:
        self._main.encode(*addresses)
        self._tail.encode(*self._behind(addresses))

    def _behind(self, addresses: Sequence[int]) -> list[int]:
        return [at + step for at, step in zip(addresses, self._steps, strict=False)]

    def _launch_both(self, *addresses: int) -> None:
        self._main.launch(*addresses)
        self._tail.launch(*self._behind(addresses))


TAIL_SM90 = TailSm90Kernel()
