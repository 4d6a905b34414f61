"""Attention on CPU tensors: the chains of `matmul`, and `attention_kernels` for what lies between them.

It goes over the blocks of a sequence's keys. To a block come only the queries with a key of it in their
window. What is left out changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.backends.attention import BLOCK, LANES, SEGMENT, Attention
from samebits.backends.reference import attention_kernels as kernels
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import carry_on, require_subnormals, rounded
from samebits.backends.reference.rows import column_sum
from samebits.contract import GROUP, INTERPOLATION, contract_from_key
from samebits.functions import CONSTANTS

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]

_zeros = partial(torch.zeros, dtype=torch.float32)  # whatever the default dtype is


@dataclass(frozen=True)
class _Sequence:
    """A sequence of the batch.

    Attributes:
        row: of q, and of a mask, in the batch.
        queries: span of its tokens there.
        slots: of its keys, in order, in ``k.flatten(0, -3)``.
        first_slot: of its keys in a row of the batch.
        offset: position of its first query.
        first_seen, last_seen: for each query the first key in its window, and the one after the last.
    """

    row: int
    queries: slice
    slots: Tensor
    first_slot: int
    offset: int
    first_seen: _I64
    last_seen: _I64


def _sequences(x: Attention) -> Iterator[_Sequence]:
    q_ends, k_ends, starts, lengths = (
        None if t is None else t.tolist() for t in (x.cu_seqlens_q, x.cu_seqlens_k, x.key_start, x.key_length)
    )
    for b in range(x.batch):
        queries = slice(0, x.queries) if q_ends is None else slice(q_ends[b], q_ends[b + 1])
        first = 0 if starts is None else starts[b]
        if k_ends is not None:
            slots = torch.arange(k_ends[b], k_ends[b + 1])
        else:
            slots = torch.arange(first, x.keys if lengths is None else lengths[b])
            if x.block_table is None:
                slots += b * x.keys
            else:
                page = x.k.shape[1]
                slots = x.block_table[b].to(torch.int64)[slots // page] * page + slots % page
        asked, keys = queries.stop - queries.start, len(slots)
        offset = {"first": 0, "slots": -first, "last": keys - asked}[x.align]
        position, (left, right) = np.arange(asked) + offset, x.window
        first_seen = position - left if left >= 0 else np.zeros_like(position)
        last_seen = position + right + 1 if right >= 0 else np.full_like(position, keys)
        row = b if q_ends is None else 0
        yield _Sequence(row, queries, slots, first, offset, first_seen.clip(0), last_seen.clip(0, keys))


@dataclass(frozen=True)
class _Block:
    """Keys ``start <= j < stop`` of a sequence, and the queries, as rows too, with one in their window."""

    start: int
    stop: int
    queries: slice
    rows: slice


def _blocks(s: _Sequence, group: int) -> Iterator[_Block]:
    for start in range(0, len(s.slots), BLOCK):
        stop = min(start + BLOCK, len(s.slots))
        low = int(np.searchsorted(s.last_seen, start, "right"))
        high = int(np.searchsorted(s.first_seen, stop))
        if low < high:
            yield _Block(start, stop, slice(low, high), slice(low * group, high * group))


class _Partial:
    """What rows ``[kv heads, rows]`` have summed up over some keys: relative to 2**n, weights and values."""

    def __init__(self, heads: int, rows: int, lanes: int, size: int) -> None:
        self.n = np.full((heads, rows), -np.inf, np.float32)
        self.lanes = np.zeros((heads, rows, lanes), np.float32)
        self.o = np.zeros((heads, rows, size), np.float32)


class _Call:
    """An :class:`Attention` as the kernels take it."""

    def __init__(self, x: Attention) -> None:
        require_subnormals()
        self.x = x
        self.contract = contract_from_key(x.contract)
        self.k, self.v = (t.detach().flatten(0, -3) for t in (x.k, x.v))  # [slots, kv heads, size]
        scale, softcap, log2e = (np.float32(c) for c in (x.scale, x.softcap, CONSTANTS["LOG2E"]))
        cap = scale / softcap if x.softcap else np.float32(0)
        self.interpolate = self.contract.exp2 == INTERPOLATION
        self.scales = ((softcap if x.softcap else scale) * log2e, cap, self.interpolate)
        sinks = _zeros(0, 0) if x.sinks is None else x.sinks.detach().view(x.kv_heads, x.group)
        self.sinks = sinks.numpy()

    def grouped(self, t: Tensor, s: _Sequence) -> Tensor:
        """``t[batch, queries, heads, ...]`` of a sequence as a view ``[kv heads, queries, group, ...]``."""
        own = t[s.queries] if self.x.packed else t[s.row, s.queries]
        return own.view(len(own), self.x.kv_heads, self.x.group, *own.shape[2:]).transpose(0, 1)

    def rows(self, t: Tensor, s: _Sequence) -> Tensor:
        """The same with queries and group as one dimension, the rows."""
        return self.grouped(t.detach(), s).flatten(1, 2)

    def keys(self, t: Tensor, s: _Sequence, b: _Block) -> Tensor:
        """The keys or values ``t[slots, kv heads, size]`` of a block as ``[kv heads, keys, size]``."""
        return t[s.slots[b.start : b.stop]].transpose(0, 1)

    def mask(self, t: Tensor, s: _Sequence) -> Tensor:
        """``t[batch, heads, queries, keys]`` of a sequence as a view ``[kv heads, queries, group, keys]``."""
        own = t[s.row, :, :, s.first_slot : s.first_slot + len(s.slots)]
        return own.view(self.x.kv_heads, self.x.group, *own.shape[1:]).transpose(1, 2)

    def visible(self, s: _Sequence) -> Callable[[_Block], tuple[Any, ...]]:
        """For a block of a sequence, the arguments that tell kernels which keys queries see."""
        hides, adds = (torch.empty(0, 0, 0, 0, dtype=dtype) for dtype in (torch.bool, torch.float32))
        if self.x.mask is not None:
            own = self.mask(self.x.mask.detach(), s)
            if own.dtype == torch.bool:
                hides = own
            else:
                adds = own.to(torch.float32)

        def of_block(b: _Block) -> tuple[Any, ...]:
            windows = s.first_seen[b.queries], s.last_seen[b.queries]
            masks = (t[:, b.queries].numpy() for t in (hides, adds))
            return (b.start, *windows, self.x.group, *masks)

        return of_block

    def chain(self, a: Tensor, b: Tensor, out: _F32) -> None:
        """Carry ``out[heads, M, N]`` on by ``a[heads, M, K] @ b[heads, K, N]``, or by sequences of these."""
        a4, b4 = (t if t.ndim == 4 else t[:, None] for t in (a, b))
        spans = np.array([(s, 0, a4.shape[3]) for s in range(a4.shape[1])], np.int64)
        carry_on(a4, b4, out, spans, self.x.contract, closing_zero=False)

    def product(self, a: Tensor, b: Tensor) -> _F32:
        """``a[heads, M, K] @ b[heads, N, K].mT``: plain chains."""
        out = np.zeros((*a.shape[:2], b.shape[1]), np.float32)
        self.chain(a, b.mT, out)
        return out

    def operand(self, weights: _F32) -> Tensor:
        """Weights, or gradients of scores, rounded for their chains."""
        if self.contract.step == "fma":
            return torch.from_numpy(weights)
        return self.rounded(weights)

    def rounded(self, results: _F32) -> Tensor:
        """``results[heads, M, N]`` in the operands' dtype."""
        flat = rounded(torch.from_numpy(results).flatten(0, 1), self.x.q.dtype)
        return flat.view(results.shape)


