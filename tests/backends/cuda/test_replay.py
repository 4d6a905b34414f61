"""Replays on a GPU that only notes launches: they launch what the calls themselves would."""

from __future__ import annotations

import gc
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.backends import replay
from samebits.backends.cuda import driver, matmul, runtime
from samebits.backends.modes import CONTEXT, includes
from samebits.ops import (
    _attention,
    _grouped,
    _products,
    activation,
    add_rms_norm,
    cross_entropy,
    embedding,
    experts,
    gated,
    linear_logp,
    logp,
    norm,
    norm_rotary,
    reduce,
    rotary,
    rsqrt,
    softmax,
    topk_routing,
    variance,
)
from samebits.ops._autograd import thread as this_thread
from samebits.ops._operator import Operator
from tests.support.fake_gpu import FakeGpu, fake_gpu

needs_extension = pytest.mark.skipif(not replay.available, reason="the extension was not built")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KEY, FMA = "TENSOR_CORE:mma", "FMA:fma"


def test_the_extension_was_built() -> None:
    assert replay.available or shutil.which("cc") is None, "install with pip install -e ."


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    if not replay.available:
        pytest.skip("the extension was not built")
    with fake_gpu() as found:
        yield found


def t(*shape: int, dtype: torch.dtype = BF16, gap: int = 0) -> Tensor:
    """A matrix whose rows are `gap` elements apart."""
    return torch.ones(*shape[:-1], shape[-1] + gap, dtype=dtype)[..., : shape[-1]]


def f(*shape: int) -> Tensor:
    return t(*shape, dtype=F32)


def _attend(
    *shape: int, dtype: torch.dtype = BF16, backward: bool = False, packed: bool = False, mask: Any = None
) -> Any:
    B, T, H, G, D = shape
    q, k, v = t(B, T, H * G, D, dtype=dtype), t(B, T, H, D, dtype=dtype), t(B, T, H, D, dtype=dtype)
    if packed:  # q, k and v lie side by side
        q, k, v = t(B, T, 3 * H, D, dtype=dtype).split(H, 2)
    right = 0 if mask is None else -1
    rest = (mask, *(None,) * 6, -1, right, "last", 0.125, 0.0, KEY if dtype != F32 else FMA)
    if not backward:
        return q, k, v, *rest
    out, lse = t(B, T, q.shape[2], D, dtype=dtype), t(B, q.shape[2], T, dtype=F32)
    return out.clone(), out, lse, False, q, k, v, *rest


def _absorbed() -> Any:
    q, k = t(2, 4, 16, 576), t(2, 640, 1, 576)
    return q, k, k[..., :512], *(None,) * 7, -1, 0, "last", 0.125, 0.0, KEY


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


