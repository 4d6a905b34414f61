"""Replays: calls that look like an earlier one, and are not."""

from __future__ import annotations

import collections
import gc
import itertools
import struct
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.backends import pytorch_in_c, replay
from samebits.backends.cuda import driver, rows, runtime
from samebits.ops import linear_logp, reduce
from tests.backends.cuda.test_replay import BF16, F32, KEY, ids, replays, t
from tests.mode.test_plans import of_operators
from tests.support.fake_gpu import INSTEAD, FakeGpu, fake_gpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    if not replay.available:
        pytest.skip("the extension was not built")
    with fake_gpu() as found:
        yield found


def _first_pointer(entry: tuple[Any, ...]) -> int:
    found: int = struct.unpack_from("@P", entry[3])[0]
    return found


def test_a_part_of_one_argument_is_not_another_argument(gpu: FakeGpu) -> None:
    """Recorded where x[1:] is y; replayed where it is not."""

    def run(x: Tensor, y: Tensor) -> Any:
        return reduce._operator._cuda.run(x[1:], False)

    call, room = replay.replayed(run), t(5, 256)
    for _ in range(2):
        call(room[:4], room[1:5])
    x, y = t(4, 256), t(4, 256)
    gpu.start()
    call(x, y)
    assert _first_pointer(gpu.log[0]) == x[1:].data_ptr()


def test_linear_logp_in_pieces_reads_hidden(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_logp, "_STATISTICS", 128 * 640)
    call: Any = linear_logp._operator._cuda
    call.recipes.clear()
    room, h, w = t(768, 64), t(256, 64), t(640, 64)
    rest = None, ids(256), None, None, -100, 1.0, True, True, KEY
    for _ in range(2):
        call(room[:256], room[128:], *rest)
    gpu.start()
    with gpu.allocates_all():
        call.run(h, w, *rest)
    want = gpu.log
    gpu.start()
    with gpu.allocates_all():
        call(h, w, *rest)
    assert gpu.log == want


def test_pieces_share_memory_in_replays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most memory at a time is that of the call itself, in a recording and in a replay."""
    live, most = 0, 0

    def count(made: Tensor) -> Tensor:
        nonlocal live, most
        size = made.nbytes
        live += size
        most = max(live, most)

        def died() -> None:
            nonlocal live
            live -= size

        weakref.finalize(made, died)
        return made

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return count(torch.empty_strided(shape, strides, dtype=dtype))

    like, new = torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: count(like(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: count(new(*a, **k)))
    make_current, fail = driver.make_context_current, runtime._fail
    pytorch_in_c.configure(make_current, fail, *gpu._callbacks, allocate=allocate, **INSTEAD)
    monkeypatch.setattr(linear_logp, "_STATISTICS", 1 << 17)
    call: Any = linear_logp._operator._cuda
    for tokens in (1024, 8192):
        call.recipes.clear()
        found = []
        for _ in range(3):
            most = live
            before = live
            call(t(tokens, 64), t(1024, 64), None, ids(tokens), None, None, -100, 1.0, True, False, KEY)
            gc.collect()
            found.append(most - before)
        assert max(found) <= 1.5 * found[0], (tokens, found)


def test_linear_logp_without_entropy_is_replayed(gpu: FakeGpu) -> None:
    call: Any = linear_logp._operator._cuda
    call.recipes.clear()
    for _ in range(2):
        call(t(6, 64), t(700, 64), None, ids(6), None, None, -100, 1.0, False, False, KEY)
    (recipe,) = call.recipes.values()
    assert recipe


@pytest.mark.parametrize(
    "make", [torch._efficientzerotensor, lambda n: torch._to_functional_tensor(torch.ones(n))]
)
def test_tensors_without_an_address_run_the_call(gpu: FakeGpu, make: Any) -> None:
    replay.forget()
    with samebits.batch_invariant("error"):
        for _ in range(3):
            torch.softmax(t(4, 256, dtype=F32), -1)
        gpu.start()
        torch.softmax(make((4, 256)), -1)
    assert _first_pointer(gpu.log[0]) != 0


def test_a_tensor_is_not_its_metadata(gpu: FakeGpu) -> None:
    def add(x: Tensor, y: Tensor, *rest: Any) -> Any:
        assert isinstance(y, Tensor)
        reduce._operator._cuda.run(y, False)
        return reduce._operator._cuda.run(x, False)

    call, x, y = replay.replayed(add), t(4, 256), t(4, 256)
    for _ in range(3):
        call(x, y)
    with pytest.raises(AssertionError):
        call(x, BF16, (4, 256), (256, 1), (y.data_ptr() & 15) << 8 | 1)


def test_every_part_of_a_call_is_in_its_key(gpu: FakeGpu) -> None:
    call, x, y = replay.replayed(lambda *args, **named: None), t(4, 256), t(4, 256)
    wide, row = torch.ones(4, 257, dtype=BF16), torch.ones(1024, dtype=BF16)
    calls: list[tuple[Any, ...]] = [
        *((x,), (x, None), (x, x), (x, y), (None, x), (x, None, None), (wide[:, 1:],), (wide[:, :256],)),
        *(
            (row,),
            (row.view(2, 512),),
            (row.view(1, 4, 256),),
            (x.float(),),
            (x.half(),),
            (x.view(torch.int16),),
        ),
        *((x, 0), (x, 0.0), (x, -0.0), (x, False), (x, True), (x, 1), (x, 1.0), (x, 256), (x, -1), (x, "1")),
        *((x, ""), (x, "", ""), (x, '"'), (x, "1", "2"), (x, "12"), (x, "é"), (x, BF16), (x, F32)),
        *((x, ()), (x, (1,)), (x, (1, 2)), (x, (1,), 2), (x, 1, 2), (x, (1, None)), (x, ("1",)), (x, (1.0,))),
        *(
            (x, (True,)),
            (x, (BF16,)),
            (x, ((1,),)),
            (x, ((1,), 2)),
            (x, ((1, 2),)),
            (x, 2**40),
            (x, 2**40 + 1),
        ),
    ]
    for args in calls:
        call(*args)
    for named in ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"ab": 1}, {"a": "b"}):
        call(x, **named)
    assert len(call.recipes) == len(calls) + 5
    call(t(4, 256), [1, 2])
    call(t(4, 256).requires_grad_())  # PyTorch has looked at that before
    assert len(call.recipes) == len(calls) + 5
    for unknown in (2**70, [[[1]]], {}, object(), t(4, 256).to("meta"), 1j, (x,)):
        call(x, unknown)
    call(torch.ones((1,) * 65, dtype=BF16))
    call(x, "long" * 1024)
    assert len(call.recipes) == len(calls) + 5


@pytest.mark.parametrize("records", [False, True])
def test_replays_keep_nothing(gpu: FakeGpu, records: bool) -> None:
    x, w = t(4, 256).requires_grad_(records), t(1, 256)[0].requires_grad_(records)
    seed = t(1, 4)[0]

    def run(times: int) -> int:
        for _ in range(times):
            gpu.start()
            out = F.layer_norm(x, (256,), w, w)
            if records:
                torch.autograd.grad(out, [x, w], out.detach())
                torch.autograd.grad(x.sum(-1), [x], seed)
            with pytest.raises(TypeError):
                call(x, 2**70, {})
        gpu.start()
        gc.collect()
        return sys.getallocatedblocks()

    call = replay.replayed(lambda x: None)
    with samebits.batch_invariant("error"):
        run(300)  # until all caches are filled
        blocks = [run(300) for _ in range(4)]
    # One for each call would be 300 each time. pytest-xdist's thread may keep the next tests' numbers, once.
    assert min(later - earlier for earlier, later in itertools.pairwise(blocks)) < 200, blocks


def test_a_pytorch_whose_tensors_are_others_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read of its tensors then."""
    call: Any = replay.replayed(lambda x: x)
    call(t(4, 256))
    assert call.recipes.pop(next(iter(call.recipes))) is False
    monkeypatch.setattr("samebits.backends.replay._replay.described", lambda tensor: (0, 0, b"", b""))
    given = driver.make_context_current, runtime._fail, *gpu._callbacks
    with pytest.raises(RuntimeError, match="cannot be read"):
        pytorch_in_c.configure(*given, allocate=gpu.allocate, **INSTEAD)
    call(t(4, 256))
    assert not call.recipes


