"""Rows in slots, by ``kernels/slots.cu``: what it is asked for, and what it does on a GPU."""

from __future__ import annotations

import copy
import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from samebits.backends import replay
from samebits.backends.cuda import compiler, rows, slots
from samebits.backends.reference import rows as reference
from samebits.ops import experts, reduce
from samebits.ops._rows import rounded
from samebits.testing import assert_same_bits, values
from tests.support import host_kernels
from tests.support.cubins import resources
from tests.support.fake_gpu import INFO, FakeGpu, fake_gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
on_dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)

# Where x[rows, n] lies.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "gaps of 16 bytes": lambda x: torch.cat([x, x.new_full((len(x), 8), torch.nan)], 1)[:, : x.shape[1]],
    "any alignment": lambda x: torch.cat([x.new_full((len(x), 3), torch.nan), x], 1)[:, 3:],
    "turned": lambda x: x.mT.contiguous().mT,
    "one row many times": lambda x: x[:1].expand_as(x),
}
SIZES = [(1, 1, 1), (1, 3, 8), (5, 2, 64), (7, 8, 72), (3, 16, 2049), (40, 4, 2048), (6, 5, 37), (2, 17, 24)]
SIZES += [(300, 2, 8)]
"""Tokens, slots and n."""


class Routing(NamedTuple):
    order: Tensor
    places: Tensor
    slots: int


def chosen(tokens: int, count: int, most: int = 5) -> Tensor:
    return torch.randint(most, (tokens, count), generator=torch.Generator().manual_seed(tokens))


def routing(tokens: int, count: int, device: str = "cpu") -> Routing:
    order = chosen(tokens, count).reshape(-1).sort(stable=True)[1]
    return Routing(order.to(device), order.argsort().to(device), count)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as found:
        yield found


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@on_dtypes
def test_the_kernels_compile(arch: str, dtype: torch.dtype) -> None:
    """And keep the rows of a sum in registers."""
    vector = 16 // dtype.itemsize
    specs = [slots.kernel_spec("take_slots", dtype, vector, 1, dtype)]
    for n, terms, weights in ((vector, 16, dtype), (vector, 3, None), (1, 8, F32), (vector, 8, F32)):
        specs.append(slots.kernel_spec("sum_slots", dtype, n, terms, weights))
    if dtype == F32:
        specs.append(slots.kernel_spec("route", F32, 1, 1, None))
    assert {resources(spec, arch).local_bytes for spec in specs} == {0}


def memory(at: int, count: int, dtype: torch.dtype) -> Tensor:
    raw = (ctypes.c_byte * (count * dtype.itemsize)).from_address(at)
    return torch.frombuffer(raw, dtype=dtype)


