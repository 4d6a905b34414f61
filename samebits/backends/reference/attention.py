"""Attention on CPU tensors: the chains of `matmul`, and `attention_kernels` for what lies between them.

It goes over the blocks of a sequence's keys. To a block come only the queries with a key of it in their
window. What is left out changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.backends.attention import BLOCK, LANES, SEGMENT, Attention
from samebits.backends.reference import attention_kernels as kernels
from samebits.backends.reference.attention_sequences import TOGETHER, Sequence, parts, places, sequences
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import carry_on, require_subnormals, rounded
from samebits.backends.reference.rows import column_sum
from samebits.contract import GROUP, INTERPOLATION, contract_from_key
from samebits.functions import CONSTANTS

_F32 = npt.NDArray[np.float32]

_zeros = partial(torch.zeros, dtype=torch.float32)  # whatever the default dtype is


@dataclass(frozen=True)
class _Block:
    """Keys ``start <= j < stop`` of a sequence, and the queries, as rows too, with one in their window."""

    start: int
    stop: int
    queries: slice
    rows: slice


def _blocks(s: Sequence, group: int) -> Iterator[_Block]:
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

    def grouped(self, t: Tensor, s: Sequence) -> Tensor:
        """``t[batch, queries, heads, ...]`` of a sequence as a view ``[kv heads, queries, group, ...]``."""
        own = t[s.queries] if self.x.packed else t[s.row, s.queries]
        return own.view(len(own), self.x.kv_heads, self.x.group, *own.shape[2:]).transpose(0, 1)

    def rows(self, t: Tensor, s: Sequence) -> Tensor:
        """The same with queries and group as one dimension, the rows."""
        return self.grouped(t.detach(), s).flatten(1, 2)

    def keys(self, t: Tensor, s: Sequence, b: _Block) -> Tensor:
        """The keys or values ``t[slots, kv heads, size]`` of a block as ``[kv heads, keys, size]``."""
        return t[s.slots[b.start : b.stop]].transpose(0, 1)

    def biases(self, s: Sequence) -> Tensor:
        """A float mask of a sequence as ``[kv heads, queries, group, keys]``; else empty."""
        if self.x.mask is None or self.x.mask.dtype == torch.bool:
            return _zeros(0, 0, 0, 0)
        own = self.x.mask.detach()[s.row, :, s.queries][..., s.columns].to(torch.float32)
        return own.view(self.x.kv_heads, self.x.group, *own.shape[1:]).transpose(1, 2)

    def visible(self, s: Sequence) -> Callable[[_Block], tuple[Any, ...]]:
        """For a block of a sequence, the arguments that tell kernels which keys queries see."""
        hides = torch.empty(0, 0, 0, 0, dtype=torch.bool) if s.shown is None else s.shown
        adds = self.biases(s)

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

    def add_up(self, weights: _F32, x: Tensor, out: _F32) -> None:
        """Carry ``out[heads, rows, N]`` on by weights and ``x[heads, K, N]``, or ``x[heads, rows, K, N]``."""
        a = self.operand(weights)
        if x.ndim == 4:
            a, x, out = a.flatten(0, 1)[:, None], x.flatten(0, 1), out.reshape(-1, 1, out.shape[2])
        self.chain(a, x, out)

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
    for s in itertools.chain.from_iterable(map(parts, sequences(x))):
        q = call.rows(x.q, s)
        heads, rows, size = x.kv_heads, q.shape[1], x.v.shape[-1]
        total, part = (_Partial(heads, rows, lanes, size) for lanes in (1, LANES))
        segment = 0
        for start, of_rows, a, visible, values in _scores(call, s, q):
            if start // SEGMENT != segment:
                _merge(call, total, part)
                segment = start // SEGMENT
            n, lanes, o = (state[:, of_rows] for state in (part.n, part.lanes, part.o))
            _over_rows(kernels.forward_block, a, *call.scales, *visible, n, lanes, o)
            call.add_up(a, values, o)
        _merge(call, total, part)
        found = np.empty_like(total.n), np.empty_like(total.n)
        _over_rows(
            *(kernels.finish, total.n, total.lanes, total.o, call.sinks, x.group, call.interpolate, *found)
        )
        results = call.rounded(total.o), *map(torch.from_numpy, found)
        for to, values in zip((out, _by_token(lse), _by_token(lse2)), results, strict=True):
            call.grouped(to, s).copy_(values.unflatten(1, (-1, x.group)))
    return out, lse, lse2


def _merge(call: _Call, total: _Partial, part: _Partial) -> None:
    into = total.lanes, total.o, part.n, part.lanes, part.o
    _over_rows(kernels.merge_segment, total.n, *into, call.interpolate)


def _scores(
    call: _Call, s: Sequence, q: Tensor
) -> Iterator[tuple[int, slice, _F32, tuple[Any, ...], Tensor]]:
    """Blocks of keys: the position of the first, rows, accumulators, who sees whom, and values."""
    if s.together:
        visible = call.visible(s)
        for b in _blocks(s, call.x.group):
            a = call.product(q[:, b.rows], call.keys(call.k, s, b))
            yield b.start, b.rows, a, visible(b), call.keys(call.v, s, b)
        return
    ranked = _Ranked.of(call, s)
    whole = torch.from_numpy(call.product(q, call.k[s.slots].transpose(0, 1)))
    for start in range(0, ranked.keys.shape[2], BLOCK):
        own = whole.gather(2, ranked.keys[..., start : start + BLOCK]).numpy()
        yield start, slice(None), own, ranked.visible(call, start), ranked.of_rows(call.v, s, start)


@dataclass(frozen=True)
class _Ranked:
    """The keys that each row of a sequence shows, in order. Arrays are ``[kv heads, rows, rank]``.

    Attributes:
        keys: indices among the sequence's; any where there are no more.
        exist: whether there is one.
        seen: whether it is in the row's window, too.
        biases: what a float mask adds; empty without one.
    """

    keys: Tensor
    exist: Tensor
    seen: Tensor
    biases: Tensor

    @classmethod
    def of(cls, call: _Call, s: Sequence) -> _Ranked:
        assert s.shown is not None
        shown = s.shown.flatten(1, 2)
        counts = shown.sum(-1, keepdim=True)
        most = int(counts.max())
        keys = shown.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        first, last = (
            torch.from_numpy(t).repeat_interleave(call.x.group)[:, None] for t in (s.first_seen, s.last_seen)
        )
        exist = torch.arange(most) < counts
        biases = call.biases(s)
        if biases.numel():
            biases = biases.flatten(1, 2).gather(2, keys)
        return cls(keys, exist, exist & (keys >= first) & (keys < last), biases)

    def visible(self, call: _Call, start: int) -> tuple[Any, ...]:
        """The arguments of kernels for a block, as :meth:`_Call.visible` has them."""
        everywhere = np.zeros(self.keys.shape[1] // call.x.group, np.int64)
        hides, adds = (
            t.unflatten(1, (-1, call.x.group))[..., start : start + BLOCK]
            if t.numel()
            else _zeros(0, 0, 0, 0)
            for t in (self.seen, self.biases)
        )
        return 0, everywhere, everywhere + BLOCK, call.x.group, hides.numpy(), adds.numpy()

    def of_rows(self, t: Tensor, s: Sequence, start: int) -> Tensor:
        """The keys or values ``t[slots, kv heads, size]`` of a block as ``[kv heads, rows, rank, size]``."""
        keys, exist = (x[..., start : start + BLOCK] for x in (self.keys, self.exist))
        own = t[s.slots[keys], torch.arange(len(keys))[:, None, None]]
        return own.masked_fill_(~exist[..., None], 0)


def backward(
    x: Attention, grad: Tensor, out: Tensor, lse2: Tensor, *, grad_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, of the mask (float32, ``[batch, heads, queries, keys]``) and of the sinks."""
    call = _Call(x)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (x.q, x.k, x.v))
    dmask = _zeros(x.batch, x.heads, x.queries, x.keys) if grad_mask else None
    sink_terms = _zeros(x.lse_shape)
    scale = np.float32(x.scale)
    for s in sequences(x):
        q, g, o, shift = (call.rows(t, s) for t in (x.q, grad, out, _by_token(lse2)))
        d = np.empty(shift.shape, np.float32)
        of_rows = shift.numpy(), d
        wide_g, wide_o = (t.to(torch.float32).numpy() for t in (g, o))
        _over_rows(kernels.dots, d, wide_g, wide_o)
        dq_rows = np.zeros(q.shape, np.float32)
        visible = call.visible(s)
        of_mask = _zeros(*(s.shown.shape if grad_mask and s.shown is not None else (0, 0, 0, 0)))
        apart = None if s.together else _zeros(*q.shape[:2], len(s.slots))
        order = places(x, s)
        for b in _blocks(s, x.group):
            k, v = (call.keys(t, s, b) for t in (call.k, call.v))
            p, ds = call.product(q[:, b.rows], k), call.product(g[:, b.rows], v)
            rows = (t[:, b.rows] for t in of_rows)
            into = of_mask[:, b.queries].numpy()
            _over_rows(kernels.backward_block, p, ds, *call.scales, *visible(b), *rows, into)
            if apart is None:
                call.add_up(ds, k, dq_rows[:, b.rows])
            else:
                apart[:, b.rows, b.start : b.stop] = torch.from_numpy(ds)
            dk_rows = _over_queries(call, order, b, ds, q) * scale
            dv_rows = _over_queries(call, order, b, p, g)
            slots = s.slots[b.start : b.stop]
            for to, values in ((dk, dk_rows), (dv, dv_rows)):
                to.view(-1, *to.shape[-2:])[slots] = call.rounded(values).transpose(0, 1)
        if apart is not None and len(s.slots):
            _over_ranks(call, s, apart, dq_rows)
        if dmask is not None:
            dmask[s.row, :, :, s.columns] = of_mask.transpose(1, 2).flatten(0, 1)
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


