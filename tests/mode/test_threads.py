"""No thread changes another's bits: what one does in contexts leaves alone what others do without."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits.mode import batch_invariant, recorded, set_batch_invariant_mode
from samebits.mode.patches import place
from samebits.testing import assert_same_bits, values
from tests.support.threads import in_threads

ROWS = 500
X = values("wide", (ROWS, 8), torch.float32, 0)
AT = torch.arange(ROWS) % 3

Recorded = Callable[[Tensor], Tensor]


def _checkpointed(reentrant: bool, w: Tensor) -> Tensor:
    again = checkpoint(lambda w: X.sin() * w.exp() + w, w[0], use_reentrant=reentrant)
    return again + w[1]


class _Own(torch.autograd.Function):
    """The engine sums the gradient of this node, which is one in Python."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w + torch.zeros(ROWS, 8)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


FUNCTIONS: dict[str, Recorded] = {
    "added": lambda w: X + w[0],
    "multiplied": lambda w: w[0] * X,
    "expanded": lambda w: w[0].expand(ROWS, 8).relu(),
    "picked": lambda w: w.bfloat16().index_select(0, AT).float(),
    "gathered": lambda w: w.bfloat16().gather(0, AT[:, None].expand(ROWS, 8)).float(),
    "indexed": lambda w: w.bfloat16()[AT].float(),
    "own": lambda w: _Own.apply(w[0]),
    "checkpointed": partial(_checkpointed, False),
    "checkpointed, re-entrant": partial(_checkpointed, True),
}


class Kind(NamedTuple):
    """How a gradient is computed: a function, and for forward and backward whether a mode is on."""

    name: str
    context: bool
    process: bool
    context_behind: bool
    process_behind: bool


def _context(on: bool) -> AbstractContextManager[None]:
    return batch_invariant("ignore") if on else nullcontext()


def record(name: str, context: bool) -> tuple[Tensor, Tensor]:
    w = values("normal", (3, 8), torch.float32, 1).requires_grad_()
    with _context(context):
        return w, FUNCTIONS[name](w)


def backward(w: Tensor, y: Tensor, context: bool, times: int = 1) -> list[Tensor]:
    """The gradient of each backward of the same graph."""
    found = []
    for _ in range(times):
        w.grad = None
        with _context(context):
            y.backward(X, retain_graph=True)
        assert w.grad is not None
        found.append(w.grad)
    return found


def alone(kind: Kind) -> Tensor:
    """The gradient, in this thread and no other."""
    with set_batch_invariant_mode(kind.process, "ignore"):
        w, y = record(kind.name, kind.context)
    with set_batch_invariant_mode(kind.process_behind, "ignore"):
        (grad,) = backward(w, y, kind.context_behind)
    return grad


# What a checkpoint runs again in another state of the process saves other tensors, which PyTorch refuses.
KINDS = [
    kind
    for kind in map(Kind._make, itertools.product(FUNCTIONS, *[(False, True)] * 4))
    if kind.process == kind.process_behind or "checkpointed" not in kind.name
]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_threads_in_and_out_of_modes(seed: int) -> None:
    """All at once, in rounds: in some the process is in the mode. Some backwards come rounds later."""
    right = {kind: alone(kind) for kind in KINDS}
    for name in FUNCTIONS.keys() - {"picked", "gathered"}:  # which PyTorch adds up in this order, too
        theirs, ours = right[Kind(name, *[False] * 4)], right[Kind(name, True, *[False] * 3)]
        assert not torch.equal(theirs, ours), name
    barrier = threading.Barrier(9, timeout=120)
    rounds = [False, True, False, False, True, False]
    wrong: list[Kind] = []
    count = [0] * 8

    def work(i: int) -> None:
        pick, left = random.Random(f"{seed} {i}"), []
        for process in rounds:
            barrier.wait()
            pick.shuffle(left)
            for _ in range(14):
                name, context, behind = pick.choice([*FUNCTIONS]), pick.random() < 0.5, pick.random() < 0.3
                if pick.random() < 0.4 or not left:
                    left.append((name, context, process, *record(name, context)))
                    continue
                name, context, before, w, y = left.pop()
                kind = Kind(name, context, before, behind, process)
                if kind not in right:
                    continue
                for grad in backward(w, y, behind, pick.choice([1, 2])):
                    count[i] += 1
                    if not torch.equal(grad, right[kind]):
                        wrong.append(kind)
            barrier.wait()

    def turn() -> None:
        for process in rounds:
            with set_batch_invariant_mode(process, "ignore"):
                barrier.wait()
                barrier.wait()

    in_threads(turn, *(partial(work, i) for i in range(8)))
    assert not wrong
    assert min(count) > 20


def test_the_same_numbers_in_another_thread() -> None:
    """A thread without a context records as many nodes as one in a context has before."""
    theirs, ours = (alone(Kind("added", context, False, False, False)) for context in (False, True))

    def run(context: bool) -> list[Tensor]:
        recorded = [record("added", context) for _ in range(64)]
        return [grad for w, y in recorded for grad in backward(w, y, False)]

    for context, right in ((True, ours), (False, theirs), (True, ours), (False, theirs)):
        (grads,) = in_threads(partial(run, context))
        for grad in grads:
            assert_same_bits(grad, right)


@pytest.mark.parametrize("context", [False, True])
def test_a_graph_of_another_thread(context: bool) -> None:
    ((w, y),) = in_threads(partial(record, "added", context))
    assert_same_bits(backward(w, y, False)[0], alone(Kind("added", context, False, False, False)))


def test_the_nodes_of_contexts_are_kept_apart() -> None:
    """However many there are, and within each other; one that follows another adds nothing."""

    def run() -> tuple[list[bool], int]:
        found: list[tuple[Any, bool]] = []
        for i in range(3000):
            with ExitStack() as stack:
                for _ in range(i % 3):
                    stack.enter_context(batch_invariant("ignore"))
                found.append((torch.ones(1, requires_grad=True) + 1, i % 3 > 0))
        ranges = recorded._recorded[recorded._here.thread]
        right = [(place(y.grad_fn)[1] in ranges) == inside for y, inside in found]
        return right, len(ranges._firsts)

    ((right, kept),) = in_threads(run)
    assert all(right)
    assert kept <= 1001


def test_fast_paths_of_other_threads() -> None:
    """A context avoids those of transformer layers in its thread alone."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0).eval()
    x = values("normal", (5, 7, 64), torch.float32, 0)

    def run() -> tuple[bool, Tensor]:
        with torch.no_grad():
            return torch.backends.mha.get_fastpath_enabled(), layer(x)

    enabled, want = run()
    with batch_invariant("error"):
        inside, ours = run()
        ((beside, theirs),) = in_threads(run)
        torch.backends.mha.set_fastpath_enabled(False)
        assert in_threads(torch.backends.mha.get_fastpath_enabled) == [False]
        torch.backends.mha.set_fastpath_enabled(True)
    assert (enabled, inside, beside) == (True, False, True)
    assert_same_bits(theirs, want)
    assert not torch.equal(ours, want)