def _over_rows(kernel: Callable[..., None], rows: _F32, *arguments: Any) -> None:
    """Run a kernel on all rows of ``rows[heads, rows, ...]``, its first argument."""
    if rows.size:
        flat = torch.from_numpy(rows).flatten(0, 1)
        over_rows(flat.view(len(flat), -1), lambda *span: kernel(rows, *arguments, *span))


def _by_token(lse: Tensor) -> Tensor:
    """``[..., heads, queries]`` as a view in which queries come first, as in q."""
    return lse.transpose(-1, -2)


def forward(x: Attention, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and the same to base 2, which :func:`backward` takes."""
    call = _Call(x)
    if out is None:
        out = torch.empty((*x.q.shape[:-1], x.v.shape[-1]), dtype=x.q.dtype)
    out.zero_()
    lse, lse2 = (torch.full(x.lse_shape, -torch.inf, dtype=torch.float32) for _ in range(2))
    for s in _sequences(x):
        q = call.rows(x.q, s)
        heads, rows, size = x.kv_heads, q.shape[1], x.v.shape[-1]
        total, part = (_Partial(heads, rows, lanes, size) for lanes in (1, LANES))
        visible = call.visible(s)
        segment = 0

        def merge(total: _Partial = total, part: _Partial = part) -> None:
            into = total.lanes, total.o, part.n, part.lanes, part.o
            _over_rows(kernels.merge_segment, total.n, *into, call.interpolate)

        for b in _blocks(s, x.group):
            if b.start // SEGMENT != segment:
                merge()
                segment = b.start // SEGMENT
            a = call.product(q[:, b.rows], call.keys(call.k, s, b))
            n, lanes, o = (state[:, b.rows] for state in (part.n, part.lanes, part.o))
            _over_rows(kernels.forward_block, a, *call.scales, *visible(b), n, lanes, o)
            call.chain(call.operand(a), call.keys(call.v, s, b), o)
        merge()
        found = np.empty_like(total.n), np.empty_like(total.n)
        _over_rows(
            *(kernels.finish, total.n, total.lanes, total.o, call.sinks, x.group, call.interpolate, *found)
        )
        results = call.rounded(total.o), *map(torch.from_numpy, found)
        for to, values in zip((out, _by_token(lse), _by_token(lse2)), results, strict=True):
            call.grouped(to, s).copy_(values.unflatten(1, (-1, x.group)))
    return out, lse, lse2


def backward(
    x: Attention, grad: Tensor, out: Tensor, lse2: Tensor, *, grad_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, of the mask (float32, ``[batch, heads, queries, keys]``) and of the sinks."""
    call = _Call(x)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (x.q, x.k, x.v))
    dmask = _zeros(x.batch, x.heads, x.queries, x.keys) if grad_mask else None
    sink_terms = _zeros(x.lse_shape)
    scale = np.float32(x.scale)
    for s in _sequences(x):
        q, g, o, shift = (call.rows(t, s) for t in (x.q, grad, out, _by_token(lse2)))
        d = np.empty(shift.shape, np.float32)
        of_rows = shift.numpy(), d
        wide_g, wide_o = (t.to(torch.float32).numpy() for t in (g, o))
        _over_rows(kernels.dots, d, wide_g, wide_o)
        dq_rows = np.zeros(q.shape, np.float32)
        visible = call.visible(s)
        of_mask = _zeros(0, 0, 0, 0) if dmask is None else call.mask(dmask, s)
        for b in _blocks(s, x.group):
            k, v = (call.keys(t, s, b) for t in (call.k, call.v))
            p, ds = call.product(q[:, b.rows], k), call.product(g[:, b.rows], v)
            rows = (t[:, b.rows] for t in of_rows)
            into = of_mask[:, b.queries].numpy()
            _over_rows(kernels.backward_block, p, ds, *call.scales, *visible(b), *rows, into)
            call.chain(call.operand(ds), k, dq_rows[:, b.rows])
            dk_rows = _over_queries(call, s, b, ds, q) * scale
            dv_rows = _over_queries(call, s, b, p, g)
            slots = s.slots[b.start : b.stop]
            for to, values in ((dk, dk_rows), (dv, dv_rows)):
                to.view(-1, *to.shape[-2:])[slots] = call.rounded(values).transpose(0, 1)
        dq_own = call.rounded((dq_rows + np.float32(0)) * scale)
        call.grouped(dq, s).copy_(dq_own.unflatten(1, (-1, x.group)))
        if x.sinks is not None:
            terms = np.empty_like(d)
            _over_rows(kernels.sink_terms, terms, *of_rows, call.sinks, x.group, call.interpolate)
            own = torch.from_numpy(terms).unflatten(1, (-1, x.group))
            call.grouped(_by_token(sink_terms), s).copy_(own)
    dsinks = None
    if x.sinks is not None:
        dsinks = column_sum(_by_token(sink_terms).reshape(-1, x.heads), torch.float32)
    return dq, dk, dv, dmask, dsinks


def _over_queries(call: _Call, s: _Sequence, b: _Block, weights: _F32, x: Tensor) -> _F32:
    """The chain over queries of ``weights[heads, rows of the block, keys]`` and ``x[heads, rows, size]``.

    Groups of 16 begin at multiples of 16 of a query's position; every member of a group is a sequence.
    """
    before = (s.offset + b.queries.start) % GROUP

    def by_member(rows: Tensor) -> Tensor:
        """``[heads, members, queries, ...]``, from a multiple of 16 on."""
        members = rows.unflatten(1, (-1, call.x.group)).transpose(1, 2)
        return torch.nn.functional.pad(members, (0, 0, before, 0))

    out = np.zeros((len(weights), weights.shape[2], x.shape[2]), np.float32)
    call.chain(by_member(call.operand(weights)).mT, by_member(x[:, b.rows]), out)
    return out + np.float32(0)
