"""``libsamebits`` launches what the library's own plans of attention launch."""

from __future__ import annotations

import ctypes
import random
import struct
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from native.tests import support
from samebits.backends.attention import Attention
from samebits.backends.cuda import attention
from samebits.backends.cuda.attention import sm90, universal
from samebits.contract import FMA, HOPPER, TENSOR_CORE
from samebits_native import engine
from samebits_native.export.archive import Archive
from tests.support.fake_gpu import FakeGpu, fake_gpu

pytestmark = pytest.mark.skipif(not support.HAS_COMPILER, reason="no C compiler")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STREAM = 77
RESULTS = {"attention_sm90": (384, *range(400, 432, 8)), "attention": range(32, 64, 8)}
"""Where parameters have addresses of results and scratch, of which only those that are NULL are compared."""


@pytest.fixture(scope="module")
def archive() -> Archive:
    return support.built()


@pytest.fixture(scope="module")
def engine_(archive: Archive) -> engine.Engine:
    return support.opened(support.write(archive, "attention.samebits"))


def inputs(entry: str, packed: bytes) -> bytes:
    found = bytearray(packed)
    for at in RESULTS["attention" if entry == "merge_segments" else entry]:
        found[at : at + 8] = b"\xff" * 8 if any(found[at : at + 8]) else bytes(8)
    return bytes(found)


def arguments(x: Attention) -> engine._Attention:
    """The call in C."""

    def of(t: torch.Tensor) -> engine.Array:
        return engine.Array(t.data_ptr(), str(t.dtype)[6:], tuple(t.shape), t.stride())

    lists = {name: getattr(x, name) for name in engine._LISTS}
    given = {name: None if t is None else of(t) for name, t in (*lists.items(), ("sinks", x.sinks))}
    options = {"scale": x.scale, "softcap": x.softcap, "window": x.window}
    call = engine._attention(*map(of, (x.q, x.k, x.v)), **options, **given)
    call.out, call.lse = 0x7F0000000000, 0x7E0000000000
    return call


def launched(of: engine.Engine, x: Attention) -> list[support.Launched]:
    call, size = arguments(x), ctypes.c_size_t()
    library, at = of._library, ctypes.byref(call)
    assert library.sb_attention_workspace_size(of._context, at, ctypes.byref(size)) == 0
    status = library.sb_attention(of._context, at, 0x7D0000000000, size.value, STREAM)
    assert status == 0, library.sb_last_error()
    found = support.launches()
    assert library.sb_attention(of._context, at, 0x7D0000000000, 255, STREAM) == 1
    assert support.launches() == []
    return found


def test_tokens_of_no_sequence_are_cleared(engine_: engine.Engine) -> None:
    cleared = ctypes.c_uint64.in_dll(support.fake_driver(), "driver_cleared")
    support.launches()
    at, lists = [0x7F0000000000 << i for i in range(3)], {"cu_seqlens_q": 1 << 20, "cu_seqlens_k": 1 << 20}
    x = engine._Attention(1, 0, 9, 5, 4, 2, 64, 64, *(engine._Vectors(a, 0, 256, 64) for a in at))
    x.scale, x.left, x.right = 1.0, -1, -1
    for name, value in lists.items():
        setattr(x, name, value)
    run, before = engine_._library.sb_attention, cleared.value
    assert run(engine_._context, ctypes.byref(x), None, 0, STREAM) == 1
    assert b"out: expected an address, got NULL" in engine_._library.sb_last_error()
    x.out = 0x6F0000000000
    assert run(engine_._context, ctypes.byref(x), None, 0, STREAM) == 0
    assert cleared.value - before == 9 * 4 * 64 * 2
    assert support.launches() == []


def noted(gpu: FakeGpu) -> list[Any]:
    launches = [event for event in gpu.log if isinstance(event[0], str) and event[0].endswith(".cu")]
    return list(zip(gpu.specs, launches, strict=True))


def compare(archive: Archive, found: list[support.Launched], want: list[Any], x: Attention) -> None:
    assert len(found) == len(want)
    for launch, (spec, (_, _, config, packed)) in zip(found, want, strict=True):
        mine = archive.specs[launch.kernel]
        if spec.entry == "merge_segments":  # one for all sizes of heads, and layouts
            names = ("TYPE", "VALUES", "HARDWARE_EXP2")
            assert all(dict(mine.constants)[n] == dict(spec.constants)[n] for n in names), x
            assert (mine.entry, mine.block, mine.programmatic) == (spec.entry, spec.block, spec.programmatic)
        else:
            assert mine == spec, x
        assert launch.grid == struct.unpack_from("@3I", config), x
        assert launch[2:7] == (mine.block, mine.smem, 1, mine.programmatic, STREAM)
        assert inputs(mine.entry, launch.params) == inputs(spec.entry, packed), x


def check(gpu: FakeGpu, archive: Archive, of: engine.Engine, x: Attention) -> tuple[str, Any]:
    """Attend natively, and by the library under the same schedule; and compare."""
    found = launched(of, x)
    spec, params = archive.specs[found[0].kernel], found[0].params
    schedule = archive.schedules[next(k for (k, _), s in archive.variants.items() if s is spec)]
    gpu.start()
    if spec.entry == "attention_sm90":
        shares, members = struct.unpack_from("@i4xi", params, 464)
        split = bool(dict(spec.constants)["SPLIT"])
        dynamic = not split and sm90.is_uneven(x)
        s = replace(schedule, stages=3, grouped=members > 1, split=split, dynamic=dynamic)
        with mock.patch.object(sm90, "shares_of", return_value=shares):
            sm90.forward(x, schedule=s.filled(sm90.variant(x)))
        schedule = replace(s, stages=0)
    else:
        (splits,) = struct.unpack_from("@i", params, 204)
        universal.forward(x, schedule=schedule, splits=splits)
    compare(archive, found, noted(gpu), x)
    return spec.entry, schedule