CALLS: dict[str, tuple[Operator, Callable[[], tuple[Any, ...]]]] = {
    "linear": (_products.linear, lambda: (t(16, 256), t(512, 256), None, None, KEY)),
    "linear, bias, 3-D": (_products.linear, lambda: (t(2, 8, 256), t(512, 256), t(512), None, KEY)),
    "linear, one row": (_products.linear, lambda: (t(256), t(512, 256), None, None, KEY)),
    "linear, float32": (
        _products.linear,
        lambda: (t(130, 72, dtype=F32), t(70, 72, dtype=F32), None, None, FMA),
    ),
    "matmul": (_products.product, lambda: (t(300, 256), t(256, 512), None, F32, KEY)),
    "matmul, no tile": (_products.product, lambda: (t(3, 37), t(37, 5), t(5, dtype=F32), BF16, KEY)),
    "matmul, strides": (_products.product, lambda: (t(64, 40, gap=8), t(80, 40).mT, None, BF16, KEY)),
    "matmul, of itself": (_products.product, lambda: ((x := t(64, 64)), x.mT, None, BF16, KEY)),
    "bmm": (_products.product, lambda: (t(4, 16, 64), t(4, 64, 24), None, BF16, KEY)),
    "bmm, tiny": (_products.product, lambda: (t(40, 8, 8), t(40, 8, 8), None, BF16, KEY)),
    "addbmm": (_products.addbmm, lambda: (None, t(1, 3, 64, 32).mT, t(1, 3, 64, 48), None, BF16, KEY)),
    "addbmm, gaps": (_products.addbmm, lambda: (None, t(1, 1, 37, 21).mT, t(1, 1, 37, 48), None, F32, KEY)),
    "grouped_rows": (
        _grouped.grouped_rows,
        lambda: (t(40, 64), t(3, 24, 64).mT, t(3, 24), ints(3), None, BF16, KEY),
    ),
    "grouped_rows, float32": (
        _grouped.grouped_rows,
        lambda: (f(40, 64), f(3, 64, 24), None, ints(3), ints(40), F32, FMA),
    ),
    "grouped_terms": (
        _grouped.grouped_terms,
        lambda: (t(40, 24).mT, t(40, 64), ints(3), ints(40), F32, KEY),
    ),
    "grouped_terms, one sequence": (
        _grouped.grouped_terms,
        lambda: (t(24, 40), t(40, 64), ints(3), None, BF16, FMA),
    ),
    "embedding": (embedding._operator, lambda: (t(50, 256), ids(3, 5), -1)),
    "embedding, gaps": (embedding._operator, lambda: (t(50, 35, gap=8), ints(7), -1)),
    "softmax": (softmax._operator, lambda: (t(5, 300), False)),
    "log_softmax": (softmax._operator, lambda: (t(5, 300, gap=4), True)),
    "embedding backward": (embedding._gradient, lambda: (t(15, 256), ids(15), 50, -1)),
    "softmax backward": (softmax._gradient, lambda: (t(5, 300), t(5, 300), False)),
    "norm": (norm._operator, lambda: (t(7, 512), t(512), None, 1e-6, False)),
    "norm, bias": (norm._operator, lambda: (t(7, 512), t(512), t(512), 1e-5, True)),
    "norm backward": (
        norm._gradient,
        lambda: (t(7, 512), t(7, 512), t(512), t(7, dtype=F32), t(7, dtype=F32)),
    ),
    "norm columns": (
        norm._column_gradients,
        lambda: (t(7, 512), t(7, 512), t(7, dtype=F32), t(7, dtype=F32), BF16),
    ),
    "norm gradients": (
        norm._gradients,
        lambda: (t(7, 512), t(7, 512), t(512), t(7, dtype=F32), t(7, dtype=F32), BF16),
    ),
    "sum": (reduce._operator, lambda: (t(9, 1000), False)),
    "mean": (reduce._operator, lambda: (t(9, 1001), True)),
    "sum of a long row": (reduce._operator, lambda: (t(2, 40_000), False)),
    "2-norm": (variance._norm, lambda: (t(9, 1000),)),
    "2-norm backward": (variance._norm_gradient, lambda: (t(1, 9)[0], t(9, 1000), t(1, 9)[0])),
    "add_rms_norm": (
        add_rms_norm._operator,
        lambda: (t(7, 512), t(7, 512), t(512), 1e-6, 0.0, False, BF16),
    ),
    "add_rms_norm, of heads": (
        add_rms_norm._operator,
        lambda: (t(5, 9, 64)[:, 1:7], None, t(64, dtype=F32), 1e-6, 1.0, True, BF16),
    ),
    "add_rms_norm backward": (
        add_rms_norm._gradient,
        lambda: (t(7, 512), t(7, 512), t(7, 512), t(512), 1e-6, 0.0, False, True),
    ),
    "rotary": (
        rotary._operator,
        lambda: (t(5, 8, 64), t(5, 2, 64), t(5, 32), t(5, 32), None, 32, "halves", "rounded"),
    ),
    "rotary, by positions": (
        rotary._operator,
        lambda: (t(5, 8, 64), None, f(50, 32), f(50, 32), ids(5), 16, "pairs", "wide"),
    ),
    "rotary backward": (
        rotary._gradient,
        lambda: (t(5, 8, 64), t(5, 2, 64), t(5, 32), t(5, 32), None, 32, "halves", "rounded"),
    ),
    "rotary backward, of keys": (
        rotary._gradient,
        lambda: (None, t(5, 2, 64), t(5, 32), t(5, 32), None, 32, "halves", "split"),
    ),
    "norm_rotary": (
        norm_rotary._operator,
        lambda: (
            *(t(5, 8, 64), t(5, 2, 64), t(1, 64)[0], t(1, 64)[0], t(5, 32), t(5, 32), None),
            *(1e-6, 0.0, False, 32, "halves", "rounded"),
        ),
    ),
    "norm_rotary, apart": (
        norm_rotary._operator,
        lambda: (
            *(t(5, 8, 320), None, None, None, t(5, 160), t(5, 160), None),
            *(1e-6, 0.0, False, 160, "halves", "rounded"),
        ),
    ),
    "norm_rotary backward": (
        norm_rotary._gradient,
        lambda: (
            *(t(5, 8, 64), t(5, 2, 64), t(5, 8, 64), t(5, 2, 64), t(1, 64)[0], t(1, 64)[0]),
            *(t(5, 32), t(5, 32), None, 1e-6, 0.0, False, 32, "halves", "rounded", True, False),
        ),
    ),
    "gated": (gated._operator, lambda: (t(7, 64), None, "silu", 7.0, 1.7, False, False)),
    "gated, apart": (gated._operator, lambda: (t(7, 64, gap=8), t(7, 64), "gelu", 7.0, 1.7, True, False)),
    "gated backward": (
        gated._gradient,
        lambda: (t(7, 32), t(7, 64), None, "gpt_oss", 7.0, 1.7, False, True, True, True),
    ),
    "gated backward, apart": (
        gated._gradient,
        lambda: (t(7, 64), t(7, 64, gap=8), t(7, 64), "silu", 7.0, 1.7, True, False, True, False),
    ),
    "activation": (activation._operator, lambda: (t(7, 64), "gelu_tanh")),
    "activation backward": (activation._gradient, lambda: (t(7, 64), t(7, 64), "silu")),
    "rsqrt": (rsqrt._operator, lambda: (f(7, 1),)),
    "gather_logp": (logp._of_ids, lambda: (t(6, 700), ids(6, 3), KEY)),
    "logp": (logp._operator, lambda: (t(6, 700, dtype=F32), ids(6), -100, KEY)),
    "logp backward": (
        logp._gradient,
        lambda: (
            *(t(6, dtype=F32), t(6, 700, dtype=F32), ids(6), t(6, dtype=F32), t(6, dtype=F32)),
            -100,
            KEY,
        ),
    ),
    "cross-entropy": (cross_entropy._operator, lambda: (t(6, 700), ids(6), -100, 1, False, KEY)),
    "cross-entropy, wide": (cross_entropy._operator, lambda: (t(6, 700), ids(6), -100, 1, True, KEY)),
    "cross-entropy, float32": (cross_entropy._operator, lambda: (f(6, 700), ids(6), -100, 0, True, KEY)),
    "cross-entropy backward": (
        cross_entropy._gradient,
        lambda: (t(1)[0], t(6, 700), ids(6), t(0), t(0), ids(1)[0], -100, 1, False, KEY),
    ),
    "cross-entropy backward, wide": (
        cross_entropy._gradient,
        lambda: (f(1)[0], t(6, 700), ids(6), f(6), f(6), ids(1)[0], -100, 1, True, KEY),
    ),
    "cross-entropy backward, float32": (
        cross_entropy._gradient,
        lambda: (f(6), f(6, 700), ids(6), f(6), f(6), ids(0), -100, 0, True, KEY),
    ),
    "linear_logp": (
        linear_logp._operator,
        lambda: (t(6, 64), t(700, 64), None, ids(6), None, None, -100, 1.0, True, False, KEY),
    ),
    "linear_logp that keeps logits": (
        linear_logp._operator,
        lambda: (t(6, 64), t(701, 64), None, ids(6), None, None, -100, 1.0, False, True, KEY),
    ),
    "attention": (_attention._operator, lambda: _attend(1, 300, 2, 2, 64)),
    "attention, packed": (_attention._operator, lambda: _attend(1, 300, 2, 1, 128, packed=True)),
    "attention, float32": (_attention._operator, lambda: _attend(2, 33, 1, 2, 40, dtype=F32)),
    "attention, masked": (_attention._operator, lambda: _attend(1, 304, 2, 2, 64, mask=t(1, 1, 304, 304))),
    "attention, a mask with gaps between rows": (
        _attention._operator,
        lambda: _attend(2, 300, 2, 2, 64, mask=t(1, 4, 300, 300, dtype=F32, gap=4)),
    ),
    "attention, a mask that is gathered": (
        _attention._operator,
        lambda: _attend(1, 301, 2, 2, 64, mask=t(1, 1, 301, 301)),
    ),
    "attention, absorbed": (_attention._operator, _absorbed),
    "topk_routing": (
        topk_routing._operator,
        lambda: (f(5, 64), f(64), 4, "sigmoid", 4, 2, True, 1e-20, 2.5, F32),
    ),
    "route": (experts._route, lambda: (ids(40), 8, 0)),
    "combine, weights in float32": (experts._combine, lambda: (t(40, 64), f(10, 4), ids(40), ids(40), 4)),
    "attention backward": (_attention._gradient, lambda: _attend(1, 300, 2, 2, 64, backward=True)),
    "attention backward, float32": (
        _attention._gradient,
        lambda: _attend(2, 33, 1, 2, 40, dtype=F32, backward=True),
    ),
}


