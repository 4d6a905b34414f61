"""A second implementation of "Convolutions" in docs/contract.md, over the chains of `naive`.

Tensors are dictionaries from coordinates to Python floats. What is not there is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from torch import Tensor

from tests.support import naive
from tests.support.naive import f32

Index = tuple[int, ...]
Values = dict[Index, float]


class Conv(NamedTuple):
    """Sizes are those of ``x[batch, channels, *sizes]``; `before` and `after` are padding."""

    batch: int
    channels: int
    sizes: Index
    outputs: int
    taps: Index
    stride: Index
    before: Index
    after: Index
    dilation: Index
    groups: int
    contract: str
    dtype: str

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.channels == self.outputs

    @property
    def positions(self) -> list[Index]:
        counts = []
        for n, k, s, p, q, d in zip(
            self.sizes, self.taps, self.stride, self.before, self.after, self.dilation, strict=True
        ):
            starts = [i for i in range(-p, n + q) if (i + p) % s == 0 and i + d * (k - 1) < n + q]
            counts.append(len(starts))
        return all_of(counts)

    def seen(self, at: Index, tap: Index) -> Index:
        """The coordinates in x, perhaps outside of it, of a window's tap."""
        parts = zip(at, self.stride, self.before, tap, self.dilation, strict=True)
        return tuple(a * s - p + t * d for a, s, p, t, d in parts)

    def inputs_of(self, output: int) -> Iterator[tuple[int, int]]:
        """Channels of x, and where they are in the weight."""
        share = self.channels // self.groups
        first = output // (self.outputs // self.groups) * share
        return ((first + c, c) for c in range(share))


def all_of(counts: list[int] | Index) -> list[Index]:
    return [*product(*map(range, counts))]


def values_of(t: Tensor) -> Values:
    return {i: t[i].item() for i in all_of(tuple(t.shape))}


def by_taps(terms: list[tuple[float, float]]) -> float:
    acc = f32(0)
    for a, b in terms:
        acc = f32(acc + f32(f32(a) * f32(b)))
    return float(acc)


def forward(c: Conv, x: Values, w: Values, bias: list[float] | None) -> dict[Index, int]:
    found = {}
    for b, o, at in product(range(c.batch), range(c.outputs), c.positions):
        terms = [
            (x.get((b, channel, *c.seen(at, tap)), 0.0), w[(o, i, *tap)])
            for channel, i in c.inputs_of(o)
            for tap in all_of(c.taps)
        ]
        acc = by_taps(terms) if c.depthwise else naive.chain([terms], c.contract, c.dtype)
        found[(b, o, *at)] = naive.finish(acc, c.dtype, None if bias is None else bias[o])
    return found


def of_x(c: Conv, g: Values, w: Values) -> dict[Index, int]:
    spans = [d * (k - 1) + 1 for d, k in zip(c.dilation, c.taps, strict=True)]
    alone = all(s >= n for s, n in zip(c.stride, spans, strict=True))
    windows = {(c.seen(at, tap), tap): at for at in c.positions for tap in all_of(c.taps)}
    found = {}
    for b, channel, place in product(range(c.batch), range(c.channels), all_of(c.sizes)):
        outputs = [(o, i) for o in range(c.outputs) for ch, i in c.inputs_of(o) if ch == channel]
        taps = all_of(c.taps)
        if c.depthwise:
            terms = [
                (g[(b, o, *windows[place, tap])], w[(o, i, *tap)])
                for o, i in outputs
                for tap in taps
                if (place, tap) in windows
            ]
            found[(b, channel, *place)] = naive.finish(by_taps(terms), c.dtype)
            continue
        if alone:
            taps = [tap for tap in taps if (place, tap) in windows]
        terms = [
            (g[(b, o, *windows[place, tap])] if (place, tap) in windows else 0.0, w[(o, i, *tap)])
            for o, i in outputs
            for tap in reversed(taps)
        ]
        found[(b, channel, *place)] = naive.finish(naive.chain([terms], c.contract, c.dtype), c.dtype)
    return found


def of_weight(c: Conv, g: Values, x: Values) -> dict[Index, int]:
    found = {}
    for o, tap in product(range(c.outputs), all_of(c.taps)):
        for channel, i in c.inputs_of(o):
            rows = [
                [(g[(b, o, *at)], x.get((b, channel, *c.seen(at, tap)), 0.0)) for at in c.positions]
                for b in range(c.batch)
            ]
            if c.depthwise:
                acc = by_taps([term for row in rows for term in row])
            else:
                acc = naive.chain(rows, c.contract, c.dtype, plain=False)
            found[(o, i, *tap)] = naive.finish(acc, c.dtype)
    return found


def of_bias(c: Conv, g: Values) -> dict[Index, int]:
    found = {}
    for o in range(c.outputs):
        acc = f32(0)
        for b, at in product(range(c.batch), c.positions):
            acc = f32(acc + f32(g[(b, o, *at)]))
        found[(o,)] = naive.finish(float(acc), c.dtype)
    return found
