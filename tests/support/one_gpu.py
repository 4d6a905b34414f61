"""Ranks that exchange sums on one GPU: each has memory, and a stream, of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from samebits.backends.cuda.exchange import (
    EMPTY,
    INBOXES,
    STATE,
    Memory,
    add_parts,
    add_small,
    control_bytes,
    data_bytes,
)
from samebits.distributed.exchange import finished, tree

SECOND = 1_000_000_000


class Ranks:
    """`count` ranks whose memory holds `part` elements of a part, and `inbox` elements of an inbox."""

    def __init__(self, count: int, part: int, inbox: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.control, self.data = (
            [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
            for size in (control_bytes(count, inbox), data_bytes(count, part))
        )
        for control in self.control:
            control[INBOXES:] = EMPTY
        control, data = (tuple(t.data_ptr() for t in memory) for memory in (self.control, self.data))
        self.memory = [
            Memory(self.device.index, rank, control, inbox, data, part, 20 * SECOND) for rank in range(count)
        ]
        self.streams: list[torch.cuda.Stream] = [torch.cuda.Stream() for _ in range(count)]

    def slots(self, rank: int) -> Tensor:
        """What each rank sent to `rank`, of its part."""
        return (
            self.data[rank]
            .view(torch.float32)[: len(self.data) * self.memory[0].part]
            .view(len(self.data), -1)
        )

    def run(self, launch: Callable[[Memory], None], alone: Callable[[Memory], None] | None = None) -> None:
        """Launch on every rank: side by side, or one by one, where `alone` delivers what the others send."""
        torch.cuda.synchronize()
        for memory, stream in zip(self.memory, self.streams, strict=True):
            if alone is not None:
                alone(memory)
            with nullcontext() if alone else torch.cuda.stream(stream):
                launch(memory)
        torch.cuda.synchronize()

    def sums(
        self, xs: Tensor, bias: Tensor | None, dtype: torch.dtype, way: str, alone: bool
    ) -> list[Tensor]:
        """Results of all ranks, of ``xs[ranks, M, N]``.

        Args:
            way: "at_once"; "parts"; "products", in which ranks find their partial sums written; or "scatter".
            alone: one rank after the other, for tools that do not run kernels side by side.
        """
        ranks, count = len(self.memory), xs[0].numel()
        part = -(-count // (4 * ranks)) * 4
        shape = (count // ranks,) if way == "scatter" else xs.shape[1:]
        outs = [torch.full(shape, torch.nan, dtype=dtype, device=self.device) for _ in range(ranks)]
        want = finished(tree(xs), bias, dtype).view(-1)
        given = [x.clone() for x in xs]  # which begin at 16 bytes
        flat = torch.zeros(ranks, ranks * part, device=self.device)
        flat[:, :count] = xs.view(ranks, -1)
        if way == "products":
            for owner in range(ranks):
                self.slots(owner)[:, :part] = flat[:, owner * part : (owner + 1) * part]

        def launch(memory: Memory) -> None:
            x, out = given[memory.rank], outs[memory.rank]
            if way == "at_once":
                add_small(memory, x, bias, out)
            else:
                add_parts(
                    memory, None if way == "products" else x, count, part, bias, out, whole=way != "scatter"
                )

        def deliver(memory: Memory) -> None:
            here = memory.rank
            call = 1 + int(self.control[here][STATE : STATE + 4].view(torch.int32))
            if way == "at_once":
                inbox = self.control[here][INBOXES:].view(torch.int32).view(2, ranks, -1)[call % 2]
                for other in range(ranks):
                    if other != here:
                        sent = flat[other].view(torch.int32)
                        inbox[other, : len(sent)] = sent.where(sent != -1, 0x7FFFFFFF)
                return
            self.control[here][:STATE].view(torch.int32).fill_(call)
            self.slots(here)[:, :part] = flat[:, here * part : (here + 1) * part]
            room = self.data[here][ranks * memory.part * 4 :].view(want.dtype)
            for other in range(ranks):
                results = want[other * part : (other + 1) * part]
                room[other * memory.part :][: len(results)] = results

        self.run(launch, deliver if alone else None)
        return outs
