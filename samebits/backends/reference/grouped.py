"""Grouped products on CPU tensors: the products of `matmul`, one group after another."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.reference import matmul as reference


def grouped_rows(
    a: Tensor, b: Tensor, offs: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype, contract: str
) -> Tensor:
    """``a[t, K] @ b[g, K, N] (+ bias[g, N])`` for the rows t of every group g, and +0 for rows of none."""
    out = torch.zeros((a.shape[0], b.shape[2]), dtype=out_dtype)
    for g, (start, stop) in enumerate(_groups(offs)):
        of_group = None if bias is None else bias[g]
        if start < stop:
            rows = a[start:stop]
            found = reference.matmul(rows, b[g], bias=of_group, out_dtype=out_dtype, contract=contract)
            out[start:stop] = found
    return out


def grouped_terms(
    a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, *, out_dtype: torch.dtype, contract: str
) -> Tensor:
    """``a[M, t] @ b[t, N]`` over the rows t of every group: chains over sequences from +0."""
    return _chains(None, a, b, offs, sequences, out_dtype, contract)


def grouped_terms_later(
    out: Tensor, a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, *, contract: str
) -> Later:
    """`grouped_terms` into ``out[G, M, N]``, from whose values the chains start."""
    return partial(out.copy_, _chains(out, a, b, offs, sequences, out.dtype, contract))


def _chains(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    sequences: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    out = torch.empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=out_dtype)
    for g, (start, stop) in enumerate(_groups(offs)):
        runs = torch.tensor(_bounds(sequences, start, stop)) - start
        terms = a[None, None, :, start:stop], b[None, None, start:stop]
        of_group = None if acc is None else acc[g : g + 1]
        out[g] = reference.addbmm(of_group, *terms, runs, out_dtype=out_dtype, contract=contract)[0]
    return out


def _groups(offs: Tensor) -> list[tuple[int, int]]:
    """The first row of every group, and the one after its last."""
    return list(itertools.pairwise([0, *offs.tolist()]))


def _bounds(sequences: Tensor | None, start: int, stop: int) -> list[int]:
    """The bounds of the sequences of a group's rows."""
    if sequences is None:
        return [start, stop]
    of_rows = sequences[start:stop].tolist()
    inner = [start + i + 1 for i, (one, other) in enumerate(itertools.pairwise(of_rows)) if one != other]
    return [start, *inner, stop]
