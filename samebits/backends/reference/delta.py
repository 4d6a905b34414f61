"""Delta rules and linear attention on CPU tensors, as ``docs/contract.md``, "Recurrent layers", has them.

Each sequence is computed alone, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends.delta import Delta
from samebits.backends.recurrent import CHUNK
from samebits.backends.reference import delta_kernels
from samebits.backends.reference.delta_rows import Chunk, Rows, Rule, blocks, dots, running, zeros
from samebits.backends.reference.matmul import require_subnormals, rounded
from samebits.backends.reference.ssd_steps import ssd_steps


def forward(x: Delta, state: Tensor | None, out: Tensor, closed: Tensor | None) -> None:
    """See :mod:`samebits.backends.delta`."""
    require_subnormals()
    x = x.computed(ssd_steps)
    rule = Rule(x)
    for n, (start, stop) in enumerate(x.bounds()):
        rows = rule.rows(start, stop)
        chunk = rule.begin(n, state)
        done = 0
        while done < rows.count:
            if chunk.count == CHUNK:
                chunk = rule.next(chunk)
            size = min(CHUNK - chunk.count, rows.count - done)
            part = rows.part(done, done + size)
            found, chunk, _ = rule.step(chunk, part)
            if x.skip is not None:
                found = found + x.skip.detach()[:, None] * part.v
            out[start + done : start + done + size] = rounded(
                found.transpose(0, 1).reshape(size, -1), out.dtype
            ).view(size, *out.shape[1:])
            done += size
        if state is not None:
            rule.store(chunk, n, state)
        if closed is not None:
            closed[n] = rounded(rule.next(chunk).matrix.flatten(1), torch.float32).view(closed.shape[1:])


def backward(
    x: Delta, state: Tensor | None, grad: Tensor, grad_closed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """See :mod:`samebits.backends.delta`."""
    require_subnormals()
    rule = _Gradients(x)
    tokens, heads, size = x.v.shape
    key_size = x.q.shape[-1]
    found = Rows(
        zeros(heads, tokens, key_size),
        zeros(heads, tokens, key_size),
        zeros(heads, tokens, size),
        None if x.g is None else zeros(heads, tokens, *x.g.shape[2:]),
        None if x.beta is None else zeros(heads, tokens),
        None if x.weights is None else zeros(heads, tokens),
    )
    initial = None if x.initial is None else zeros(x.initial.shape)
    for n, (start, stop) in enumerate(x.bounds()):
        rows = rule.rows(start, stop)
        chunk, pieces, done = rule.begin(n, state), [], 0
        while done < rows.count:  # forward again, keeping each chunk
            if chunk.count == CHUNK:
                chunk = rule.next(chunk)
            part = rows.part(done, min(done + CHUNK - chunk.count, rows.count))
            before = chunk
            _, chunk, residuals = rule.step(chunk, part)
            pieces.append((start + done, before.count, part, chunk, residuals))
            done += part.count
        of_matrix = zeros(heads, key_size, size) if grad_closed is None else grad_closed[n].to(torch.float32)
        for at, before_count, part, chunk, residuals in reversed(pieces):
            g = grad[at : at + part.count].transpose(0, 1).to(torch.float32)
            place = slice(at, at + part.count)
            of_matrix = rule.step_back(
                before_count, part, chunk, residuals, g, of_matrix, found.part(place.start, place.stop)
            )
        if initial is not None:
            initial[n] = of_matrix
    group = heads // x.q.shape[1]
    dq, dk = (_of_group(t, group) for t in (found.q, found.k))

    def finished(t: Tensor | None, dtype: torch.dtype) -> Any:
        if t is None:
            return None
        t = t.transpose(0, 1).contiguous()
        return rounded(t.reshape(1, -1), dtype).view(t.shape)

    dtype = x.q.dtype
    return (
        finished(dq, dtype),
        finished(dk, dtype),
        finished(found.v, dtype),
        finished(found.g, torch.float32),
        finished(found.beta, torch.float32),
        finished(found.weights, torch.float32),
        None if initial is None else rounded(initial.reshape(1, -1), torch.float32).view(initial.shape),
    )


def _of_group(t: Tensor, group: int) -> Tensor:
    """Sums over the heads that share a key head, in ascending order."""
    t = t.unflatten(0, (-1, group))
    total = t[:, 0]
    for i in range(1, group):
        total = total + t[:, i]
    return total


class _Gradients(Rule):
    """The steps of a call's gradients."""

    def step_back(
        self, before: int, rows: Rows, chunk: Chunk, z: Tensor, grad: Tensor, of_next: Tensor, out: Rows
    ) -> Tensor:
        """Fills `out` with the gradients of a step's rows; returns that of the matrix at the chunk's start.

        `of_next` is the gradient of the matrix after the chunk. The rows before the step's have none.
        """
        q, v, beta, z, grad = (_after(before, t) for t in (rows.q, rows.v, rows.beta, z, grad))
        decays, keys, updates, matrix = chunk.decays, chunk.keys, chunk.updates, chunk.matrix
        by_channel, count = self.x.by_channel, chunk.count
        left = self.exp2(decays[:, -1:] - decays)  # of each row, to the chunk's end
        weighted = left if chunk.weights is None else left * chunk.weights
        since = self.exp2(decays)
        i, j = torch.arange(count)[:, None], torch.arange(count)

        # Of updates: by the next matrix, by results, then by the updates of later rows.
        if by_channel:
            of_updates = self.chain(keys * left, of_next)
        else:
            of_updates = self.chain(keys, of_next) * left[..., None]
        of_updates = self.chain((self.scores(q, chunk, 0) * self.scale).mT, grad, of_updates)
        of_z = None
        if beta is not None:
            mutual, of_z = self.scores(keys, chunk, 0), torch.zeros_like(v)
            for start, stop in reversed([*blocks(0, count)]):
                block = slice(start, stop)
                if stop < count:
                    later = -mutual[:, stop:, block].mT
                    of_updates[:, block] = self.chain(later, of_z[:, stop:], of_updates[:, block])
                for row in reversed(range(start, stop)):
                    one = of_updates[:, row].contiguous()
                    self.take_out(mutual[:, :, row].contiguous(), of_z, one, stop - 1, row, -1)
                    of_updates[:, row] = one
                    of_z[:, row] = self.rounded(one * beta[:, row, None])
            assert out.beta is not None
            out.beta.copy_(dots(of_updates, z)[:, before:])
        of_values = of_updates if of_z is None else of_z
        if chunk.weights is not None:
            assert out.weights is not None
            out.weights.copy_(dots(of_updates, updates)[:, before:])
            of_values = of_updates * chunk.weights[..., None]
        if self.x.skip is not None:
            of_values = of_values + self.x.skip.detach()[:, None] * grad
        out.v.copy_(of_values[:, before:])

        # Of scores; of queries, and of keys as rows and as columns of scores.
        of_scores = torch.where(j <= i, self.chain(grad, updates.mT) * self.scale, 0.0)
        of_q = self._row_gradients(grad, since * self.scale, of_scores, chunk)
        of_rows, pairs = torch.zeros_like(of_q), [(q, of_scores)]
        if of_z is not None:
            of_mutual = torch.where(j < i, -self.chain(of_z, updates.mT), 0.0)
            of_rows = self._row_gradients(of_z, -since, of_mutual, chunk)
            pairs.append((keys, of_mutual))
        written = self.chain(updates, of_next.mT) * (left if by_channel else weighted[..., None])
        of_columns = self._column_gradients(pairs, chunk) + written
        out.q.copy_(of_q[:, before:])
        out.k.copy_((of_rows + of_columns)[:, before:])

        # Of the matrix at the chunk's start.
        kept = self.exp2(decays[:, -1:])
        by_next = of_next * (kept.mT if by_channel else kept[..., None])
        of_matrix = by_next
        for x, factor, of in ((q, since * self.scale, grad), (keys, -since, of_z)):
            if of is not None and by_channel:
                of_matrix = self.chain((x * factor).mT, of, of_matrix)
            elif of is not None:
                of_matrix = self.chain(x.mT, of * factor[..., None], of_matrix)

        # Of decays: a row's running sum scales what the row reads, and inversely what is read of it.
        if out.g is not None:
            difference = of_rows - of_columns
            if by_channel:
                sums = q * of_q + keys * difference
                of_last = running(keys * written)[:, -1] + dots(matrix, by_next)
            else:
                sums = dots(torch.cat([q, keys], 2), torch.cat([of_q, difference], 2))
                of_last = running(dots(keys, written))[:, -1] + running(dots(matrix, by_next))[:, -1]
            sums[:, -1] = sums[:, -1] + of_last
            out.g.copy_(running(sums.flip(1)).flip(1)[:, before:])
        return of_matrix

    def _seen(self, chunk: Chunk) -> Tensor:
        """What of each row is left at later ones: its decay, times its weight."""
        decays = self.decays_between(chunk)
        return decays if chunk.weights is None else decays * chunk.weights[:, None]

    def _row_gradients(self, grad: Tensor, factor: Tensor, of: Tensor, chunk: Chunk) -> Tensor:
        """Gradients of what reads the matrix and the keys of earlier rows: by results, and by scores."""
        out = self.chain(grad, chunk.matrix.mT) * (factor if self.x.by_channel else factor[..., None])
        if not self.x.by_channel:
            return self.chain(of * self._seen(chunk), chunk.keys, out)
        for start, stop in blocks(0, chunk.count):
            rows, decays = slice(start, stop), chunk.decays[:, start:stop]
            if start:
                reference = chunk.decays[:, start - 1 : start]
                keys = chunk.keys[:, :start] * self.exp2(reference - chunk.decays[:, :start])
                found = self.chain(of[:, rows, :start], keys) * self.exp2(decays - reference)
                out[:, rows] = out[:, rows] + found
            own = out[:, rows].contiguous()
            arrays = of[:, rows, rows].contiguous(), chunk.keys[:, rows], decays, decays, own
            self.over_heads(delta_kernels.own_gradients, *arrays, False, self.interpolate)
            out[:, rows] = own
        return out

    def _column_gradients(self, pairs: list[tuple[Tensor, Tensor]], chunk: Chunk) -> Tensor:
        """Gradients of keys by the scores of later rows: of these rows, and gradients of their scores."""
        out = torch.zeros_like(chunk.keys)
        if not self.x.by_channel:
            for x, of in pairs:
                out = self.chain((of * self._seen(chunk)).mT, x, out)
            return out
        for start, stop in blocks(0, chunk.count):
            rows, earlier, decays = slice(start, stop), slice(0, start), chunk.decays[:, start:stop]
            for x, of in pairs:
                if start:
                    reference = chunk.decays[:, start - 1 : start]
                    scaled = x[:, rows] * self.exp2(decays - reference)
                    found = self.chain(of[:, rows, earlier].mT, scaled)
                    found = found * self.exp2(reference - chunk.decays[:, earlier])
                    out[:, earlier] = out[:, earlier] + found
                own = out[:, rows].contiguous()
                arrays = of[:, rows, rows].contiguous(), x[:, rows].contiguous(), decays, decays, own
                self.over_heads(delta_kernels.own_gradients, *arrays, True, self.interpolate)
                out[:, rows] = own
        return out


def _after(before: int, t: Tensor | None) -> Any:
    """Rows behind so many of zeros."""
    if t is None:
        return None
    return torch.cat([t.new_zeros(t.shape[0], before, *t.shape[2:]), t], 1)
