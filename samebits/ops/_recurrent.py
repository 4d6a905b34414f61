"""What recurrent operations share: which tokens are a sequence's, and what they go on from."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key
from samebits.backends.recurrent import Layout, RecurrentState
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._delta import attend_linearly
from samebits.ops._sequences import assert_cu_seqlens, check_cu_seqlens

__all__ = ["beginning", "check_floats", "recur", "spans_of"]


def recur(
    own: Layout,
    operands: tuple[Any, ...],
    begin: tuple[Tensor | None, RecurrentState | None],
    spans: Tensor,
    scale: float,
    final: bool,
    key: Key,
    **options: Any,
) -> tuple[Tensor, RecurrentState | None]:
    """Results ``[B, T, heads, value size]`` of q, k, v, g, beta ``[B, T, ...]``, and with `final` the states.

    Args:
        own: the layout of states.
        begin: what sequences start from, of :func:`beginning`.
        options: those of :func:`samebits.ops._delta.attend_linearly`.
    """
    initial, state = begin
    if final and state is None:
        state = RecurrentState(own, sequences=len(spans), device=spans.device)
        if initial is not None:
            state.parts["matrix"].copy_(initial.detach())
    elif state is not None and not final:
        state = state.clone()
    given = (*operands, initial, *options.values())
    records = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    data, closes = None if state is None else state.data, final and records
    q, k, v = (t.flatten(0, 1) for t in operands[:3])
    g, beta = (None if t is None else t.flatten(0, 1) for t in operands[3:])
    out, closed = attend_linearly(q, k, v, g, beta, initial, data, spans, scale, closes, key, **options)
    out = out.unflatten(0, operands[0].shape[:2])
    if state is None or not final:
        return out, None
    matrix = _plain(state, closed) if closes else None
    return out, state.advanced(matrix, functools.partial(_closed, key=key))


def _closed(state: RecurrentState, key: Key) -> Tensor:
    """The matrices after the last tokens: of a call without any."""
    p = state.parts
    _, heads, key_size, size = p["matrix"].shape
    dtype, new = p["keys"].dtype, state.data.new_empty
    q, v = new((0, heads, key_size), dtype=dtype), new((0, heads, size), dtype=dtype)
    g = new((0, heads, key_size) if p["decays"].ndim == 4 else (0, heads))
    weights = new((0, heads)) if "weights" in p else None
    spans = torch.zeros(len(state), 2, dtype=torch.int32, device=state.data.device)
    given = (q, q, v, g, None, None, state.data.clone(), spans, 1.0, True, key)
    with torch.no_grad():
        return _plain(state, attend_linearly(*given, weights=weights)[1])


def _plain(state: RecurrentState, closed: Tensor) -> Tensor:
    """Matrices as the operation has them: those of state spaces are ``[value size, key size]``."""
    return closed.mT if "weights" in state.parts else closed


def check_floats(op: str, name: str, t: Tensor | None, q: Tensor, of: str = "q") -> None:
    """Refuse anything but a dense tensor of floats on the device of `q`, the argument `of`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
    check_operands(op, None, {name: t}, autocast=False)
    check_device(op, name, t, of, q)


def spans_of(
    op: str,
    q: Tensor,
    cu_seqlens: Tensor | None,
    key_start: Tensor | None,
    key_length: Tensor | None,
    key: Key,
    name: str = "q",
) -> Tensor:
    """The first token of each sequence and the one after its last, in the tokens of the whole batch.

    Rows of a batch that are sequences need none: see :class:`samebits.backends.delta.Delta`.
    """
    batch, tokens = q.shape[:2]
    unknown = q.is_meta or torch.compiler.is_compiling()  # values are
    if cu_seqlens is not None:
        _check_integers(op, "cu_seqlens", cu_seqlens, None, q, name)
        if key_start is not None or key_length is not None:
            raise ValueError(f"samebits.{op}: key_start, key_length: expected none with cu_seqlens")
        if batch != 1:
            raise ValueError(f"samebits.{op}: {name}: expected a batch of 1 with cu_seqlens, got {batch}")
        if q.is_cuda:
            assert_cu_seqlens(op, cu_seqlens, tokens, key)
        elif not unknown:
            check_cu_seqlens(op, cu_seqlens, tokens)
        return torch.stack([cu_seqlens[:-1], cu_seqlens[1:]], 1).to(torch.int32)
    if key_start is None and key_length is None:
        return q.new_empty((batch, 0), dtype=torch.int32)  # so a step of decoding is one launch
    rows = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None] * tokens
    start, stop = torch.zeros_like(rows), torch.full_like(rows, tokens)
    for bound, t in (("key_start", key_start), ("key_length", key_length)):
        if t is not None:
            _check_integers(op, bound, t, batch, q, name)
            if bound == "key_start":
                start = t.clamp(0, tokens).to(torch.int32)[:, None]  # int64 may have more bits
            else:
                stop = t.clamp(0, tokens).to(torch.int32)[:, None]
            if not q.is_cuda and not unknown and bool(((t < 0) | (t > tokens)).any()):
                raise ValueError(
                    f"samebits.{op}: {bound}: expected values in [0, {tokens}], got {t.tolist()}"
                )
    return torch.cat([start, torch.maximum(start, stop)], 1) + rows


def _check_integers(op: str, name: str, t: Tensor, size: int | None, q: Tensor, of_q: str) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"samebits.{op}: {name}: expected int32 or int64, got {t.dtype}")
    check_device(op, name, t, of_q, q)
    if t.ndim != 1 or (size is not None and len(t) != size):
        raise ValueError(f"samebits.{op}: {name}: expected shape ({size or 'n'},), got {shape(t)}")


def beginning(
    op: str,
    given: Tensor | RecurrentState | None,
    own: Layout,
    sequences: int,
    q: Tensor,
    name: str = "initial_state",
    of_q: str = "q",
) -> tuple[Tensor | None, RecurrentState | None]:
    """What sequences start from: matrices, or states."""
    if given is None:
        return None, None
    if isinstance(given, RecurrentState):
        if given.layout.parts != own.parts:
            raise ValueError(
                f"samebits.{op}: {name}: expected a state of such heads, sizes and dtype, got a {given!r}"
            )
        if len(given) != sequences:
            raise ValueError(f"samebits.{op}: {name}: expected {sequences} sequences, got {len(given)}")
        check_device(op, name, given.data, of_q, q)
        return None, given
    check_floats(op, name, given, q, of_q)
    wanted = (sequences, *own.parts[0].shape)
    if given.dtype != torch.float32:
        raise TypeError(f"samebits.{op}: {name}: expected float32, got {given.dtype}")
    if given.shape != wanted:
        raise ValueError(f"samebits.{op}: {name}: expected shape {wanted}, got {shape(given)}")
    return given, None