def random_call(drawn: random.Random, gpu: FakeGpu) -> Attention:
    dtype = drawn.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    head, values = drawn.choice(
        ((64, 64), (64, 64), (128, 128), (128, 128), (192, 128), (56, 50), (96, 80), (120, 128))
    )
    group, kv_heads, batch = (
        drawn.choice((1, 1, 2, 3, 4, 8, 16, 71)),
        drawn.choice((1, 2, 8)),
        drawn.choice((1, 2, 7, 33)),
    )
    form = drawn.choice(("whole", "whole", "padded", "packed", "paged", "packed and paged"))
    queries = drawn.choice((1, 1, 2, 5, 64, 127, 200, 1000, 9000))
    keys = drawn.choice((1, 100, 512, 513, 3000, 9000))

    queries = min(queries, max(1, (1 << 22) // (batch * group * kv_heads * head)))
    keys = min(keys, (1 << 24) // (batch * kv_heads * head))

    def tensor(*shape: int) -> torch.Tensor:
        *outer, heads, size = shape
        pitch = size + drawn.choice((0, 0, 0, 8, 3))
        strides, step = [pitch, 1], pitch * heads
        if drawn.random() < 0.15:
            strides, step = [0, 1], pitch
        for n in reversed(outer):
            strides, step = [step, *strides], step * n
        if len(outer) == 2 and drawn.random() < 0.1:
            strides[0] = 0
        shift = drawn.choice((0, 0, 0, 0, 1))
        found = gpu.allocate((2, *shape), (shift, *strides), dtype)
        return found[1]

    def integers(*shape: int) -> torch.Tensor:
        return gpu.allocate(shape, torch.empty(shape, device="meta").stride(), torch.int32)

    heads, lists, pages = group * kv_heads, {}, (drawn.choice((3, 40)), drawn.choice((16, 64, 100)))
    packed = form.startswith("packed")
    q = tensor(queries, heads, head) if packed else tensor(batch, queries, heads, head)
    of_k = pages if form.endswith("paged") else (keys,) if packed else (batch, keys)
    k, v = tensor(*of_k, kv_heads, head), tensor(*of_k, kv_heads, values)
    if packed:
        lists["cu_seqlens_q"] = integers(batch + 1)
    if form == "packed":
        lists["cu_seqlens_k"] = integers(batch + 1)
    elif form != "whole":
        lists["key_length"] = integers(batch)
        if drawn.random() < 0.5:
            lists["key_start"] = integers(batch)
    if form.endswith("paged"):
        lists["block_table"] = integers(batch, drawn.choice((1, 5, 60)))
    window = drawn.choice(((-1, -1), (-1, 0), (-1, 0), (127, 0), (5, 9), (1 << 20, 0)))
    slots = lists.get("key_start") is not None and "block_table" not in lists and q.shape[-3] == k.shape[-3]
    contract = FMA if dtype == torch.float32 else TENSOR_CORE.on(HOPPER)
    return Attention(
        *(q, k, v, contract.key, 0.125, drawn.choice((0.0, 0.0, 50.0)), window),
        "last" if window != (-1, -1) else "slots" if slots else "first",
        sinks=gpu.allocate((heads,), (1,), torch.float32) if drawn.random() < 0.2 else None,
        **lists,
    )


@pytest.mark.long
def test_random_calls_launch_what_plans_launch(archive: Archive, engine_: engine.Engine) -> None:
    drawn, seen = random.Random(6), {}
    support.launches()
    with fake_gpu() as gpu:
        gpu._memory = torch.empty(1 << 33, dtype=torch.uint8)  # which is hardly touched
        for _ in range(600):
            gpu.start()
            entry, schedule = check(gpu, archive, engine_, random_call(drawn, gpu))
            seen.setdefault(entry, set()).add(schedule)
    few = {entry: len(schedules) for entry, schedules in seen.items()}
    assert few.keys() == {"attention_sm90", "attention"}
    assert min(few.values()) >= 5, few


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (64, 8, 64), (16, 16, 128), (32, 4, 64)]
)
@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_for_models_the_choice_is_the_librarys(
    heads: int, kv_heads: int, size: int, form: str, archive: Archive, engine_: engine.Engine
) -> None:
    support.launches()
    with fake_gpu() as gpu:
        gpu._memory = torch.empty(1 << 33, dtype=torch.uint8)
        for batch, keys in ((1, 1024), (1, 8192), (8, 2048), (32, 4096), (2, 16384), (64, 512)):
            queries = 1 if form == "decode" else min(keys, 8192)
            gpu.start()
            shapes = (batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads)
            q, k, v = (
                gpu.allocate((*s, size), torch.empty((*s, size), device="meta").stride(), torch.bfloat16)
                for s in shapes
            )
            window = (-1, -1) if form == "decode" else (-1, 0)
            align = "first" if form == "decode" else "last"
            x = Attention(q, k, v, TENSOR_CORE.on(HOPPER).key, 0.125, 0.0, window, align)
            found = launched(engine_, x)
            attention.forward(x)
            compare(archive, found, noted(gpu), x)
