"""Variations: different ways to batch the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variation:
    """One way to batch the same rows.

    Attributes:
        kind: ``repeat``, ``batch size``, ``position``, ``padding``, ``neighbours`` or ``chunks``.
        name: a description.
        batches: the rows of each batch, as indices. The three indices after the last row stand for a row of
            zeros, of NaN and of infinities.
    """

    kind: str
    name: str
    batches: tuple[Tensor, ...]


def plan(rows: int) -> tuple[Variation, ...]:
    """The variations of a batch of `rows` rows. They are deterministic, and each contains every row."""
    cpu = torch.device("cpu")  # the default device may be another
    index = torch.arange(rows, device=cpu)
    zero, nan, inf = rows, rows + 1, rows + 2
    variations = [Variation("repeat", "the same batch again", (index,))]

    def add(kind: str, name: str, batches: Iterable[Tensor]) -> None:
        variations.append(Variation(kind, name, tuple(batches)))

    def cut(size: int, order: Tensor = index) -> list[Tensor]:
        # The last batch repeats rows of the previous one, so that all have the same size.
        return [order[min(start, rows - size) :][:size] for start in range(0, rows, size)]

    def some(size: int) -> int:
        return min(size, rows)

    for size in [1, 2, 3, *(2**i for i in range(2, rows.bit_length()))]:
        if size < rows:
            add("batch size", f"batches of {size}", cut(size))
    if rows >= 3:
        # With "batches of 3" above, every row has been first, in the middle, and last.
        for shift in (1, 2):
            add("position", f"batches of 3, rotated by {shift}", (b.roll(shift) for b in cut(3)))
    if rows >= 2:
        add("position", "all rows, rotated by half", [index.roll(rows // 2)])
        add("position", "all rows, last row first", [index.flip(0)])
    for size, extra in ((5, 3), (24, 8)):
        if size < rows:
            padded = (torch.cat([b, torch.full((extra,), zero, device=cpu)]) for b in cut(size))
            add("padding", f"batches of {size} padded with {extra} rows of zeros", padded)
    twice = torch.cat([index, torch.full_like(index, zero)])
    add("padding", "all rows padded with as many rows of zeros", [twice])
    if rows > 8:  # with fewer rows, every row has all the others as neighbours anyway
        # Multiplication by a number coprime to `rows` gives every row neighbours from far away.
        stride = next(s for s in range(int(rows * 0.618) | 1, 3 * rows + 3) if math.gcd(s, rows) == 1)
        add("neighbours", "batches of 8, other neighbours", cut(8, index * stride % rows))
    for filler, name in ((nan, "NaN"), (inf, "infinity")):
        size = some(8)
        between = (torch.stack([b, torch.full_like(b, filler)], 1).flatten() for b in cut(size))
        add("neighbours", f"batches of {size}, each row next to {name}", between)
    for parts in (2, 3, 7):
        if parts < rows:
            add("chunks", f"cut into {parts} chunks", index.tensor_split(parts))
    if rows >= 4:
        sizes = [1]  # 1, 2, 3, 5, 8, ...: small and large side by side
        while sum(sizes) < rows:
            sizes.append(sizes[-1] + (sizes[-2] if len(sizes) > 1 else 1))
        sizes[-1] -= sum(sizes) - rows
        add("chunks", "cut into chunks of 1, 2, 3, 5, 8, ...", index.split(sizes))
    return tuple(variations)