def geometry(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(geometry, x))
    return x if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype, x._is_view())


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_launches_what_the_call_does(gpu: FakeGpu, name: str) -> None:
    operator, make = CALLS[name]
    call: Any = operator._cuda
    call.recipes.clear()
    kept = [make() for _ in range(5)]  # all at addresses of their own
    for args in kept[:2]:
        gpu.start()
        call(*args)
    (recipe,) = call.recipes.values()
    assert recipe, "it is not replayed"
    for args in kept[2:]:
        gpu.start()
        with gpu.allocates_all():
            want, launched = geometry(call.run(*args)), gpu.log
        assert launched
        gpu.start()
        assert geometry(call(*args)) == want
        assert gpu.log == launched
    assert list(call.recipes.values()) == [recipe]


@pytest.mark.parametrize("name", CALLS)
def test_a_recipe_alone_launches_what_the_call_does(gpu: FakeGpu, name: str) -> None:
    """Without a key, for arguments at other addresses that overlap alike."""
    operator, make = CALLS[name]
    call: Any = operator._cuda
    call.recipes.clear()
    kept = [make() for _ in range(4)]
    assert call.recipe(*kept[0]) is None
    for args in kept[:2]:
        call(*args)
    recipe = call.recipe(*kept[0])
    assert recipe is not None
    for args in kept[2:]:
        gpu.start()
        want, launched = geometry(call(*args)), gpu.log
        gpu.start()
        assert geometry(recipe(*args)) == want
        assert gpu.log == launched
    with pytest.raises(TypeError, match="arguments, got 0"):
        recipe()


