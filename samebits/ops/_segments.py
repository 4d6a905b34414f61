"""The sum over a vocabulary that exists a part at a time: one chain, or the tree of a contract's segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.segments import check_terms
from samebits.backends.token_logps import vocabulary_pieces
from samebits.contract import segmented_key


def sum_in_parts(
    products: Any, out: Tensor, rows: int, vocabulary: int, segments: int, most: int, contract: str
) -> tuple[list[slice], Callable[[slice, Tensor, Tensor], Iterator[Later]]]:
    """``out[M, N] = a[M, V] @ b[V, N]`` by parts of the vocabulary V, with at most about `most` values of a.

    Args:
        products: a backend's module for products.
        rows: M, which the parts are chosen for, even if ``out`` is empty and no part is added.
        contract: without segments.

    Returns:
        The parts, and a function that takes each of them in turn, with its columns of a, and b. It gives the
        steps that add the part. The steps of the last one write ``out``, which is rounded once.
    """
    length = vocabulary // check_terms(segmented_key(contract, segments), vocabulary, "weight: V")
    together = segments  # in one product: all segments, or a subtree of them, or one
    while together > 1 and length * together * rows > most:
        together //= 2
    length *= together
    parts = [
        part
        for start in range(0, vocabulary, length)
        for part in ([slice(start, start + length)] if together > 1 else _pieces(start, length, rows, most))
    ]
    several, levels = len(parts) > 1, (segments // together).bit_length()
    sums = torch.empty((levels, *out.shape), dtype=torch.float32, device=out.device) if several else out[None]
    whole = segmented_key(contract, together)

    def steps(part: slice, a: Tensor, b: Tensor) -> Iterator[Later]:
        index, offset = divmod(part.start, length)
        level = index.bit_count()  # subtrees that wait for their right neighbour
        goes_on = offset > 0
        key = contract if goes_on else whole
        yield products.matmul_later(sums[level], a, b[part], accumulate=goes_on, contract=key)
        if part.stop % length:
            return
        while index & 1:
            level, index = level - 1, index >> 1
            last = part.stop == vocabulary and level == 0
            yield products.tree_later(out if last else sums[level], sums[level : level + 2])
        if segments == together and several and part.stop == vocabulary:
            yield products.rounded_later(out, sums[0])

    return parts, steps


def _pieces(start: int, length: int, rows: int, most: int) -> Iterator[slice]:
    return vocabulary_pieces(slice(start, start + length), rows, most)
