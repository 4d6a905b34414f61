"""Sequences packed into rows, by ``cu_seqlens`` or ``seq_idx``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import pack_key
from samebits.ops._checks import check_device, shape
from samebits.ops._sequences import assert_cu_seqlens, check_cu_seqlens


def check_packed(
    op: str,
    x: Tensor,
    tokens: int,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    states: bool,
    named: str = "x",
) -> None:
    """Refuse what does not say how each row of `x`, the argument `named` so, divides into sequences.

    Values of `cu_seqlens` are read on a CPU; a GPU checks them without being waited for.
    """
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError(f"samebits.{op}: seq_idx, cu_seqlens: expected one of them")
    name, given = ("seq_idx", seq_idx) if cu_seqlens is None else ("cu_seqlens", cu_seqlens)
    if given is None:
        return
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
        got = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"samebits.{op}: {name}: expected a tensor of int32 or int64, got {got}")
    check_device(op, name, given, named, x)
    if seq_idx is not None:
        if seq_idx.shape != (len(x), tokens):
            raise ValueError(
                f"samebits.{op}: seq_idx: expected shape {(len(x), tokens)}, got {shape(seq_idx)}"
            )
        if states:
            raise ValueError(f"samebits.{op}: seq_idx: expected no states with it; take cu_seqlens")
        return
    if given.ndim != 1 or len(x) != 1:
        raise ValueError(
            f"samebits.{op}: cu_seqlens: expected one dimension, and {named} with one row, got {shape(given)}"
            f" and {shape(x)}"
        )
    if given.is_cuda:
        assert_cu_seqlens(op, given, tokens, pack_key("", None))
    elif not given.is_meta and not torch.compiler.is_compiling():
        check_cu_seqlens(op, given, tokens)


def places(tokens: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """How many tokens of its sequence lie before each, ``[rows, tokens]``; None where rows are sequences.

    Nothing waits for a GPU.
    """
    if seq_idx is None and cu_seqlens is None:
        return None
    if seq_idx is not None:
        starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    else:
        assert cu_seqlens is not None
        marks = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
        marks[0] = True
        starts = marks.index_fill(0, cu_seqlens.long().clamp(0, tokens), True)[None, :tokens]
    at = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    return at - torch.where(starts, at, 0).cummax(1).values


def offsets_of(
    rows: int, tokens: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor
) -> Tensor:
    """Offsets of all sequences in the tokens of all rows, int32. Those of `seq_idx` wait for a GPU."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int32)
    if seq_idx is None:
        return torch.arange(rows + 1, dtype=torch.int32, device=x.device) * tokens
    starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)[:, :tokens]
    found = starts.flatten().nonzero()[:, 0].to(torch.int32)
    return F.pad(found, (0, 1), value=rows * tokens)
