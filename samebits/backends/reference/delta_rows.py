"""The steps of delta rules and linear attention on CPU tensors: rows, chunk by chunk, of a sequence.

Heads lie side by side: ``[heads, rows, size]``, float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.backends.delta import BLOCK, Delta, layout
from samebits.backends.recurrent import RecurrentState
from samebits.backends.reference import attention_kernels, delta_kernels
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import carry_on
from samebits.contract import FMA, INTERPOLATION, contract_from_key
from samebits.functions import CONSTANTS

_LOG2E = CONSTANTS["LOG2E"]
zeros = functools.partial(torch.zeros, dtype=torch.float32)


@dataclass
class Rows:
    """Rows of all heads, ``[heads, rows, ...]``, float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    weights: Tensor | None

    @property
    def count(self) -> int:
        return self.q.shape[1]

    def part(self, start: int, stop: int) -> Rows:
        given = (self.q, self.k, self.v, self.g, self.beta, self.weights)
        return Rows(*(None if t is None else t[:, start:stop] for t in given))  # type: ignore[arg-type]


@dataclass
class Chunk:
    """A chunk's state at its start, and its rows so far. Keys and updates have been rounded to the dtype."""

    matrix: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    weights: Tensor | None

    @property
    def count(self) -> int:
        return self.keys.shape[1]