def test_replays_read_offsets_of_equal_sequences_that_are_kept(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Any = _products.addbmm._cuda

    def run(length: int) -> bytes:
        gpu.start()
        call(None, t(1, 3, length, 32).mT, t(1, 3, length, 48), None, BF16, KEY)
        ((*_, packed),) = (entry for entry in gpu.log if len(entry) == 4)
        return bytes(packed)

    call.recipes.clear()
    run(35)
    assert not matmul._kept_offsets
    run(35)
    (kept,) = matmul._kept_offsets.values()
    assert kept.tolist() == [0, 35, 70, 105]
    assert kept.data_ptr().to_bytes(8, "little") in run(35)
    assert all(call.recipes.values())
    monkeypatch.setattr(matmul, "_MOST_KEPT", 1)  # then others are written in each call
    for _ in range(3):
        run(37)
    assert [*matmul._kept_offsets.values()] == [kept]
    assert [bool(recipe) for recipe in call.recipes.values()] == [True, False]


def test_a_recipe_refuses_what_overlaps_otherwise(gpu: FakeGpu) -> None:
    """One vector was weight and bias. Two are not; the plan's function then runs without the recipe."""
    call: Any = norm._operator._cuda
    call.recipes.clear()
    x, w, b = t(16, 256), t(256), t(256)
    for _ in range(2):
        call(x, w, w, 1e-5, True)
    recipe = call.recipe(x, w, w, 1e-5, True)
    gpu.start()
    assert recipe(x, w, b, 1e-5, True) is NotImplemented
    assert gpu.log == []
    leaves = [v.requires_grad_() for v in (x, w, b)]
    recorded = norm._operator._planned(norm._operator._recorded, (x, w, w, 1e-5, True), 0)
    y = recorded(*leaves, 1e-5, True)
    assert isinstance(y, Tensor)
    assert y.grad_fn is not None
    other = [launch[-1] for launch in gpu.log]
    gpu.start()
    call(x, w, b, 1e-5, True)
    assert other == [launch[-1] for launch in gpu.log]


def test_a_recipe_refuses_a_pointer_into_either_of_two(gpu: FakeGpu) -> None:
    """One matrix was both arguments, and a launch got a pointer into it."""

    def second(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = reduce._operator._cuda.run(y[1:], False)
        return found

    call: Any = replay.replayed(second)
    x, y = t(5, 256), t(5, 256)
    for _ in range(2):
        call(x, x)
    recipe = call.recipe(x, x)
    gpu.start()
    assert recipe(x, y) is NotImplemented
    assert gpu.log == []
    want = geometry(second(y, y)), gpu.log
    gpu.start()
    assert (geometry(recipe(y, y)), gpu.log) == want


def test_forgetting_reaches_objects_that_python_does_not_track(gpu: FakeGpu) -> None:
    """Long-lived servers call ``gc.freeze``."""
    x, w = t(16, 256), t(256, 256)
    for _ in range(4):
        samebits.matmul(x, w)
    gc.freeze()
    try:
        replay.forget()
        gc.unfreeze()
        every = [found for found in gc.get_objects() if type(found) is replay._replay.Replay]
    finally:
        gc.freeze()  # as after the collection of tests
    assert {id(found) for found in every} == {id(found) for found in replay._replays}
    assert not any(found.recipes for found in every)


def test_calls_of_plans_return_one_result(gpu: FakeGpu) -> None:
    """Autograd would fill the gradients of the others with zeros, by launches."""
    x, w, b = (v.requires_grad_() for v in (t(16, 256), t(256), t(256)))
    ids, heads = torch.arange(16), x.view(1, 4, 16, 64)
    calls: list[Callable[[], Tensor]] = [
        lambda: F.cross_entropy(x, ids),
        lambda: F.layer_norm(x, (256,), w, b),
        lambda: F.layer_norm(x, (256,), w, w),
        lambda: F.rms_norm(x, (256,), w),
        lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2),
    ]
    replay.forget()
    with samebits.batch_invariant("error"):
        for call in calls:
            launched, nodes = [], []
            for _ in range(6):
                gpu.start()
                out = call()
                torch.autograd.grad(out, [x, w, b], torch.ones_like(out), allow_unused=True)
                launched.append([launch[:2] for launch in gpu.log])
                node: Any = out.grad_fn
                while "Recorded" not in type(node).__name__:
                    node = node.next_functions[0][0]
                nodes.append(len(node._input_metadata))
            assert launched == launched[:1] * 6
            assert nodes[0] > 1
            assert nodes[-1] == 1


# Of x[16, 256], w[256, 256] and b[256].
RECORDED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, w, b: x.softmax(-1),
    "log_softmax": lambda x, w, b: x.log_softmax(-1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (256,), b, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (256,), b),
    "linear": lambda x, w, b: F.linear(x, w, b),
    "mm": lambda x, w, b: x @ w,
    "bmm": lambda x, w, b: torch.bmm(x.view(2, 8, 256), w.view(2, 256, 128)),
    "gated": lambda x, w, b: samebits.gated(x),
    "cross_entropy": lambda x, w, b: F.cross_entropy(x, torch.arange(16)),
    "sum": lambda x, w, b: x.sum(-1),
    "sum of all": lambda x, w, b: w.sum(),
    "sum of few terms": lambda x, w, b: x.view(4, 4, 256).sum(1),
    "embedding": lambda x, w, b: F.embedding(torch.arange(16), w),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(*(x.view(1, 4, 16, 64),) * 3, is_causal=True),
}