def _over_ranks(call: _Call, s: Sequence, ds: Tensor, out: _F32) -> None:
    """The chain over each row's own keys of ``ds[heads, rows, keys]`` and k."""
    ranked = _Ranked.of(call, s)
    for row in range(0, ds.shape[1], TOGETHER):
        rows = slice(row, row + TOGETHER)
        some = replace(ranked, keys=ranked.keys[:, rows], exist=ranked.exist[:, rows])
        to = np.ascontiguousarray(out[:, rows])
        for start in range(0, some.keys.shape[2], BLOCK):
            block = slice(start, start + BLOCK)
            own = ds[:, rows].gather(2, some.keys[..., block]).masked_fill_(~some.exist[..., block], 0)
            call.add_up(own.numpy(), some.of_rows(call.k, s, start), to)
        out[:, rows] = to


def _over_queries(call: _Call, order: Tensor, b: _Block, weights: _F32, x: Tensor) -> _F32:
    """The chain over queries of ``weights[heads, rows of the block, keys]`` and ``x[heads, rows, size]``.

    Every member of a group is a sequence.
    """
    order = torch.where(order < b.queries.stop, order - b.queries.start, -1)
    used = torch.nn.functional.pad(order, (0, -order.shape[2] % GROUP), value=-1)
    used = used.unflatten(2, (-1, GROUP))
    used = used[:, :, (used >= 0).any(3).any(1).any(0)].flatten(2)  # other groups change nothing

    def by_member(rows: Tensor) -> Tensor:
        """``[heads, members, places, ...]``."""
        members = torch.arange(call.x.group)[:, None]
        at = (used.clamp(0) * call.x.group + members).flatten(1)[..., None]
        own: Tensor = rows.gather(1, at.expand(-1, -1, rows.shape[2])).unflatten(1, used.shape[1:])
        return own.masked_fill_((used < 0)[..., None], 0)

    out = np.zeros((len(weights), weights.shape[2], x.shape[2]), np.float32)
    call.chain(by_member(call.operand(weights)).mT, by_member(x[:, b.rows]), out)
    return out + np.float32(0)
