"""Activation checkpointing under samebits.batch_invariant: gradients have the same bits with and without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.backends.modes import CONTEXT, includes, with_context
from samebits.mode.calls import OnUncovered, outermost, state
from samebits.testing import assert_same_bits, values
from tests.mode.conftest import Within
from tests.mode.test_mode import COVERED
from tests.support.devices import DEVICES

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

# Of a matrix x[rows, 40], square weights w[40, 40] and b[40]: a product with w in place of w.T has the right
# shape and the wrong bits.
MATRICES: dict[str, Function] = {
    "mm": lambda x, w, b: torch.mm(x, w),
    "matmul": lambda x, w, b: torch.matmul(x, w),
    "mv": lambda x, w, b: torch.mv(x, b),
    "dot": lambda x, w, b: torch.dot(x[0], b),
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "addmm of a matrix": lambda x, w, b: torch.addmm(x, x, w, beta=0.5),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "einsum": lambda x, w, b: torch.einsum("ri,oi->ro", x, w),
    "softmax": lambda x, w, b: x.softmax(-1),
    "log_softmax": lambda x, w, b: F.log_softmax(x, dim=1),
    "cross_entropy": lambda x, w, b: F.cross_entropy(x, x.argmax(1)),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (40,), b, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (40,), b),
    "sum": lambda x, w, b: x.sum(0),
    "mean": lambda x, w, b: x.mean(1),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(x, w, w),
    "embedding": lambda x, w, b: F.embedding(x.argmax(1), w),
    "broadcast": lambda x, w, b: x * b,
    "samebits.matmul": lambda x, w, b: samebits.matmul(x, w),
    "samebits.addmm_": lambda x, w, b: samebits.addmm_(x * 1.0, x, w),
    "samebits.logp": lambda x, w, b: samebits.logp(x, x.argmax(1)),
    "samebits.linear_logp": lambda x, w, b: samebits.linear_logp(x, w, x.argmax(1), b),
}
FUNCTIONS = {f"{name}, 2-D": f for name, f in MATRICES.items()} | {
    f"{name}, 3-D": f for name, f in COVERED.items()
}


def leaves(name: str, device: str) -> list[Tensor]:
    shape = (12, 40) if name.endswith("2-D") else (6, 3, 40)
    made = (values("normal", size, torch.float32, i) for i, size in enumerate((shape, (40, 40), (40,))))
    return [t.to(device).requires_grad_() for t in made]


def gradients(loss: Tensor, to: Sequence[Tensor], backward: str) -> list[Tensor | None]:
    if backward == "autograd.grad":
        return list(torch.autograd.grad(loss, to, allow_unused=True))
    for t in to:
        t.grad = None
    loss.backward() if backward == "Tensor.backward" else torch.autograd.backward(loss)
    return [t.grad for t in to]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_with_and_without_checkpointing(name: str, device: str, within: Within) -> None:
    """A function that ends in each covered operator: its backward reads what is computed again."""
    f, to = FUNCTIONS[name], leaves(name, device)
    with within("error"):
        want = gradients(f(*to).square().sum(), to, "autograd.grad")
        assert any(t is not None for t in want)
        for backward in ("Tensor.backward", "autograd.backward", "autograd.grad"):
            got = gradients(checkpoint(f, *to, use_reentrant=False).square().sum(), to, backward)
            for ours, right in zip(got, want, strict=True):
                assert (ours is None) == (right is None)
                if ours is not None and right is not None:
                    assert_same_bits(ours, right, backward)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("of_mode", [True, False], ids=["forward inside", "backward inside"])
def test_what_runs_again_runs_in_the_context_of_the_forward(
    of_mode: bool, reentrant: bool, device: str
) -> None:
    """Wherever the backward runs, in whatever thread. Forward inside: then the backward is outside."""
    to = leaves("2-D", device)

    def inner(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (40,), b), w).softmax(-1)

    def outer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return checkpoint(inner, x, w, b, use_reentrant=reentrant) * b  # type: ignore[no-any-return]

    def context(on: bool) -> AbstractContextManager[None]:
        return samebits.batch_invariant("error") if on else nullcontext()

    def run(f: Function, in_thread: bool = False) -> list[Tensor | None]:
        for t in to:
            t.grad = None
        with context(of_mode):
            loss = f(*to).square().sum()
        with context(not of_mode):
            if in_thread:
                (started := threading.Thread(target=loss.backward)).start()
                started.join()
            else:
                loss.backward()
        return [t.grad for t in to]

    for in_thread in (False, True)[: 1 + of_mode]:  # other threads are in no context
        want = run(lambda *to: inner(*to) * to[2])
        got = run(lambda *to: checkpoint(outer, *to, use_reentrant=reentrant), in_thread)
        for ours, right in zip(got, want, strict=True):
            assert ours is not None
            assert right is not None
            assert_same_bits(ours, right)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_thread_of_autograds_is_in_the_context_by_its_key_alone(reentrant: bool) -> None:
    """As where a backward, inside the context, runs a checkpoint for the first time."""
    x, w, b = leaves("2-D", "cpu")
    with samebits.batch_invariant("error"):
        want = gradients(F.linear(x, w, b).square().sum(), [x, w, b], "Tensor.backward")
    with ThreadPoolExecutor(1) as pool, with_context(True):
        assert state.on_uncovered is None
        loss = checkpoint(F.linear, x, w, b, use_reentrant=reentrant).square().sum()
        with with_context(False):
            pool.submit(gradients, loss, [x, w, b], "Tensor.backward").result()
    for ours, right in zip((x.grad, w.grad, b.grad), want, strict=True):
        assert ours is not None
        assert right is not None
        assert_same_bits(ours, right)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_runs_again_sees_the_contexts_answer_and_leaves_no_trace(reentrant: bool) -> None:
    seen: list[object] = []

    def f(x: Tensor) -> Tensor:
        seen.append((state.on_uncovered, includes(CONTEXT)))
        return x.exp()

    def forward(on_uncovered: OnUncovered | None) -> Tensor:
        with nullcontext() if on_uncovered is None else samebits.batch_invariant(on_uncovered):
            return checkpoint(f, torch.ones(3, requires_grad=True), use_reentrant=reentrant)  # type: ignore[no-any-return]

    with samebits.batch_invariant():
        pass  # from the first context on
    theirs, ours = forward(None), forward("error")
    with samebits.batch_invariant("ignore"):
        theirs.sum().backward()
        ours.sum().backward()
        assert outermost.context == "ignore"
    outside, error = (None, False), ("error", True)
    assert seen == [outside, error, outside, error]


def test_a_compiler_that_traces_a_checkpoint_without_the_context_is_refused() -> None:
    x, w, b = leaves("2-D", "cpu")

    def f(x: Tensor) -> Tensor:
        with samebits.batch_invariant("error"):
            return checkpoint(F.linear, x, w, b, use_reentrant=False)  # type: ignore[no-any-return]

    old = torch.__version__.startswith("2.11.")
    words = "Observed exception" if old else r"UncoveredError.*checkpoint"
    with pytest.raises(Exception, match=words):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("device", DEVICES)
def test_nested_checkpoints(device: str, within: Within) -> None:
    def inner(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (40,), b), w)

    def outer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = checkpoint(inner, x, w, b, use_reentrant=False).softmax(-1)
        return torch.addmm(b, y, w)

    to = leaves("2-D", device)
    with within("error"):
        want = gradients(torch.addmm(to[2], inner(*to).softmax(-1), to[1]).sum(), to, "autograd.grad")
        got = gradients(checkpoint(outer, *to, use_reentrant=False).sum(), to, "Tensor.backward")
    for ours, right in zip(got, want, strict=True):
        assert_same_bits(ours, right)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_with_main_grad(device: str, within: Within) -> None:
    x = values("normal", (12, 40), torch.float32, 0).to(device).requires_grad_()

    def run(again: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        layer = samebits.nn.Linear(40, 40, device=device)
        norm = nn.LayerNorm(40, device=device)
        layer.weight.main_grad = torch.zeros(40, 40, device=device)

        def f(x: Tensor) -> Tensor:
            return layer(norm(x) * 0.5)  # type: ignore[no-any-return]

        x.grad = None
        with within("error"):
            y = checkpoint(f, x, use_reentrant=False) if again else f(x)
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad, layer.weight.main_grad

    for got, want in zip(run(True), run(False), strict=True):
        assert_same_bits(got, want)


def test_questions_to_pytorch_save_nothing(within: Within) -> None:
    """Checkpointing counts what is saved, and a plan asks no questions."""
    saved: list[Tensor] = []
    x = values("normal", (6, 3, 40), torch.float32, 0).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        within("error"),
    ):
        torch.linalg.vector_norm(x, dim=(1, 2))
    assert saved
    assert not any(t.is_meta for t in saved)