def backwards() -> list[Any]:
    """What was found of the backwards of plans."""
    of_plans = (r for r in replay._replays if r.run.__module__ == "samebits.ops._autograd")
    return [found for r in of_plans for found in r.recipes.values()]


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("name", RECORDED)
def test_backwards_of_plans_are_replayed(gpu: FakeGpu, name: str, needed: tuple[bool, ...]) -> None:
    x, w, b = (
        v.requires_grad_(one) for v, one in zip((t(16, 256), t(256, 256), t(256)), needed, strict=True)
    )
    inputs = [v for v in (x, w, b) if v.requires_grad]
    if not RECORDED[name](x, w, b).requires_grad:
        pytest.skip("nothing is recorded")
    replay.forget()
    seen = []
    with samebits.batch_invariant("error"):
        for _ in range(8):  # the third has a plan, whose backward is recorded in the fifth
            gpu.start()
            out = RECORDED[name](x, w, b)
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
            seen.append((gpu.log, [g if g is None else (g.shape, g.stride(), g.dtype) for g in grads]))
        assert [launch[:2] for launch in seen[-1][0]] == [launch[:2] for launch in seen[0][0]]
        assert [grads for _, grads in seen] == [seen[0][1]] * 8
        assert [type(found).__name__ for found in backwards()] == ["Recipe"]


def test_backwards_of_means_are_not_replayed(gpu: FakeGpu) -> None:
    x = t(16, 256).requires_grad_()
    replay.forget()
    with samebits.batch_invariant("error"):
        for _ in range(8):
            gpu.start()
            torch.autograd.grad(x.mean(-1), [x], t(1, 16)[0])
    assert not backwards()


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "mm"])
def test_gradients_of_gradients_behind_plans(gpu: FakeGpu, name: str) -> None:
    x, w, b = (v.requires_grad_() for v in (t(16, 256), t(256, 256), t(256)))
    replay.forget()
    with samebits.batch_invariant("error"):
        for _ in range(6):
            gpu.start()
            out = RECORDED[name](x, w, b)
            (grad,) = torch.autograd.grad(out, [x], torch.ones_like(out), create_graph=True)
            assert grad.requires_grad
        assert not backwards()


def test_a_backward_reads_what_hooks_of_saved_tensors_give_back(gpu: FakeGpu) -> None:
    x, other = t(16, 256).requires_grad_(), t(16, 256)
    replay.forget()
    with samebits.batch_invariant("error"):
        for give in (lambda y: y,) * 6 + (lambda y: other,):
            gpu.start()
            with torch.autograd.graph.saved_tensors_hooks(lambda y: y, give):
                out = x.softmax(-1)
            gpu.log.clear()
            torch.autograd.grad(out, [x], torch.ones_like(out))
            ((*_, packed),) = gpu.log
            read = struct.unpack("3P", packed[:24])
            assert (other if give(x) is other else out).data_ptr() in read
    assert [type(found).__name__ for found in backwards()] == ["Recipe"]


