"""The kernels that add sums of ranks: they compile, and ranks on one GPU get the bits of the tree."""

from __future__ import annotations

import itertools

import pytest
import torch

from samebits.backends.cuda import compiler, exchange
from samebits.distributed.exchange import finished, tree
from samebits.testing import assert_same_bits, values
from tests.support.cubins import resources
from tests.support.one_gpu import Ranks

WAYS = ("at_once", "parts", "products", "scatter")


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_they_compile(ranks: int, arch: str) -> None:
    at_once, parts = (spec(ranks, arch >= "sm_90") for spec in (exchange.at_once_spec, exchange.parts_spec))
    assert (at_once.source, at_once.constants) == (parts.source, parts.constants)  # compiled together
    assert resources(at_once, arch).registers < 256


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_the_bits_of_the_tree(ranks: int, alone: bool) -> None:
    of = Ranks(ranks, 1 << 15, 1 << 15)
    kinds = itertools.cycle(("normal", "cancel", "tiny", "huge", "special"))
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    for shape in ((1, 8), (13, 5), (1, 1), (3, 2), (64, 128), (31, 1000)):
        for way, biased in itertools.product(WAYS, (False, True)):
            if way == "scatter" and shape[0] * shape[1] % (4 * ranks):
                continue
            kind, dtype = next(kinds), next(dtypes)
            xs = values(kind, (ranks, *shape), torch.float32, 7, "cuda")
            bias = values("normal", (shape[1],), dtype, 8, "cuda") if biased else None
            want = finished(tree(xs), bias, dtype)
            outs = of.sums(xs, bias, dtype, way, alone)
            parts = want.view(-1).chunk(ranks) if way == "scatter" else [want] * ranks
            for rank, (out, expected) in enumerate(zip(outs, parts, strict=True)):
                assert_same_bits(out, expected, f"{way} {shape} {kind} {dtype} rank {rank}")


@pytest.mark.gpu
def test_many_calls_overwrite_nothing_too_early() -> None:
    of = Ranks(2, 1 << 17, 1 << 17)
    x = values("normal", (2, 20, 1 << 18), torch.float32, 9, "cuda")
    outs = torch.full((2, 20, 1 << 18), torch.nan, device="cuda")
    sizes = [4 << (5 * i) % 17 for i in range(20)]

    def launch(memory: exchange.Memory) -> None:
        for i, size in enumerate(sizes):
            mine, out = x[memory.rank, i, :size], outs[memory.rank, i, :size]
            if i % 3:
                exchange.add_small(memory, mine[: 1 << 17], None, out[: 1 << 17])
            else:
                exchange.add_parts(memory, mine, size, -(-size // 8) * 4, None, out)

    # Both are loaded before one waits for the other rank: loading may wait for what runs on the GPU.
    first = x[:, 0], outs[:, 0]
    of.run(lambda m: exchange.add_parts(m, first[0][m.rank, :32], 32, 16, None, first[1][m.rank, :32]))
    of.run(lambda m: exchange.add_small(m, first[0][m.rank, :32], None, first[1][m.rank, :32]))
    for _ in range(20):
        outs.fill_(torch.nan)
        of.run(launch)
        for i, size in enumerate(sizes):
            some = min(size, 1 << 17) if i % 3 else size
            assert_same_bits(outs[0, i, :some], tree(x[:, i, :some]))
            assert_same_bits(outs[1, i, :some], tree(x[:, i, :some]))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sum_with_the_bits_of_an_empty_inbox(ranks: int) -> None:
    of, xs = Ranks(ranks, 64, 64), torch.ones(ranks, 7, 9, device="cuda")
    xs.view(torch.int32)[:, ::2, ::3] = -1
    for out in of.sums(xs, None, torch.float32, "at_once", alone=False):
        assert_same_bits(out, finished(tree(xs), None, torch.float32))
