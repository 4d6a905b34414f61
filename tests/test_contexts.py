"""The contexts of the API are like torch.no_grad: kept, entered again, nested, in threads, as decorators."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.backends import chosen_backend
from samebits.backends.cuda import shapes
from samebits.backends.modes import CONTEXT, includes
from samebits.contract import resolve
from samebits.mode.calls import outermost, state
from samebits.testing import assert_same_bits, values
from tests.support.threads import in_threads

X, W = (values("normal", shape, torch.float32, i) for i, shape in enumerate(((7, 96), (80, 96))))


class Kind(NamedTuple):
    """A context of the API.

    Attributes:
        make: a new one.
        seen: what it changes, as it stands now.
        of_process: whether it changes that for all threads.
    """

    make: Callable[[], Any]
    seen: Callable[[], Any]
    of_process: bool = False


KINDS: dict[str, Kind] = {
    "batch_invariant": Kind(
        lambda: samebits.batch_invariant("error"), lambda: (includes(CONTEXT), state.on_uncovered)
    ),
    "set_batch_invariant_mode": Kind(
        lambda: samebits.set_batch_invariant_mode(True, "error"), lambda: outermost.process, of_process=True
    ),
    "use_mma_model": Kind(
        lambda: samebits.use_mma_model(samebits.AMPERE), lambda: resolve(None, torch.bfloat16, "cpu")
    ),
    "use_backend": Kind(lambda: _not_chosen(samebits.use_backend("triton")), lambda: chosen_backend("cuda")),
    "record_shapes": Kind(samebits.record_shapes, lambda: bool(shapes._recorder.active), of_process=True),
}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _not_chosen(choice: samebits.use_backend) -> samebits.use_backend:
    samebits.use_backend(None)  # it chooses where it is made
    return choice


@EACH
def test_one_is_entered_again_and_within_itself(kind: Kind) -> None:
    outside, context = kind.seen(), kind.make()
    for _ in range(3):
        with context:
            inside = kind.seen()
            with context, context:
                assert kind.seen() == inside != outside
            assert kind.seen() == inside
        assert kind.seen() == outside


@EACH
def test_an_error_inside_leaves_it(kind: Kind) -> None:
    outside, context = kind.seen(), kind.make()
    for _ in range(2):
        with pytest.raises(KeyError), context, context:
            raise KeyError
        assert kind.seen() == outside


@EACH
def test_threads_share_one(kind: Kind) -> None:
    """They leave in the order in which they entered, the worst one for what is restored."""
    outside, context, turn = kind.seen(), kind.make(), threading.Barrier(2, timeout=30)
    entered, left = threading.Event(), threading.Event()

    def first() -> tuple[Any, Any]:
        with context:
            entered.set()
            turn.wait()
            inside = kind.seen()
        after = kind.seen()
        left.set()
        return inside, after

    def second() -> tuple[Any, Any]:
        assert entered.wait(30)
        with context:
            turn.wait()
            assert left.wait(30)
            inside = kind.seen()
        return inside, kind.seen()

    (inside, after), others = in_threads(first, second)
    assert inside == others[0] != outside
    assert after == (inside if kind.of_process else outside)
    assert others[1] == kind.seen() == outside


@EACH
def test_a_decorator(kind: Kind) -> None:
    outside = kind.seen()

    @kind.make()
    def inside(again: int) -> list[Any]:
        """Calls itself."""
        return [kind.seen(), *(inside(again - 1) if again else ())]

    seen = inside(2)
    assert seen == [seen[0]] * 3
    assert seen[0] != outside == kind.seen()
    assert (inside.__name__, inside.__doc__) == ("inside", "Calls itself.")


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> int:
    return 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


class Callables:
    def generator(self) -> Iterator[int]:
        yield 1

    async def __call__(self) -> int:
        return 1


REFUSED: dict[str, tuple[Any, str]] = {
    "generator": (generator, "generator, a generator"),
    "coroutine": (coroutine, "coroutine, a coroutine"),
    "asynchronous generator": (asynchronous_generator, "an asynchronous generator"),
    "lambda": (lambda: (yield), "<lambda>, a generator"),
    "method": (Callables().generator, r"Callables\.generator, a generator"),
    "static method": (staticmethod(generator), "generator, a generator"),
    "partial": (functools.partial(functools.partial(coroutine)), "a coroutine"),
    "object": (Callables(), "Callables, a coroutine"),
    "class": (Callables, "expected a function, got a class"),
    "no function": (3, "expected a function, got int"),
    "class method": (classmethod(generator), "expected a function, got classmethod"),
}


@EACH
@pytest.mark.parametrize("name", REFUSED)
def test_what_runs_later_is_refused_where_it_is_decorated(name: str, kind: Kind) -> None:
    function, match = REFUSED[name]
    outside, context = kind.seen(), kind.make()
    with pytest.raises(TypeError, match=rf"samebits\.{type(context).__name__}: .*{match}"):
        context(function)
    assert kind.seen() == outside


def inside(x: Tensor) -> Tensor:
    return F.linear(x, W).softmax(-1).sum(0)


def test_a_kept_context_in_what_is_compiled() -> None:
    """As others that are made outside of the function, it breaks the graph."""
    context = samebits.batch_invariant("error")

    def f(x: Tensor) -> Tensor:
        with context:
            y = F.linear(x, W)
            with context:
                y = y.softmax(-1)
        with context:
            return y.sum(0)

    with context:
        want = inside(X)
    compiled = torch.compile(f, backend="aot_eager")
    for run in (compiled, f, compiled):
        assert_same_bits(run(X), want)
    assert not includes(CONTEXT)
    assert state.on_uncovered is None


def test_a_decorated_function_is_compiled_whole() -> None:
    with samebits.batch_invariant("error"):
        want = inside(X)
    decorated = samebits.batch_invariant("error")(inside)
    assert_same_bits(torch.compile(decorated, backend="aot_eager", fullgraph=True)(X), want)
    by_mma = samebits.use_mma_model(samebits.AMPERE)(torch.neg)
    assert_same_bits(torch.compile(by_mma, backend="aot_eager", fullgraph=True)(X), -X)


def test_shapes_of_all_blocks(tmp_path: Any) -> None:
    recorder = samebits.record_shapes(tmp_path / "shapes.json")
    met = [shapes.LogpShape("bfloat16", rows, 1024, 128) for rows in (1, 2, 3)]
    for i, shape in enumerate(met):
        with recorder as found, recorder if i else nullcontext():
            shapes.met(shape)
        shapes.met(shapes.LogpShape("bfloat16", 4, 1024, 128))  # outside
        assert [*found] == met[: i + 1]
        assert (tmp_path / "shapes.json").read_text() == found.to_json()