def test_plans_return_several_results_where_the_call_does(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logp, "watch_target", lambda *_: lambda: None)  # it reads the GPU's answer
    x, weight = t(16, 256).requires_grad_(), t(512, 256).requires_grad_()
    launched = []
    for _ in range(6):
        gpu.start()
        results = samebits.linear_logp(x, weight, torch.arange(16), return_entropy=True)
        torch.autograd.grad(results, [x, weight], results)
        torch.autograd.grad(samebits.linear_logp(x, weight, torch.arange(16)).sum(), [x])
        launched.append([launch[:2] for launch in gpu.log])
    assert launched == launched[:1] * 6


@pytest.mark.parametrize("form", ["context", "process"])
@pytest.mark.parametrize("records", [False, True])
def test_an_error_leaves_the_mode_as_it_was(gpu: FakeGpu, form: str, records: bool) -> None:
    x, w = t(16, 256).requires_grad_(records), t(256).requires_grad_(records)
    replay.forget()
    with samebits.batch_invariant() if form == "context" else samebits.set_batch_invariant_mode(True):
        for _ in range(5):  # a call, its recording, its replays
            gpu.start()
            gpu.codes = [700]
            with pytest.raises(driver.LaunchError, match="error 700"):
                F.rms_norm(x, (256,), w)
            assert includes(CONTEXT) == (form == "context")
            assert not this_thread.plain
            F.rms_norm(x, (256,), w)
            assert [launch[0] for launch in gpu.log] == ["rows.cu"]


def other(x: Any) -> Iterator[Any]:
    """What must have a recipe of its own in place of the argument `x`."""
    if isinstance(x, Tensor) and x.ndim == 2 and x.dtype == BF16:
        yield t(x.shape[0], x.shape[1], gap=8)
        yield torch.ones(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        yield x.half()
    elif isinstance(x, bool):
        yield not x
    elif isinstance(x, float):
        yield x + 1
        yield -x


@pytest.mark.parametrize("name", ["softmax", "norm", "mean", "linear, bias, 3-D", "matmul, of itself"])
def test_a_recipe_serves_only_its_kind(gpu: FakeGpu, name: str) -> None:
    """Other dtypes, strides, alignments, numbers, and tensors that are not each other, have their own."""
    operator, make = CALLS[name]
    call: Any = operator._cuda
    call.recipes.clear()
    for _ in range(2):
        call(*make())
    for i, x in enumerate(make()):
        for y in other(x):
            args = (*make()[:i], y, *make()[i + 1 :])
            if len({a.dtype for a in args if isinstance(a, Tensor)}) > 1 and name not in ("norm", "softmax"):
                continue
            gpu.start()
            want, launched = geometry(call.run(*args)), gpu.log
            for _ in range(3):
                gpu.start()
                assert geometry(call(*args)) == want
                assert gpu.log == launched, (i, y)


def replays(run: Callable[..., Any], *args: Any, views: bool = False) -> str | None:
    """Why calls of `run` are not replayed; None if they are."""
    recording = []
    made = replay.Recording.__init__

    def init(self: replay.Recording, *args: Any) -> None:
        recording.append(self)
        made(self, *args)

    call: Any = replay.replayed(run, views=views)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Recording, "__init__", init)
        for _ in range(4):
            call(*args)
    (found,) = recording
    ((recipe),) = call.recipes.values()
    assert (recipe is None) == bool(found.refused)
    return found.refused or None


def test_what_cannot_be_repeated_is_refused(gpu: FakeGpu) -> None:
    x = t(4, 256)
    out = runtime.empty((4,), BF16, 0)

    def row_sum(x: Tensor) -> Tensor:
        found: Tensor = reduce._operator._cuda.run(x, False)
        return found

    assert replays(row_sum, x) is None
    assert "aten.add" in str(replays(lambda x: row_sum(x + 1), x))
    assert "aten.zero_" in str(replays(lambda x: row_sum(x).zero_(), x))
    assert "no tensor" in str(replays(lambda x: row_sum(out.expand(4, 4)), x))
    assert "no allocation" in str(replays(lambda x: (row_sum(x), x)[1], x))
    assert "no allocation" in str(replays(lambda x: row_sum(x)[1:], x))
    assert "nothing was launched" in str(replays(lambda x: runtime.empty((4,), BF16, 0), x))
    assert "one tensor" in str(replays(lambda x: (row_sum(x),) * 2, x))
    assert replays(lambda x: (row_sum(x), None, row_sum(x)), x) is None
    assert replays(lambda x: row_sum(x.expand(4, 256).view(2, 512)), x) is None