class Rule:
    """The steps of one call."""

    def __init__(self, x: Delta) -> None:
        self.x, self.dtype, self.scale = x, x.q.dtype, x.scale
        model = contract_from_key(x.contract).exp2
        assert model is not None
        self.interpolate = model == INTERPOLATION
        self.heads, self.size = x.v.shape[1:]
        self.key_heads, self.key_size = x.q.shape[1:]
        weighted = x.weights is not None
        sizes = (self.heads, self.key_size, self.size)
        self.layout = layout("delta", *sizes, self.dtype, x.by_channel, weighted)

    # ---- sums

    def chain(self, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
        """``start + a[heads, m, k] @ b[heads, k, n]``, of operands rounded to the dtype."""
        return chain(a.to(self.dtype), b.to(self.dtype), start, self.x.contract)

    def exp2(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        flat, found = x.view(-1).numpy(), out.view(-1).numpy()
        attention_kernels.exp2(flat, found, self.interpolate, 0, len(flat))
        return out

    def rounded(self, x: Tensor) -> Tensor:
        """Rounded to the dtype, in float32."""
        return x.to(self.dtype).to(torch.float32)

    # ---- a sequence

    def rows(self, start: int, stop: int) -> Rows:
        x, group = self.x, self.heads // self.key_heads

        def wide(t: Tensor | None) -> Any:
            return (
                None if t is None else t[start:stop].detach().to(torch.float32).transpose(0, 1).contiguous()
            )

        q, k = (wide(t).repeat_interleave(group, 0) for t in (x.q, x.k))
        g = wide(x.g)
        g = None if g is None else g * _LOG2E
        return Rows(q, k, wide(x.v), g, wide(x.beta), wide(x.weights))

    def begin(self, n: int, state: Tensor | None) -> Chunk:
        """The chunk that sequence `n` goes on with."""
        if state is None:
            matrix = zeros(self.heads, self.key_size, self.size)
            if self.x.initial is not None:
                matrix = self.x.initial[n].detach().to(torch.float32)
            return self._empty(matrix)
        view = RecurrentState(self.layout, state[n : n + 1])
        count, p = int(view.count), {name: t[0].clone() for name, t in view.parts.items()}
        keys, updates = p["keys"][:, :count], p["updates"][:, :count]
        decays, weights = p["decays"][:, :count], p["weights"][:, :count] if "weights" in p else None
        return Chunk(p["matrix"], keys.to(torch.float32), updates.to(torch.float32), decays, weights)

    def _empty(self, matrix: Tensor) -> Chunk:
        channels = (self.key_size,) if self.x.by_channel else ()
        return Chunk(
            matrix,
            zeros(self.heads, 0, self.key_size),
            zeros(self.heads, 0, self.size),
            zeros(self.heads, 0, *channels),
            None if self.x.weights is None else zeros(self.heads, 0),
        )

    def store(self, chunk: Chunk, n: int, state: Tensor) -> None:
        view = RecurrentState(self.layout, state[n : n + 1])
        view.count.fill_(chunk.count)
        parts, count = view.parts, chunk.count
        parts["matrix"][0] = chunk.matrix
        parts["keys"][0, :, :count] = chunk.keys
        parts["updates"][0, :, :count] = chunk.updates
        parts["decays"][0, :, :count] = chunk.decays
        if chunk.weights is not None:
            parts["weights"][0, :, :count] = chunk.weights

    # ---- forward

    def next(self, chunk: Chunk) -> Chunk:
        """The chunk after this one, which is closed."""
        if chunk.count == 0:
            return chunk
        last = chunk.decays[:, -1:]
        left = self.exp2(last - chunk.decays)
        if chunk.weights is not None:
            left = left * chunk.weights
        keys, updates = chunk.keys, chunk.updates
        if self.x.by_channel:
            keys = keys * left
            kept = self.exp2(last).mT
        else:
            updates = updates * left[..., None]
            kept = self.exp2(last)[..., None]
        return self._empty(self.chain(keys.mT, updates, chunk.matrix * kept))

    def step(self, chunk: Chunk, rows: Rows) -> tuple[Tensor, Chunk, Tensor]:
        """Results of further rows of a chunk, the chunk with them, and their residuals z."""
        before, count = chunk.count, chunk.count + rows.count
        decays, weights = self._decays(chunk, rows), None
        if rows.weights is not None:
            assert chunk.weights is not None
            weights = torch.cat([chunk.weights, rows.weights], 1)
        chunk = Chunk(chunk.matrix, torch.cat([chunk.keys, rows.k], 1), chunk.updates, decays, weights)
        if rows.beta is None:
            z = rows.v
            updates = torch.cat([chunk.updates, rows.v], 1)
        else:
            scores = self.scores(rows.k, chunk, before)
            z = rows.v - self._read(rows.k, chunk, before)
            updates = torch.cat([chunk.updates, zeros(rows.v.shape)], 1)
            for start, stop in blocks(before, count):
                block = slice(start - before, stop - before)
                lower = start // BLOCK * BLOCK
                if lower:
                    earlier = -scores[:, block, :lower]
                    z[:, block] = self.chain(earlier, updates[:, :lower], z[:, block])
                for i in range(start, stop):
                    row = z[:, i - before].contiguous()
                    self.take_out(scores[:, i - before], updates, row, lower, i, 1)
                    z[:, i - before] = row
                    updates[:, i] = self.rounded(row * rows.beta[:, i - before, None])
        chunk.updates = updates
        scores = self.scores(rows.q, chunk, before)
        if weights is not None:  # those of later rows may be anything
            scores = (scores * weights[:, None]).tril(before)
        out = self._read(rows.q, chunk, before)
        return (self.chain(scores, updates, out) + 0.0) * self.scale, chunk, z

    def _decays(self, chunk: Chunk, rows: Rows) -> Tensor:
        """Running sums of the chunk's decays."""
        if rows.g is None:
            return zeros(self.heads, chunk.count + rows.count)
        sums = [chunk.decays]
        total = chunk.decays[:, -1:] if chunk.count else torch.zeros_like(rows.g[:, :1])
        for i in range(rows.count):
            total = total + rows.g[:, i : i + 1]
            sums.append(total)
        return torch.cat(sums, 1)

    def _read(self, x: Tensor, chunk: Chunk, before: int) -> Tensor:
        """What rows from `before` on read of the state at the chunk's start."""
        decays = self.exp2(chunk.decays[:, before:])
        if self.x.by_channel:
            return self.chain(x * decays, chunk.matrix)
        return self.chain(x, chunk.matrix) * decays[..., None]

    def scores(self, x: Tensor, chunk: Chunk, before: int) -> Tensor:
        """Products of rows from `before` on with the chunk's keys, times decays; 0 for keys of later rows."""
        count = chunk.count
        out = zeros(self.heads, count - before, count)
        if not self.x.by_channel:
            shown = torch.ones(count, count, dtype=torch.bool).tril()[before:]
            return torch.where(shown, self.chain(x, chunk.keys.mT) * self.decays_between(chunk, before), out)
        for start, stop in blocks(before, count):
            rows, lower = slice(start - before, stop - before), start // BLOCK * BLOCK
            decays = chunk.decays[:, start:stop]
            if lower:
                reference = chunk.decays[:, lower - 1 : lower]
                scaled = x[:, rows] * self.exp2(decays - reference)
                keys = chunk.keys[:, :lower] * self.exp2(reference - chunk.decays[:, :lower])
                out[:, rows, :lower] = self.chain(scaled, keys.mT)
            own = zeros(self.heads, stop - start, stop - lower)
            arrays = x[:, rows], chunk.keys[:, lower:stop], decays, chunk.decays[:, lower:stop], own
            self.over_heads(delta_kernels.own_scores, *arrays, start - lower, self.interpolate)
            out[:, rows, lower:stop] = own
        return out

    def decays_between(self, chunk: Chunk, before: int = 0) -> Tensor:
        """Decays from the keys' rows to those from `before` on."""
        difference = chunk.decays[:, before:, None] - chunk.decays[:, None]
        return self.exp2(difference.tril(before))

    def take_out(self, weights: Tensor, rows: Tensor, x: Tensor, start: int, stop: int, step: int) -> None:
        if start != stop:
            self.over_heads(delta_kernels.take_out, weights, rows, x, start, stop, step)

    def over_heads(self, run: Callable[..., None], *given: Any) -> None:
        arrays = [t.numpy() if isinstance(t, Tensor) else t for t in given]
        over_rows(given[0], lambda *span: run(*arrays, *span))


def chain(a: Tensor, b: Tensor, start: Tensor | None, contract: str) -> Tensor:
    (heads, m, k), n = a.shape, b.shape[-1]
    out = zeros(heads, m, n) if start is None else start.contiguous().clone()
    carry_on(a[:, None], b[:, None], out.numpy(), np.array([[0, 0, k]]), contract, closing_zero=False)
    return out


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Chains of fused multiply-adds over the last dimension."""
    rows = a.reshape(-1, 1, a.shape[-1]), b.reshape(-1, b.shape[-1], 1)
    return chain(*rows, None, FMA.key).reshape(a.shape[:-1])


def running(x: Tensor) -> Tensor:
    """Running sums over the second dimension, ascending."""
    total, found = None, []
    for row in x.unbind(1):
        total = row if total is None else total + row
        found.append(total)
    return torch.stack(found, 1)


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows from `start` to `stop`, cut at multiples of a block."""
    while start < stop:
        end = min((start // BLOCK + 1) * BLOCK, stop)
        yield start, end
        start = end
