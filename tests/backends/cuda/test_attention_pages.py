"""Attention over pages on Hopper: what its kernel takes and launches, and its bits under every schedule."""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import TENSOR_CORE
from samebits.backends import replay
from samebits.backends.attention import Attention
from samebits.backends.cuda import attention as on_cuda
from samebits.backends.cuda import runtime
from samebits.backends.cuda.attention import latent_sm90, sm90, universal
from samebits.backends.reference import attention as reference
from samebits.testing import assert_same_bits, values
from tests.support.cubins import resources
from tests.support.devices import ARCH, FAMILY, multiprocessors
from tests.support.fake_gpu import FakeGpu, fake_gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PAGES = (8, 16, 24, 32, 48, 64, 128, 256)
LAYOUTS = ("halves", "apart", "by head", "stacked")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-core is not installed (samebits[cuda])"
)


def stores(layout: str, pages: int, page: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype) -> Any:
    """Empty pages for keys and for values, as caches of engines lay them out."""
    size, of_values = sizes

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    if layout == "halves":
        return nan(pages, page, heads, size + of_values).split(sizes, -1)
    if layout == "apart":
        return nan(pages, page, heads, size), nan(pages, page, heads, of_values)
    if layout == "by head":
        return nan(pages, heads, page, size + of_values).transpose(1, 2).split(sizes, -1)
    both = nan(2, pages, page, heads, max(sizes))
    return both[0, ..., :size], both[1, ..., :of_values]