Pair = collections.namedtuple("Pair", "a b")


def test_other_results_are_refused(gpu: FakeGpu) -> None:
    def one(x: Tensor) -> Any:
        return reduce._operator._cuda.run(x, False)

    x = t(4, 256)
    assert replays(lambda x: (one(x), 3), x)
    assert replays(lambda x: [one(x)], x)
    call = replay.replayed(lambda x: Pair(one(x), one(x)))
    assert {type(call(x)) for _ in range(4)} == {Pair}


def test_views_of_arguments_are_made_anew(gpu: FakeGpu) -> None:
    def last_rows(x: Tensor, y: Tensor) -> Tensor:
        return x[2:, None].expand(-1, 3, -1)

    call: Any = replay.replayed(last_rows, views=True)
    for _ in range(4):
        x, y = t(5, 8)[1:], t(4, 8)
        got, want = call(x, y), last_rows(x, y)
        assert (got.data_ptr(), got.shape, got.stride()) == (want.data_ptr(), want.shape, want.stride())
    assert [type(found).__name__ for found in call.recipes.values()] == ["Recipe"]
    assert not got._is_view()
    assert replays(last_rows, x, y)  # views are not asked for
    assert replays(last_rows, x, x, views=True)  # whose it is, the next call may decide otherwise
    assert replays(lambda x: x.view(torch.int16), x, views=True)
    assert replays(lambda x: x, x, views=True)  # no other tensor: autograd counts who has it


def test_a_given_schedule_is_not_recorded(gpu: FakeGpu) -> None:
    x, (schedule, *_) = t(5, 2048), rows.schedules(2048, BF16)
    call: Any = replay.replayed(lambda x: rows.softmax(x, False, BF16, schedule=schedule))
    for _ in range(2):
        call(x)
    assert [*call.recipes.values()] == [None]


def test_what_is_not_watched_is_not_recorded(gpu: FakeGpu) -> None:
    def negated(x: Tensor) -> Any:
        return reduce._operator._cuda.run(x, False).neg_()

    call: Any = replay.replayed(negated)
    with torch._C._DisableTorchDispatch():
        for _ in range(2):
            call(t(4, 256))
    assert not any(call.recipes.values())


def test_a_capture_does_not_decide_for_later_calls(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused only while a graph is captured is recorded afterwards."""
    call: Any = replay.replayed(lambda x: reduce._operator._cuda.run(x, False).add(0))
    x = t(4, 256)
    call(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(x)
    assert [*call.recipes.values()] == [False]
    monkeypatch.undo()
    call(x)
    assert [*call.recipes.values()] == [None]


def test_what_pytorch_is_asked_about_shapes_is_not_asked_again(gpu: FakeGpu) -> None:
    """The mode asks on meta tensors, which takes longer than the norm."""
    replay.forget()
    x = t(4, 256)
    with samebits.batch_invariant("error"):
        for _ in range(3):
            gpu.start()
            torch.linalg.norm(x, dim=(0, 1))
    (recipe,) = (recipe for r in of_operators() for recipe in r.recipes.values())
    assert recipe
    assert [entry for _, entry, *_ in gpu.log] == ["row_sum"]