def test_arguments_that_overlap_in_part_are_refused(gpu: FakeGpu) -> None:
    """A pointer into both would be either's."""

    def second(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = reduce._operator._cuda.run(y[1:], False)
        return found

    room = t(5, 256)
    assert "several" in str(replays(second, room[:4], room[1:5]))
    assert replays(second, t(4, 256), t(4, 256)) is None


def test_a_recipe_serves_a_distance_that_decided(gpu: FakeGpu) -> None:
    """Gates and factors were in turns in one tensor, and a launch got the gates' address alone."""
    call: Any = gated._operator._cuda
    call.recipes.clear()
    options = "silu", float("inf"), 1.702, False, False
    x, y = t(8, 64), t(8, 64)

    def launched(one: Tensor, other: Tensor) -> Any:
        gpu.start()
        call(one[:, ::2], other[:, 1::2], *options)
        (launch,) = gpu.log
        (spec,) = gpu.specs
        values = struct.unpack("@" + spec.params, launch[3])
        return dict(spec.constants)["FORM"], values[:2]

    for one in (x, x, x, y):
        assert launched(one, one) == ("ALTERNATING", (one.data_ptr(), 0))
    assert call.recipe(x[:, ::2], x[:, 1::2], *options) is not None
    form, addresses = launched(x, y)
    assert form == "APART"
    assert 0 not in addresses

    def of_copies(one: Tensor, other: Tensor) -> Tensor:
        copies = runtime.empty((16, 64), BF16, 0)
        replay.tied(copies[:8], other)
        found: Tensor = reduce._operator._cuda.run(one, False)
        return found

    assert "no arguments" in str(replays(of_copies, x, y))


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_grouped_products_are_replayed(gpu: FakeGpu, transposed: bool) -> None:
    call: Any = _grouped._rows_gradients_on_gpu
    call.recipes.clear()
    a, b, grad = t(40, 64), t(3, 64, 24), t(40, 24)
    for _ in range(3):
        gpu.start()
        call(grad, a, b, ints(3), ints(40), BF16, BF16, transposed, KEY)
    assert all(call.recipes.values())
    of_weight, of_bias = "grouped_sm90", "tensor_core"  # TMA cannot read ones without strides
    assert [entry for _, entry, *_ in gpu.log] == [
        *("grouped_sm90", "grouped_runs", of_weight, "grouped_runs", of_bias)
    ]


def test_zeros_are_replayed(gpu: FakeGpu) -> None:
    def call(x: Tensor) -> Tensor:
        found = runtime.zeros((3, 5), F32, 0)
        reduce._operator._cuda.run(x, False)
        return found

    x = t(4, 256)
    assert replays(call, x) is None
    gpu.start()
    call(x)
    want = gpu.log
    again: Any = replay.replayed(call)
    for _ in range(3):
        gpu.start()
        again(x)
        assert gpu.log == want
    assert want[0][1:] == (0, 60)


def test_a_thread_without_a_context_gets_one(gpu: FakeGpu) -> None:
    call: Any = reduce._operator._cuda
    call.recipes.clear()
    x = t(4, 256)
    for _ in range(3):
        call(x, False)
    gpu.start()
    gpu.codes = [driver.INVALID_CONTEXT]
    call(x, False)
    assert [entry[0] for entry in gpu.log] == ["context", "rows.cu"]
    gpu.codes = [driver.INVALID_CONTEXT] * 2
    with pytest.raises(driver.LaunchError, match=r"rows\.cu on cuda:0, block 256.*error 201"):
        call(x, False)
    gpu.codes = [700]
    with pytest.raises(driver.LaunchError, match="error 700"):
        call(x, False)
    call(x, False)


def test_an_error_of_a_tensor_map_is_that_of_its_kernel(gpu: FakeGpu) -> None:
    call: Any = _products.linear._cuda
    call.recipes.clear()
    args = CALLS["linear"][1]()
    for _ in range(3):
        gpu.start()
        call(*args)
    want = gpu.log
    assert len(want) == 1
    gpu.map_codes = [700]
    with pytest.raises(driver.LaunchError, match=rf"{want[0][0]}.*error 700"):
        call(*args)
    gpu.start()
    gpu.map_codes = [driver.INVALID_CONTEXT]  # then both maps have the addresses of this call
    call(*(x.clone() if isinstance(x, Tensor) else x for x in args))
    (context, launch) = gpu.log
    assert context[0] == "context"
    assert launch[:3] == want[0][:3]
    assert launch[3] != want[0][3]


def test_modes_and_other_devices_see_the_call_itself(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function mode, or a dispatch mode, sees what is allocated."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **{name: x for name, x in (kwargs or {}).items() if name != "device"})

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    seen = []

    def run(x: Tensor, mean: bool) -> Any:
        seen.append(x)
        return reduce._operator._cuda.run(x, mean)

    call: Any = replay.replayed(run)
    x = t(4, 256)
    for _ in range(4):
        call(x, False)
    assert len(seen) == 2
    for mode in (Function, Dispatch):
        with mode():
            call(x, False)
    assert len(seen) == 4
    call(torch.nn.Parameter(x), False)
    assert len(seen) == 4
    call(Tensor._make_subclass(type("Own", (Tensor,), {}), x), False)
    assert len(seen) == 5


def _within(context: Callable[[], Any]) -> Callable[[Callable[[], Any]], None]:
    def state(call: Callable[[], Any]) -> None:
        with context():
            call()

    return state


@contextmanager
def _autocast_on_gpus() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)  # torch.autocast asks for a GPU
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def _transformed(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], None]:
    return lambda call: transform(lambda y: (call(), y.sum())[1])(torch.ones(2))