def paged(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    *,
    page: int = 16,
    layout: str = "halves",
    packed: bool = True,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (128, 128),
    dtype: torch.dtype = BF16,
    width: int = 0,
    sinks: bool = False,
    **options: Any,
) -> Attention:
    """A call on CPU tensors. Slots of no sequence are NaN; columns of the table without a page have none's.

    Args:
        heads: of k, and of q for each.
        width: slots of a table's row, at least.
    """
    slots = max(*keys, width, 1)
    columns = -(-slots // page)
    order = iter(torch.randperm(len(keys) * columns + 3, generator=torch.Generator().manual_seed(page)))
    stored = stores(layout, len(keys) * columns + 3, page, heads[0], sizes, dtype)
    table = torch.full((len(keys), columns), -1, dtype=torch.int32)
    table[1::2] = torch.iinfo(torch.int32).max
    for b, n in enumerate(keys):
        for i in range(-(-n // page)):
            at = table[b, i] = next(order)
            for j, (store, size) in enumerate(zip(stored, sizes, strict=True)):
                rows = min(page, n - i * page)
                store[at, :rows] = values("normal", (rows, heads[0], size), dtype, 1000 * b + 2 * i + j)
    tokens = (sum(queries),) if packed else (len(queries), queries[0])
    ends = torch.tensor([*itertools.accumulate(queries, initial=0)], dtype=torch.int32)
    return Attention(
        values("normal", (*tokens, heads[0] * heads[1], sizes[0]), dtype, 7),
        stored[0],
        stored[1],
        TENSOR_CORE.on(FAMILY).key,
        options.pop("scale", 0.125),
        window=options.pop("window", (-1, 0)),
        align="last",
        sinks=values("normal", (heads[0] * heads[1],), F32, 8) if sinks else None,
        cu_seqlens_q=ends if packed else None,
        key_length=torch.tensor(keys, dtype=torch.int32),
        block_table=table,
        **options,
    )


DECODE: dict[str, Any] = {"queries": (1,) * 3, "keys": (300, 0, 1030), "packed": False}
PREFILL: dict[str, Any] = {"queries": (40, 0, 3, 130), "keys": (40, 5, 700, 513)}


@pytest.mark.parametrize("page", [*PAGES, 1, 4, 7, 12])
def test_pages_that_hold_whole_boxes_are_taken(page: int) -> None:
    with fake_gpu():
        x = paged((1,), (20,), page=page, packed=False)
        assert sm90.supports(x) == (page in PAGES)
        assert on_cuda.checks_offsets(x) == (page in PAGES)
        starts = torch.zeros(1, dtype=torch.int32)
        assert not sm90.supports(replace(x, key_start=starts))
        assert not sm90.supports(replace(x, mask=torch.ones(1, 8, 1, x.keys, dtype=torch.bool)))


def launches(gpu: FakeGpu) -> list[str]:
    return [event[1] if isinstance(event[0], str) else "zeros" for event in gpu.log]


def run(x: Attention, out: Tensor) -> None:
    samebits.attention(
        *(x.q, x.k, x.v),
        causal=True,
        cu_seqlens_q=x.cu_seqlens_q,
        key_length=x.key_length,
        block_table=x.block_table,
        out=out,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_is_few_launches(layout: str) -> None:
    """No copy, no check of offsets, no fill; and no counter where each block has one tile."""
    with fake_gpu() as gpu:
        for call, want in (
            (DECODE, ["attention_sm90", "merge_segments"]),
            (PREFILL, ["attention_sm90"]),
            ({"queries": (1,) * 200, "keys": (20,) * 200, "packed": False}, ["zeros", "attention_sm90"]),
        ):
            x = paged(**call, layout=layout)
            out = torch.empty(*x.q.shape[:-1], 128, dtype=BF16)
            gpu.start()
            run(x, out)
            assert launches(gpu) == want
            spec = next(s for s in gpu.specs if s.entry == "attention_sm90")
            assert dict(spec.constants)["PAGED"] == 1


@pytest.mark.parametrize("sizes", [(64, 64), (576, 512)])
def test_a_table_without_columns_is_the_universal_kernels(sizes: tuple[int, int]) -> None:
    """There are pages, but no keys: results are zeros, as on a CPU."""
    q, k = torch.ones(2, 3, 16, sizes[0], dtype=BF16), torch.ones(4, 16, 1, sizes[0], dtype=BF16)
    table, none = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    operands = q, k, k[..., : sizes[1]]
    given: dict[str, Any] = {"block_table": table, "key_length": none, "causal": True}
    assert not samebits.attention(*operands, **given).any()
    with fake_gpu() as gpu:
        samebits.attention(*operands, **given)
        assert [spec.source for spec in gpu.specs] == ["attention.cu"]


def test_grids_do_not_know_lengths() -> None:
    """What a graph has captured holds for all lengths that the table allows."""
    with fake_gpu() as gpu:
        logs = []
        for keys in ((1, 1, 1), (8192, 20, 0)):
            x = paged((1, 1, 1), (1, 1, 1), width=8192, packed=False)
            x = replace(x, key_length=torch.tensor(keys, dtype=torch.int32))
            gpu.start()
            plan = sm90.plan(x)
            assert plan is not None
            plan.run(x)
            logs.append([(event[1], event[2][:12]) for event in gpu.log if isinstance(event[0], str)])
        assert logs[0] == logs[1]


@pytest.mark.skipif(not replay.available, reason="the extension was not built")
def test_repeated_calls_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other addresses, and the same launches; autograd still learns what was written, and overlaps are
    refused."""
    planned: list[Attention] = []
    plan = sm90.plan

    def counted(x: Attention) -> sm90.Plan | None:
        planned.append(x)
        return plan(x)

    monkeypatch.setattr(sm90, "plan", counted)
    x = paged(**PREFILL)
    assert x.cu_seqlens_q is not None
    with fake_gpu() as gpu:
        logs: list[Any] = []
        seen: list[int] = []
        for _ in range(6):
            out, q = torch.empty_like(x.q), x.q.clone()
            gpu.start()
            version = out._version
            run(replace(x, q=q), out)
            assert out._version > version
            logs.append([event[:2] for event in gpu.log if isinstance(event[0], str)])
            packed = gpu.log[0][3]
            for t in (out, q, x.k, x.v, x.cu_seqlens_q, x.key_length, x.block_table):
                assert t is not None
                assert t.data_ptr().to_bytes(8, "little") in packed
            seen.append(len(planned))
        assert len(set(seen[2:])) == 1, "calls from the third on are not planned"
        assert all(log == logs[0] for log in logs)
        with pytest.raises(ValueError, match="out: expected memory of its own, got memory that q shares"):
            run(replace(x, q=q), q)


def test_a_strided_table_is_read_where_it_lies() -> None:
    with fake_gpu() as gpu:
        x = paged(**DECODE)
        assert x.block_table is not None
        wide = torch.zeros(3, 2 * x.block_table.shape[1], dtype=torch.int32)
        table = wide[:, : x.block_table.shape[1]]
        run(replace(x, block_table=table), torch.empty_like(x.q))
        spec, (*_, packed) = gpu.specs[0], gpu.log[0]
        assert spec.entry == "attention_sm90"
        assert table.data_ptr().to_bytes(8, "little") + table.stride(0).to_bytes(8, "little") in packed


def test_a_plan_announces_all_kernels_that_it_loads() -> None:
    """So they are compiled side by side before an engine serves, not one by one as it does."""
    told: list[Any] = []
    absorbed = paged((1, 1), (900, 700), heads=(1, 16), sizes=(576, 576))
    absorbed = replace(absorbed, v=absorbed.k[..., :512])
    for make, x in (
        (sm90.make_plan, paged((1,), (5000,))),
        (sm90.make_plan, paged((300,), (300,))),
        (latent_sm90.make_plan, absorbed),
    ):
        told.clear()
        with fake_gpu() as gpu, runtime.before_loading(lambda specs, device: told.extend(specs)):
            made = make(x)
            assert {*told} == {*gpu._kernels}
            assert len(told) == (3 if x is absorbed else 1 if made.merge is None else 2)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    "of",
    [
        sm90.HopperVariant(BF16, 128, 128, False, True),
        sm90.HopperVariant(F16, 64, 64, False, True),
        sm90.HopperVariant(BF16, 48, 80, True, True),
    ],
    ids=str,
)
def test_kernels_compile_without_spills(of: sm90.HopperVariant) -> None:
    for spec in dict.fromkeys(sm90.spec(of, s) for s in sm90.schedules(of) if s == s.filled(of)):
        cubin = resources(spec, "sm_90a")
        assert cubin.spill_bytes == 0, spec
        assert not cubin.advice, spec


# ---- on a GPU


def on_gpu(x: Attention) -> Attention:
    """The same call there. Views of one memory stay such."""
    moved: dict[str, Any] = {}
    if x.k.untyped_storage().data_ptr() == x.v.untyped_storage().data_ptr():
        flat = torch.empty(0, dtype=x.k.dtype).set_(x.k.untyped_storage()).cuda()
        for name in ("k", "v"):
            t = getattr(x, name)
            moved[name] = flat.as_strided(t.shape, t.stride(), t.storage_offset())
    names = ("q", "k", "v", "sinks", "cu_seqlens_q", "key_length", "block_table")
    given = {n: t.cuda() for n in names if (t := getattr(x, n)) is not None and n not in moved}
    return replace(x, **given, **moved)


def check(x: Attention, least: int = 1) -> None:
    """Every schedule, and the default choice, against the reference; on outputs of NaN."""
    want = reference.forward(x)
    on = on_gpu(x)
    assert sm90.supports(on), "this test is for Hopper's kernel"
    ways = [None, *sm90.schedules(sm90.variant(on))]
    assert len(ways) > least
    for schedule in ways:
        out = torch.full(want[0].shape, math.nan, dtype=on.q.dtype, device="cuda")
        for got, right in zip(sm90.make_plan(on, schedule).run(on, out), want, strict=True):
            assert_same_bits(got.cpu(), right)
    for got, right in zip(universal.forward(on), want, strict=True):
        assert_same_bits(got.cpu(), right)


hopper = pytest.mark.skipif(ARCH.own != "sm90", reason="Hopper's kernel")


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("call", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_every_schedule_over_pages(page: int, call: dict[str, Any]) -> None:
    for i, layout in enumerate(LAYOUTS):
        dtype = (BF16, F16)[i % 2]
        check(paged(**call, page=page, layout=layout, dtype=dtype, width=(0, 2000)[i // 2 % 2]))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (-1, -1)},
        {"window": (100, 0), "sinks": True},
        {"window": (600, 20)},
        {"softcap": 1.5, "sinks": True},
        {"heads": (1, 8)},
        {"heads": (1, 16), "dtype": F16},
        {"heads": (3, 1), "sizes": (64, 64)},
        {"sizes": (40, 48)},
        {"sizes": (64, 128), "window": (-1, -1)},
        {"sizes": (80, 96), "dtype": F16, "softcap": 30.0},
    ],
    ids=str,
)
def test_every_option_over_pages(page: int, options: dict[str, Any]) -> None:
    for call in (DECODE, PREFILL):
        check(paged(**call, page=page, **options))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 128])
def test_lengths_at_the_edges_of_tiles_and_pages(page: int) -> None:
    keys = (0, 1, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1024, 1025)
    check(paged((1,) * len(keys), keys, page=page, packed=False, width=4096))
    check(paged((3,) * len(keys), keys, page=page, packed=False))
    check(paged(tuple(min(n, 5) for n in keys), keys, page=page))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_blocks_that_take_many_tiles(count: int) -> None:
    """The keys of a tile arrive while the one before is at work, however long either is."""
    keys = (300, 5, 0, 140, 1, 1100, 129, 0, 64, 40)
    with multiprocessors(count):
        check(paged((1,) * 10, keys, page=16, packed=False, heads=(2, 4)))
        check(paged((4, 0, 9, 1, 1, 70, 3, 0, 1, 40), keys, page=8, heads=(1, 2)))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_in_a_graph_for_any_lengths(rows: int) -> None:
    """A graph that was captured with short sequences serves long ones, and the other way round."""
    longest = 1500
    long = tuple((longest - 37 * i) % longest for i in range(rows))
    x = on_gpu(paged((1,) * rows, long, packed=False, width=8192, heads=(2, 4)))
    out = torch.full_like(x.q, math.nan)
    assert x.key_length is not None
    lengths = x.key_length.clone()
    run(x, out)
    graph = torch.cuda.CUDAGraph()
    x.key_length.fill_(1)
    with torch.cuda.graph(graph):
        run(x, out)
    for now in (lengths, lengths // 9, torch.zeros_like(lengths)):
        x.key_length.copy_(now)
        out.fill_(math.nan)
        graph.replay()
        want = reference.forward(
            replace(
                x,
                **{n: getattr(x, n).cpu() for n in ("q", "k", "v", "key_length", "block_table")},
                scale=1 / math.sqrt(128),
            )
        )[0]
        assert_same_bits(out.cpu(), want)


@hopper
@pytest.mark.gpu
def test_wrong_offsets_stop_the_gpu() -> None:
    """In a process of its own, whose GPU is lost then."""
    code = """
import torch, samebits
q = torch.ones(6, 2, 64, dtype=torch.bfloat16, device="cuda")
pages = torch.ones(4, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
table, length = torch.zeros(2, 2, dtype=torch.int32, device="cuda"), torch.tensor([9, 9], device="cuda")
for ends in ([0, 2, 6], [0, 2, 5]):
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    samebits.attention(q, pages, pages, cu_seqlens_q=offsets, key_length=length, block_table=table)
    torch.cuda.synchronize()
    print("right" if ends[-1] == 6 else "missed")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["right"], found.stderr
    assert found.returncode != 0