def as_routed(entry: str, config: bytes, params: bytes) -> None:
    sorts = entry != "route"  # else they are sorted already
    members = struct.unpack("@PPPPPPPqqqqq" if sorts else "@PPPPPqqq", params)
    at, (count, groups, each) = members[: 7 if sorts else 5], members[7 if sorts else 5 :][:3]
    (blocks,) = struct.unpack_from("@I", config)
    if entry == "route":
        assert 256 * (blocks - 1) <= count < 256 * blocks
    elif entry == "sort_slots":
        assert blocks == 1
    else:
        span, warps = members[10:]
        assert span * (blocks - 1) < count <= span * blocks
        assert blocks <= 128
        assert span % (32 * warps) == 0
        assert at[6] != 0
        if entry == "count_slots":
            return
    *made, places, ends, sequences = at[1:6] if sorts else at
    memory(ends, groups, torch.int32).fill_(0)
    if count == 0:
        return
    found = reference.route(memory(at[0], count, torch.int64), groups, each)
    if not sorts:
        found = *(memory(at, count, torch.int64).clone() for at in made), *found[2:]
        found[2][found[1]] = torch.arange(count)
    for to, result in zip((*made, places), found[:3], strict=True):
        memory(to, count, torch.int64).copy_(result)
    memory(ends, groups, torch.int32).copy_(found[3])
    assert (each > 0) == (sequences != 0)
    if each:
        memory(sequences, count, torch.int32).copy_((found[1] // each).to(torch.int32))


def as_launched(gpu: FakeGpu) -> None:
    """Compute what the launches ask for, row by row, with numbers that the reference adds."""
    for (_, entry, config, params), spec in zip(gpu.log, gpu.specs, strict=True):
        if entry in ("route", "sort_slots", "count_slots", "place_slots"):
            as_routed(entry, config, params)
            continue
        x, weights, numbers, out, tokens, n, outer, inner, of_token = struct.unpack_from("@PPPPqqqqq", params)
        names = dict(spec.constants)
        dtype = {"F32": F32, "BF16": BF16, "F16": F16}[str(names["TYPE"])]
        vector, terms, weighted = (int(names[name]) for name in ("VECTOR", "SLOTS", "WEIGHTED"))
        takes = entry == "take_slots"
        of = {"F32": F32, "BF16": BF16, "F16": F16}[str(names["WEIGHT"])]
        blocks, pieces, _ = struct.unpack_from("@3I", config)
        assert terms == (1 if takes else of_token)
        if takes:
            lanes, streams = struct.unpack_from("@qq", params, 72)
            of_block = 256 >> lanes
            assert of_block * (blocks - 1) < tokens <= of_block * blocks
            assert (pieces - 1 << lanes) * vector < n
            assert streams == (tokens * of_token * n * dtype.itemsize > INFO.l2_bytes)
        else:
            assert len(params) == 72
            assert pieces == 1
            assert 256 * (blocks - 1) < tokens * n // vector <= 256 * blocks
        assert n % vector == inner % vector == outer % vector == 0
        assert (x | out) % (vector * dtype.itemsize) == 0
        assert weighted == (weights != 0)

        def row(at: int, number: int, n: int = n, dtype: torch.dtype = dtype) -> Tensor:
            return memory(at + number * dtype.itemsize, n, dtype)

        given: Any = (ctypes.c_int64 * (tokens * of_token)).from_address(numbers) if numbers else None
        for i in range(tokens * of_token if takes else tokens):
            if takes:
                parts, scales, to = [row(x, i // of_token * inner)], [i], given[i]
            else:
                scales, to = [i * terms + j for j in range(terms)], i
                parts = [
                    row(x, given[slot] * inner if numbers else i * outer + j * inner)
                    for j, slot in enumerate(scales)
                ]
            if weighted:
                wide = [
                    part.float() * row(weights, s, 1, of).float()
                    for part, s in zip(parts, scales, strict=True)
                ]
                parts = [rounded(product, of) for product in wide]
            stack = torch.stack(parts)[None]
            row(out, to * n, n, of).copy_(stack[0, 0] if takes else reference.slot_sum(stack)[0])


def asked(layout: str, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[Any, ...]]:
    """For every size and kind of values: tokens, rows of slots, weights and routing."""
    kinds = itertools.cycle(("normal", "wide", "special"))
    for tokens, count, n in SIZES:
        to, place = routing(tokens, count, device), LAYOUTS[layout]
        x, y = (values(next(kinds), (size, n), dtype, size).to(device) for size in (tokens, tokens * count))
        weights = values("normal", (count, tokens), dtype, 3).to(device).mT
        yield place(x), place(y), weights, to


def taken(x: Tensor, order: Tensor, count: int, weights: Tensor | None) -> Tensor:
    """The rows of slots in the order of experts, looked up one by one."""
    found = x[order // count]
    return (
        found if weights is None else rounded(found.float() * weights.reshape(-1, 1)[order].float(), x.dtype)
    )


def check(layout: str, dtype: torch.dtype, device: str, done: Callable[[], None]) -> None:
    for x, y, given, to in asked(layout, dtype, device):
        places, count = to.places, to.slots
        for weights in (None, given):
            on_cpu = None if weights is None else weights.cpu()
            got = rows.take_slots(x, places, count, weights)
            done()
            want = taken(x.cpu(), to.order.cpu(), count, on_cpu)
            assert_same_bits(want, reference.take_slots(x.cpu(), places.cpu(), count, on_cpu))
            assert_same_bits(got, want.to(device))
            for of in (dtype, F32) if count <= slots.MOST else ():
                wide = None if weights is None else weights.to(of)
                got = rows.combine_slots(y, places, count, wide)
                done()
                want = reference.combine_slots(
                    y.cpu(), places.cpu(), count, None if wide is None else wide.cpu()
                )
                assert_same_bits(got, want.to(device))
        if count <= slots.MOST:
            some = y.unflatten(0, (-1, count))
            for part in (some, some.expand(3, *some.shape[1:]) if len(some) == 1 else some[::2]):
                got = rows.slot_sum(part)
                done()
                assert_same_bits(got, reference.slot_sum(part.cpu()).to(device))


@on_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_launch_asks_for_the_rows(gpu: FakeGpu, layout: str, dtype: torch.dtype) -> None:
    def done() -> None:
        as_launched(gpu)
        gpu.start()

    with gpu.keeps_copies():
        check(layout, dtype, "cpu", done)


@host_kernels.needs_compiler
@on_dtypes
def test_rows_on_a_cpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    host_kernels.use(monkeypatch, slots)
    check("whole", dtype, "cpu", lambda: None)


@pytest.mark.gpu
@on_dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_on_a_gpu(layout: str, dtype: torch.dtype) -> None:
    check(layout, dtype, "cuda", torch.cuda.synchronize)


@pytest.mark.gpu
@on_dtypes
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 17, 33])
def test_sums_of_slots_on_a_gpu_have_the_bits_of_a_row(count: int, dtype: torch.dtype) -> None:
    """Without a GPU nothing runs the kernel's sum by halves; ``samebits verify`` does on all."""
    for kind in ("normal", "wide", "special", "sparse"):
        x = values(kind, (6, count, 10), dtype, count)
        assert_same_bits(reduce.sum(x.cuda(), 1), reduce.sum(x, 1).cuda())
        to, flat = routing(6, count, "cuda"), x.flatten(0, 1)
        for weights in (None, values(kind, (6, count), dtype, 1)):
            given = None if weights is None else weights.cuda()
            got = experts._combine(flat.cuda(), given, to.order, to.places, count)
            assert_same_bits(got, reference.combine_slots(flat, to.places.cpu(), count, weights).cuda())


# Tokens, slots of each, experts that are chosen among, and rows of the batch. Of the experts 5 are here.
# One block sorts up to 2,048 slots.
ROUTES = [(6, 4, 5, 1), (6, 4, 5, 3), (0, 2, 5, 1), (300, 3, 8, 2), (7, 1, 1, 1), (512, 1, 5, 4)]
ROUTES += [(2049, 1, 5, 1), (700, 3, 8, 2), (512, 8, 5, 4), (9000, 8, 8, 3)]


def check_route(
    tokens: int, count: int, most: int, batch: int, device: str, done: Callable[[], None], here: int = 5
) -> None:
    given, each = chosen(tokens, count, most), count * (tokens // batch) if batch > 1 else 0
    if most > 5:
        given[::3] -= 3  # below 0 they count as the first expert's
    flat = given.reshape(-1)
    got = rows.route(flat.to(device), here, each)
    done()
    for one, want in zip(got, reference.route(flat, here, each), strict=True):
        assert one.dtype == want.dtype
        assert torch.equal(one.cpu(), want)


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_launch_asks_for_the_routes(gpu: FakeGpu, route: tuple[int, int, int, int]) -> None:
    check_route(*route, "cpu", lambda: as_launched(gpu))
    few = route[0] * route[1] <= 2048
    assert [launch[1] for launch in gpu.log] == (["sort_slots"] if few else ["count_slots", "place_slots"])


def test_pytorch_sorts_by_more_experts(gpu: FakeGpu) -> None:
    check_route(300, 8, 2000, 2, "cpu", lambda: as_launched(gpu), here=1024)
    assert [launch[1] for launch in gpu.log] == ["route"]


@pytest.mark.gpu
@pytest.mark.parametrize("route", [*ROUTES, (8191, 8, 7, 1)], ids=str)
def test_routes_on_a_gpu(route: tuple[int, int, int, int]) -> None:
    for here in (5, 1023, 1024):
        check_route(*route, "cuda", torch.cuda.synchronize, here)


def test_how_tokens_are_shared() -> None:
    """Blocks of tokens, blocks of a token, and the power of two of its threads."""
    assert slots._shape(1, 1) == (1, 1, 0)
    assert slots._shape(8, 256) == (8, 1, 8)
    assert slots._shape(8192, 256) == (4096, 1, 7)
    assert slots._shape(8192, 896) == (8192, 2, 8)
    assert slots._shape(1, 1 << 30) == (1, 65535, 8)


def test_calls_are_replayed(gpu: FakeGpu) -> None:
    replay.forget()
    x, weights = values("normal", (6, 64), BF16, 1), values("normal", (6, 4), BF16, 2)
    for _ in range(5):
        gpu.start()
        made = experts.Routed(chosen(6, 4), 5, 2)
        as_launched(gpu)
        to = copy.deepcopy(made)  # what it has is in the GPU's memory, which is soon used again
        assert [launch[1] for launch in gpu.log] == ["sort_slots"]
        gpu.start()
        spread = experts.routed(x, to)
        as_launched(gpu)
        assert_same_bits(spread, x[to.order // 4])
        spread = spread.clone()
        gpu.start()
        out = experts.combined(spread, weights, to)
        as_launched(gpu)
        assert [launch[1] for launch in gpu.log] == ["sum_slots"]
        assert_same_bits(out, reference.combine_slots(x[to.order // 4], to.places, 4, weights))
    for operator in (experts._take, experts._combine, experts._route):
        assert any(recipe for recipe in operator._call.recipes.values())


def test_a_number_that_stands_twice() -> None:
    assert reduce.FEW == slots.MOST