EXTRAORDINARY: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "autocast on CPUs": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast on GPUs": _within(_autocast_on_gpus),
    "vmap": _transformed(torch.func.vmap),
    "grad": _transformed(torch.func.grad),
    "grad of grad": _transformed(lambda f: torch.func.grad(lambda y: torch.func.grad(f)(y).sum())),
    "jvp": _transformed(lambda f: lambda y: torch.func.jvp(f, (y,), (y,))),
    "vmap of grad": lambda call: torch.func.vmap(torch.func.grad(lambda y: (call(), y)[1]))(torch.ones(2)),
    "functionalize": _transformed(torch.func.functionalize),
    "jit.trace": lambda call: torch.jit.trace(lambda y: (call(), y + 1)[1], torch.ones(2), check_trace=False),
    "a level of forward AD": _within(torch.autograd.forward_ad.dual_level),
    "a profile": _within(torch.autograd.profiler.profile),
    "a chosen backend": _within(lambda: samebits.use_backend("cuda")),
}
ORDINARY = {
    "no_grad": _within(torch.no_grad),
    "inference_mode": _within(torch.inference_mode),
    "no autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)),
}


def _counted(*questions: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """A public function, whose second call is recorded, and the arguments of the calls that ran."""
    ran: list[Tensor] = []

    def run(x: Tensor) -> Any:
        ran.append(x)
        return reduce._operator._cuda.run(x, False) if len(ran) < 3 else x

    return replay.replayed(run, *questions, public=True), ran


@pytest.mark.parametrize("state", EXTRAORDINARY)
def test_what_may_do_more_is_not_replayed(gpu: FakeGpu, state: str) -> None:
    """Replays ask PyTorch's functions for C++ about the thread's state."""
    call, ran = _counted()
    x = t(4, 256)
    for before in (2, 3):
        for _ in range(3):
            call(x)
        assert len(ran) == before
        EXTRAORDINARY[state](lambda: call(x))
        assert len(ran) == before + 1


@pytest.mark.parametrize("state", ORDINARY)
def test_other_states_are_replayed(gpu: FakeGpu, state: str) -> None:
    call, ran = _counted()
    x = t(4, 256)
    for _ in range(4):
        ORDINARY[state](lambda: call(x))
    assert len(ran) == 2


@pytest.mark.parametrize(("answer", "runs"), [(False, 2), (-1, 2), (True, 4), (0, 4), (1, 4)])
def test_the_first_backward_is_one(gpu: FakeGpu, answer: Any, runs: int) -> None:
    """PyTorch numbers backwards from 0 on, and says -1 outside of them."""
    call, ran = _counted(lambda: answer)
    x = t(4, 256)
    for _ in range(4):
        call(x)
    assert len(ran) == runs


def test_many_threads_replay_one_recipe(gpu: FakeGpu) -> None:
    call: Any = softmax._operator._cuda
    call.recipes.clear()
    x = t(4, 256)
    call(x, False)
    call(x, False)
    gpu.start()
    threads = [threading.Thread(target=lambda: [call(x, False) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.log) == 200
    assert len({entry[:2] for entry in gpu.log}) == 1


@needs_extension
def test_the_extension_refuses_recipes_that_do_not_hold_together() -> None:
    launch = (1, bytes(256), ())
    for bad in (
        (0, 1, (), ((1, bytes(256), ((250, 0, False, 0),)),), (None,), 1),  # beyond the bytes
        (0, 1, (), ((1, bytes(256), ((0, 1, False, 0),)),), (None,), 1),  # no such tensor
        (0, 1, (), ((1, "bytes", ()),), (None,), 1),
        (0, 47, ((),) * 2, (launch,), (None,), 1),
        (0, 1, (), ((1, bytes(1 << 16), ()),), (None,), 1),
        (0, 1),
    ):
        with pytest.raises((TypeError, ValueError)):
            replay._replay.Recipe(*bad)
    replay._replay.Recipe(0, 1, (), (launch,), (None,), 0)
