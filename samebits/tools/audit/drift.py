"""Measurement of drift: whether an operator's rows change their bits with the batch, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.testing import bits, pattern
from samebits.tools.audit.variation import Variation

Operator = Callable[[Tensor], Tensor]
"""Takes rows ``[M, K]`` and returns rows ``[M, N]``."""

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Difference:
    """One output element whose bits a variation changed.

    Attributes:
        variation: name of the variation.
        row: index among the audited rows.
        column: index of the output feature.
        batch_rows: rows in the batch that changed it.
        position: the row's position in that batch.
        expected: the value in the batch of all rows.
        got: the value in this batch.
        expected_bits: bits of ``expected``, in hexadecimal.
        got_bits: bits of ``got``.
    """

    variation: str
    row: int
    column: int
    batch_rows: int
    position: int
    expected: float
    got: float
    expected_bits: str
    got_bits: str


@dataclass(frozen=True)
class VariationCount:
    """Counts of one variation for one layer.

    Attributes:
        kind: see :class:`Variation`.
        name: see :class:`Variation`.
        rows: rows compared, each counted once.
        changed: rows of which at least one bit changed.
    """

    kind: str
    name: str
    rows: int
    changed: int


@dataclass(frozen=True)
class Drift:
    """How one operator's rows depend on their batch.

    Attributes:
        rows: rows compared. Each is counted once, in however many variations it was.
        changed: rows of which some variation changed at least one bit.
        ulp: the largest difference in units in the last place, which counts values of the dtype. -0 and +0
            are one apart, and NaN is beyond infinity. 0 means that no bit changed.
        relative: the largest ``|got - expected| / max(|got|, |expected|)``; infinite if NaN or infinity
            appeared or vanished. Like ``ulp``, it is large where a sum cancels to almost zero.
        of_row: the largest ``|got - expected|``, relative to the largest magnitude in its row.
        first: the first element that changed, in the order of the plan.
        variations: the same counts for each variation.
    """

    rows: int
    changed: int
    ulp: int
    relative: float
    of_row: float
    first: Difference | None
    variations: tuple[VariationCount, ...]


def _bits(x: Tensor) -> Tensor:
    return bits(x.contiguous()).long()


def ordered(bits: Tensor, width: int) -> Tensor:
    """Integers in the order of the values, one for each bit pattern. -0 becomes -1."""
    return torch.where(bits < 0, -1 - (bits & (2 ** (width - 1) - 1)), bits)


def measure(
    operator: Operator,
    rows: Tensor,
    variations: Sequence[Variation],
    progress: Callable[[int], None] = lambda rows: None,
) -> Drift:
    """Run `operator` in every variation, and compare each row's bits with those in the batch of all rows.

    Args:
        operator: the operator.
        rows: ``[M, K]``.
        variations: the variations of :func:`plan` for M.
        progress: receives, after each variation, the number of rows that the operator ran on.
    """
    count = rows.shape[0]
    fill = rows.new_tensor([0.0, math.nan, math.inf])[:, None].expand(-1, rows.shape[1])
    pool = torch.cat([rows, fill])
    expected = operator(rows).cpu()  # all comparisons are on the CPU
    width = 8 * expected.element_size()
    expected_bits = _bits(expected)
    row_scale = expected.double().nan_to_num(0, 0, 0).abs().amax(1).clamp(min=_TINY)
    progress(count)

    changed = torch.zeros(count, dtype=torch.bool, device="cpu")
    counts, first, ulp, relative, of_row = [], None, 0, 0.0, 0.0
    for variation in variations:
        index = torch.cat(variation.batches)
        got = torch.cat([operator(pool[batch]).cpu() for batch in variation.batches])
        progress(len(index))
        differs = _bits(got) != expected_bits[index.clamp(max=count - 1)]
        differs &= (index < count)[:, None]
        here = torch.zeros_like(changed)
        where = differs.nonzero()
        if len(where):
            at, column = where.T
            row = index[at]
            here[row] = True
            was, now = expected_bits[row, column], _bits(got)[at, column]
            ulp = max(ulp, int((ordered(was, width) - ordered(now, width)).abs().max()))
            x, y = expected[row, column].double(), got[at, column].double()
            distance = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            scale = torch.maximum(x.abs(), y.abs()).nan_to_num(0, 0).clamp(min=_TINY)
            relative = max(relative, float((distance / scale).max()))
            of_row = max(of_row, float((distance / row_scale[row]).max()))
            if first is None:
                batch_rows, position = _place(variation.batches, int(at[0]))
                first = Difference(
                    variation.name,
                    int(row[0]),
                    int(column[0]),
                    batch_rows,
                    position,
                    float(x[0]),
                    float(y[0]),
                    pattern(expected[row[0], column[0]]),
                    pattern(got[at[0], column[0]]),
                )
        changed |= here
        counts.append(VariationCount(variation.kind, variation.name, count, int(here.sum())))
    return Drift(count, int(changed.sum()), ulp, relative, of_row, first, tuple(counts))


def _place(batches: Sequence[Tensor], at: int) -> tuple[int, int]:
    """The size of the batch that holds element `at` of the concatenated batches, and its position there."""
    for batch in batches:
        if at < len(batch):
            return len(batch), at
        at -= len(batch)
    raise IndexError(at)
