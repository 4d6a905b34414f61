"""The operations within PyTorch: autograd, torch.library, torch.compile, autocast, threads, imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import samebits
from samebits import AMPERE, FMA, HOPPER, TENSOR_CORE
from samebits.mode import recorded
from samebits.ops import _checks, _memory, _operator
from samebits.ops.reduce import sum as row_sum
from samebits.testing import assert_same_bits, values
from tests.support.compiled import assert_compiles
from tests.support.threads import in_threads

CU = torch.tensor([0, 3, 3, 8])
TARGET = torch.tensor([0, 8, -100, 3, 3, 1])
OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)  # of 8 rows
OF_ROWS = torch.tensor([1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return values("normal", shape, dtype, seed + sum(shape)).requires_grad_()


CONTRACT_KEYS = {torch.float32: FMA.key, torch.bfloat16: TENSOR_CORE.on(HOPPER).key}
OPERATORS: dict[str, Callable[[torch.dtype, str], tuple[Any, ...]]] = {
    "matmul": lambda d, c: (leaf(3, 5, dtype=d), leaf(5, 4, dtype=d), leaf(4, dtype=d), d, c),
    "matmul f32 out": lambda d, c: (leaf(3, 5, dtype=d), leaf(5, 4, dtype=d), None, torch.float32, c),
    "matmul batched": lambda d, c: (leaf(2, 1, 3, 5, dtype=d), leaf(4, 5, 4, dtype=d), None, d, c),
    "linear": lambda d, c: (leaf(2, 8, 5, dtype=d), leaf(4, 5, dtype=d), leaf(4, dtype=d), None, c),
    "linear packed": lambda d, c: (leaf(8, 5, dtype=d), leaf(4, 5, dtype=d), None, CU, c),
    "wide_linear": lambda d, c: (leaf(2, 8, 5, dtype=d), leaf(4, 5, dtype=d), leaf(4, dtype=d), None, c),
    "wide_linear packed": lambda d, c: (leaf(8, 5, dtype=d), leaf(4, 5, dtype=d), leaf(4, dtype=d), CU, c),
    "addbmm": lambda d, c: (leaf(2, 3, 4), leaf(2, 6, 3, 5, dtype=d), leaf(2, 6, 5, 4, dtype=d), None, d, c),
    "addbmm packed": lambda d, c: (None, leaf(1, 1, 3, 8, dtype=d), leaf(1, 1, 8, 4, dtype=d), CU, d, c),
    "addbmm_": lambda d, c: (
        torch.zeros(2, 3, 4),
        leaf(2, 6, 3, 5, dtype=d).detach(),
        leaf(2, 6, 5, 4, dtype=d).detach(),
        None,
        c,
    ),
    "grouped_rows": lambda d, c: (
        *(leaf(8, 5, dtype=d), leaf(3, 5, 4, dtype=d), leaf(3, 4, dtype=d), OFFS, OF_ROWS, d, c),
    ),
    "grouped_rows transposed": lambda d, c: (
        *(leaf(8, 5, dtype=d), leaf(3, 4, 5, dtype=d).mT, None, OFFS, None, torch.float32, c),
    ),
    "grouped_terms": lambda d, c: (leaf(4, 8, dtype=d), leaf(8, 5, dtype=d), OFFS, OF_ROWS, d, c),
    "logp": lambda d, c: (leaf(6, 9, dtype=d), TARGET, -100, c),
    "logp_backward": lambda d, c: (
        leaf(6).detach(),
        leaf(6, 9, dtype=d).detach(),
        TARGET,
        torch.zeros(6),
        torch.zeros(6),
        -100,
        c,
    ),
    "linear_logp": lambda d, c: (
        *(leaf(2, 3, 5, dtype=d), leaf(9, 5, dtype=d), leaf(9, dtype=d), TARGET.view(2, 3)),
        *(None, None, -100, 1.0, False, True, c),
    ),
    "linear_logp that keeps logits": lambda d, c: (
        *(leaf(6, 24, dtype=d), leaf(130, 24, dtype=d), None, TARGET),
        *(None, None, -100, 1.0, False, True, c),
    ),
    "linear_logp packed": lambda d, c: (
        *(leaf(6, 5, dtype=d), leaf(9, 5, dtype=d), None, TARGET),
        *(torch.tensor([0, 2, 6]), torch.zeros(9, 5), -100, 0.5, True, False, c),
    ),
    "linear_logp_backward": lambda d, c: (
        *(leaf(6).detach(), leaf(6).detach(), leaf(6, 5, dtype=d).detach(), leaf(9, 5, dtype=d).detach()),
        *(leaf(9, dtype=d).detach(), TARGET, None, torch.zeros(9, 5)),
        *(leaf(6).detach(), torch.zeros(6), torch.ones(6), torch.zeros(6, 12)),
        *(-100, 0.5, c, [True, True, True]),
    ),
}


@pytest.mark.parametrize("dtype", CONTRACT_KEYS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.samebits, name.split()[0])
    torch.library.opcheck(operator, OPERATORS[name](dtype, CONTRACT_KEYS[dtype]))


def by_groups(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The maths of a grouped product, with `OFFS`."""
    starts, stops = [0, 2, 2], OFFS.tolist()
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in zip(starts, stops, strict=True)])
    if a.ndim == 3:
        return by_groups(b.mT, a.mT).mT
    weights = b if b.shape[1] == a.shape[1] else b.mT
    parts = [a[i:j] @ w for i, j, w in zip(starts, stops, weights, strict=True)]
    if bias is not None:
        parts = [part + row for part, row in zip(parts, bias, strict=True)]
    return torch.cat([*parts, torch.zeros(1, weights.shape[2])])


def public(name: str, device: str = "cpu") -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A public function, and leaves of the CPU. Its integers are on `device`."""
    cu, target, offs, of_rows = (t.to(device) for t in (CU, TARGET, OFFS, OF_ROWS))
    return {
        "matmul": (samebits.matmul, [leaf(2, 3, 5), leaf(5, 4)]),
        "matmul vectors": (samebits.matmul, [leaf(5), leaf(5)]),
        "matmul matrix vector": (samebits.matmul, [leaf(2, 3, 5), leaf(5)]),
        "matmul broadcast": (samebits.matmul, [leaf(3, 1, 2, 5), leaf(4, 5, 3)]),
        "bmm": (samebits.bmm, [leaf(3, 2, 5), leaf(1, 5, 4)]),
        "linear": (samebits.linear, [leaf(2, 3, 5), leaf(4, 5), leaf(4)]),
        "linear vector": (samebits.linear, [leaf(5), leaf(4, 5), leaf(4)]),
        "linear packed": (lambda *a: samebits.linear(*a, cu_seqlens=cu), [leaf(8, 5), leaf(4, 5), leaf(4)]),
        "addmm_": (lambda c, a, b: samebits.addmm_(c * 1, a, b), [leaf(3, 4), leaf(3, 5), leaf(5, 4)]),
        "grouped_mm": (lambda a, b: samebits.grouped_mm(a, b, offs), [leaf(8, 5), leaf(3, 5, 4)]),
        "grouped_mm weights": (
            lambda x, w, b: samebits.grouped_mm(x, w.mT, offs, bias=b, sequences=of_rows),
            [leaf(8, 5), leaf(3, 4, 5), leaf(3, 4)],
        ),
        "grouped_mm columns": (lambda a, b: samebits.grouped_mm(a, b, offs), [leaf(3, 4, 5), leaf(5, 8)]),
        "grouped_mm terms": (
            lambda a, b: samebits.grouped_mm(a, b, offs, sequences=of_rows),
            [leaf(4, 8), leaf(8, 5)],
        ),
        "logp": (lambda z: samebits.logp(z, target), [leaf(6, 9)]),
        "linear_logp": (
            lambda x, w, b: samebits.linear_logp(x, w, target, b),
            [leaf(6, 5), leaf(9, 5), leaf(9)],
        ),
        "linear_logp entropy": (
            lambda *a: torch.stack(samebits.linear_logp(*a, target, temperature=0.7, return_entropy=True)),
            [leaf(6, 5), leaf(9, 5)],
        ),
    }[name]


PUBLIC = [
    "matmul",
    "matmul vectors",
    "matmul matrix vector",
    "matmul broadcast",
    "bmm",
    "linear",
    "linear vector",
    "linear packed",
    "addmm_",
    "grouped_mm",
    "grouped_mm weights",
    "grouped_mm columns",
    "grouped_mm terms",
]
TORCH: dict[str, Callable[..., Tensor]] = {
    "matmul": torch.matmul,
    "bmm": lambda a, b: torch.bmm(a, b.expand(a.shape[0], -1, -1)),
    "linear": F.linear,
    "addmm_": torch.addmm,
    "grouped_mm": lambda a, b, bias=None: by_groups(a, b, bias),
    "logp": lambda z: -F.cross_entropy(z, TARGET, reduction="none"),
    "linear_logp": lambda x, w, b: -F.cross_entropy(F.linear(x, w, b), TARGET, reduction="none"),
}
ONCE = ["logp", "linear_logp", "linear_logp entropy"]


@pytest.mark.parametrize("name", [*PUBLIC, *ONCE])
def test_gradients_by_finite_differences(name: str) -> None:
    """The maths is torch's: forward, first and second derivatives, in f32 against f64 steps."""
    op, leaves = public(name)
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def f(*args: Tensor) -> Tensor:
        return op(*(t.float() for t in args)).double()

    tolerance = {"eps": 1e-2, "atol": 2e-3, "rtol": 2e-3}
    assert torch.autograd.gradcheck(f, wide, **tolerance)
    if name in ONCE:
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(op(*leaves).sum(), leaves, create_graph=True)
    else:
        assert torch.autograd.gradgradcheck(f, wide, **tolerance)
    if name != "linear_logp entropy":
        torch.testing.assert_close(op(*leaves), TORCH[name.split()[0]](*leaves))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in (*PUBLIC, *ONCE)),
        *((name, "inductor") for name in ("linear", "addmm_", "grouped_mm weights", "linear_logp")),
    ],
)
def test_compile(name: str, backend: str) -> None:
    assert_compiles(*public(name), backend)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_runs_what_a_direct_call_runs(grad: bool) -> None:
    torch._dynamo.reset()
    op, leaves = public("linear")
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    own, ran = _operator.Operator._run, []

    def run(self: Any, *args: Any) -> Any:
        ran.append(self._registered._schema.name)
        return own(self, *args)

    with torch.set_grad_enabled(grad):
        compiled(*leaves)
    with torch.set_grad_enabled(grad), mock.patch.object(_operator.Operator, "_run", run):
        out = compiled(*leaves)
        if grad:
            out.sum().backward()
    assert ran[0] == "samebits::linear"
    assert {*ran[1:]} == ({"samebits::matmul", "samebits::addbmm"} if grad else set())


@contextmanager
def registered() -> Iterator[None]:
    """All calls go through PyTorch's dispatcher."""
    with (
        mock.patch.object(_operator, "bypasses_dispatcher", return_value=False),
        mock.patch.object(_checks, "bypasses_dispatcher", return_value=False),
    ):
        yield


@pytest.mark.parametrize("name", PUBLIC)
def test_both_ways_to_an_operator_record_the_same_gradients(name: str) -> None:
    def derivatives() -> list[Tensor]:
        op, leaves = public(name)
        out = op(*leaves)
        first = torch.autograd.grad(out, leaves, out.detach().cos(), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)
        return [out, *first, *(g for g in second if g is not None)]

    # A backward after some context asks at each sum whether a context recorded it.
    with (
        mock.patch.object(recorded, "_recorded", {}),
        mock.patch(
            "torch._ops.OpOverload.__call__", side_effect=AssertionError("the short way was not taken")
        ),
    ):
        got = derivatives()
    with registered():
        want = derivatives()
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(g, w, f"result {i}")


@pytest.mark.parametrize("way", [nullcontext, registered], ids=["plain", "registered"])
@pytest.mark.parametrize("name", [*PUBLIC, *ONCE])
def test_results_may_be_changed_in_place(name: str, way: Callable[[], AbstractContextManager[None]]) -> None:
    def run(in_place: bool) -> list[Tensor]:
        op, leaves = public(name)
        out = op(*leaves)
        out = out.mul_(0.5) if in_place else out * 0.5
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    with way():
        for i, (got, want) in enumerate(zip(run(in_place=True), run(in_place=False), strict=True)):
            assert_same_bits(got, want, f"result {i}")
        op, leaves = public(name)
        with torch.no_grad():
            frozen = op(*leaves)
        assert frozen.mul_(torch.ones((), requires_grad=True)).requires_grad


FROZEN = {
    "matmul": "ab",
    "matmul broadcast": "ab",
    "bmm": "ab",
    "linear": "ab",
    "linear vector": "ab",
    "linear packed": "ab",
    "addmm_": ".ab",
    "grouped_mm": "ab",
    "grouped_mm weights": "ab",
    "grouped_mm columns": "ab",
    "grouped_mm terms": "ab",
}


@pytest.mark.parametrize("way", [nullcontext, registered], ids=["plain", "registered"])
@pytest.mark.parametrize("trained", ["a", "b", "ab", "", "."])
@pytest.mark.parametrize("name", FROZEN)
def test_an_operand_is_saved_only_for_the_other_ones_gradient(
    name: str, trained: str, way: Callable[[], AbstractContextManager[None]]
) -> None:
    op, leaves = public(name)
    named = dict(zip(FROZEN[name] + "." * len(leaves), leaves, strict=False))
    operands = [named[n] for n in "ab"]
    want = dict(zip(leaves, torch.autograd.grad(op(*leaves).square().sum(), leaves), strict=True))
    for n, t in named.items():
        t.requires_grad_(n in trained)
    rest = [t for t in leaves if all(t is not o for o in operands)]
    for t in rest:
        t.requires_grad_("." in trained)
    saved: list[Tensor] = []
    with way(), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = op(*leaves)
    kept = [t.untyped_storage().data_ptr() for t in saved]
    for own, other in ("ab", "ba"):
        assert (named[own].untyped_storage().data_ptr() in kept) == (other in trained), own
    wanted = [t for t in leaves if t.requires_grad]
    if wanted:
        with way():
            first = torch.autograd.grad(out, wanted, 2 * out.detach(), create_graph=True)
            for g, t in zip(first, wanted, strict=True):
                assert_same_bits(g, want[t])


@pytest.mark.parametrize("way", [nullcontext, registered], ids=["plain", "registered"])
def test_what_a_frozen_weight_is_multiplied_with_may_change_in_place(
    way: Callable[[], AbstractContextManager[None]],
) -> None:
    x, frozen = leaf(2, 3, 5), leaf(4, 5).detach()
    with way():
        for op, weight in ((samebits.linear, frozen), (samebits.matmul, frozen.T)):
            h = x * 2
            y = op(h, weight)
            h += 1
            (got,) = torch.autograd.grad(y.sum(), x)
            assert_same_bits(got, 2 * samebits.matmul(torch.ones(2, 3, 4), frozen))


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("name", ["matmul", "matmul broadcast", "linear", "addmm_"])
def test_compiled_with_a_frozen_operand(name: str, trained: int) -> None:
    torch._dynamo.reset()
    op, leaves = public(name)
    for i, t in enumerate(leaves):
        t.requires_grad_(i == trained)
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager", dynamic=True)
    eager_out, compiled_out = op(*leaves), compiled(*leaves)
    assert_same_bits(compiled_out, eager_out)
    (got,) = torch.autograd.grad(compiled_out.square().sum(), leaves[trained])
    (want,) = torch.autograd.grad(eager_out.square().sum(), leaves[trained])
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_linear_with_one_number_for_a_bias(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = leaf(2, 3, 5, dtype=dtype), leaf(4, 5, dtype=dtype), leaf(*shape, dtype=dtype)
    row = bias.detach().expand(4).clone().requires_grad_()
    want = samebits.linear(x, weight, row)
    got = samebits.linear(x, weight, bias)
    assert_same_bits(got, want)
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=0.02, atol=0.02)
    wanted = torch.autograd.grad(want.square().sum(), (x, weight, row))
    grads = torch.autograd.grad(got.square().sum(), (x, weight, bias))
    for g, w in zip(grads, (*wanted[:2], row_sum(wanted[2]).reshape(shape)), strict=True):
        assert_same_bits(g, w)
    with samebits.batch_invariant():
        assert_same_bits(F.linear(x, weight, bias), want)


def test_vmap_with_one_number_for_a_bias() -> None:
    x, weight, bias = torch.randn(5, 3, 8), torch.randn(4, 8), torch.randn(1)
    got = torch.vmap(lambda rows: samebits.linear(rows, weight, bias))(x)
    assert_same_bits(got, samebits.linear(x, weight, bias))


def test_second_derivatives_with_a_frozen_operand() -> None:
    x, frozen = leaf(2, 3, 5), leaf(4, 5).detach()
    for op, weight in ((samebits.linear, frozen), (samebits.matmul, frozen.T)):
        y = op(x.sin(), weight)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (got,) = torch.autograd.grad(first.square().sum(), x)
        z = F.linear(x.sin(), frozen)
        (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        torch.testing.assert_close(got, torch.autograd.grad(first.square().sum(), x)[0])


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


X, W = values("normal", (6, 16), torch.float32, 1), values("normal", (5, 16), torch.float32, 2)


# name -> what the call is made within; the operand x; whether PyTorch's dispatcher has anything to do
SITUATIONS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Tensor], bool]] = {
    "plain": (nullcontext, lambda: X, False),
    "a parameter": (nullcontext, lambda: torch.nn.Parameter(X), False),
    "a parameter, no_grad": (torch.no_grad, lambda: torch.nn.Parameter(X), False),
    "inference mode": (torch.inference_mode, lambda: X, False),
    "an inference tensor": (torch.inference_mode, lambda: X.clone(), False),
    "hooks of saved tensors": (lambda: saved_tensors_hooks(abs, abs), lambda: leaf(6, 16), False),
    "dispatch mode": (Mode, lambda: X, True),
    "function mode": (FunctionMode, lambda: X, True),
    "profiler": (lambda: profile(activities=[ProfilerActivity.CPU]), lambda: X, True),
    "subclass": (nullcontext, lambda: X.as_subclass(Subclass), True),
    "negated view": (nullcontext, lambda: torch._neg_view(X), True),
    "zero tensor": (nullcontext, lambda: torch._efficientzerotensor(6, 16), True),
    "meta": (nullcontext, lambda: X.to("meta"), True),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_who_wants_to_see_a_call_sees_it(name: str) -> None:
    around, make, wanted = SITUATIONS[name]
    weight = W.to("meta") if name == "meta" else W
    with around():
        x = make()
        with mock.patch(
            "torch._ops.OpOverload.__call__", autospec=True, side_effect=OpOverload.__call__
        ) as seen:
            got = samebits.linear(x, weight)
        assert any("samebits" in str(call.args[0]) for call in seen.call_args_list) == wanted
        with registered():
            want = samebits.linear(x, weight)
    assert (got.requires_grad, got.is_inference(), type(got)) == (
        want.requires_grad,
        want.is_inference(),
        type(want),
    )
    if name != "meta":
        assert_same_bits(got.detach().as_subclass(Tensor), want.detach().as_subclass(Tensor))


def test_hooks_of_parameters_run() -> None:
    x, weight = leaf(6, 16), leaf(5, 16)
    ran = []
    weight.register_hook(lambda grad: ran.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: ran.append("accumulated"))
    samebits.linear(x, weight).sum().backward()
    assert ran == ["tensor", "accumulated"]


def test_compile_follows_the_mma_model_and_does_not_recompile_for_new_sizes() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda a, b: samebits.matmul(a, b, out_dtype=torch.float32),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    b = values("normal", (64, 32), torch.bfloat16, 1)
    for m in (7, 8, 100):
        a = values("normal", (m, 64), torch.bfloat16, m)
        assert_same_bits(compiled(a, b), samebits.matmul(a, b, out_dtype=torch.float32))
        with samebits.use_mma_model(AMPERE):
            assert_same_bits(compiled(a, b), samebits.matmul(a, b, out_dtype=torch.float32))
    assert counter.frame_count == 2


def test_backward_follows_the_family_of_its_forward() -> None:
    x, weight = leaf(40, 64, dtype=torch.bfloat16), leaf(64, 64, dtype=torch.bfloat16)
    with samebits.use_mma_model(AMPERE):
        y = samebits.matmul(x, weight, out_dtype=torch.float32)
    (actual,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    want = samebits.matmul(x.mT, torch.ones_like(y).bfloat16(), contract=TENSOR_CORE.on(AMPERE))
    assert_same_bits(actual, want.detach())


def test_autocast_of_log_probabilities() -> None:
    """Operands of the product are cast, given logits are not; results are float32."""
    x, weight, bias = leaf(6, 5), leaf(9, 5), leaf(9)
    want = samebits.linear_logp(x.bfloat16(), weight.bfloat16(), TARGET, bias.bfloat16())
    logits = leaf(6, 9)
    from_logits = samebits.logp(logits, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(samebits.linear_logp(x, weight, TARGET, bias), want)
        assert_same_bits(samebits.logp(logits, TARGET), from_logits)


def test_compiled_targets_that_are_out_of_range_give_nan_and_no_gradient() -> None:
    torch._dynamo.reset()
    target = torch.tensor([0, 9, -100, -1, 3, 2**40])
    good = torch.tensor([True, False, True, False, True, False])
    for name in ("logp", "linear_logp"):
        _, leaves = public(name)

        def f(*leaves: Tensor, name: str = name) -> Tensor:
            if name == "logp":
                return samebits.logp(*leaves, target)
            return samebits.linear_logp(leaves[0], leaves[1], target, leaves[2])

        out = torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
        assert torch.equal(out.isnan(), ~good)
        grad = torch.autograd.grad(out.sum(), leaves[0])[0]
        assert torch.equal((grad == 0).all(-1), ~good | (target == -100))


def test_compiled_backward_accumulates_into_main_grad() -> None:
    torch._dynamo.reset()
    x, weight = leaf(6, 5), leaf(9, 5)
    grads = [torch.ones(9, 5), torch.ones(9, 5)]

    def f(x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        return samebits.linear_logp(x, weight, TARGET, main_grad=main_grad)

    f(x, weight, grads[0]).sum().backward()
    torch.compile(f, fullgraph=True, backend="aot_eager")(x, weight, grads[1]).sum().backward()
    assert weight.grad is None
    assert_same_bits(grads[1], grads[0])


@pytest.mark.parametrize("name", ["matmul", "bmm", "linear", "addmm_"])
def test_autocast(name: str) -> None:
    op, leaves = public(name)
    if name == "addmm_":
        acc, a, b = leaves[0].detach(), leaves[1], leaves[2]
        want = samebits.addmm_(acc.clone(), a.bfloat16(), b.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(samebits.addmm_(acc.clone(), a, b), want)
        return
    want = op(*(t.bfloat16() for t in leaves))
    with torch.autocast("cpu", torch.bfloat16):
        actual = op(*leaves)
        assert actual.dtype == torch.bfloat16
        assert_same_bits(actual, want)
        mixed = op(leaves[0].detach().bfloat16(), *leaves[1:])
        assert_same_bits(mixed, want)
    actual.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)


def test_checkpointing_recomputes_under_the_family_around_the_backward() -> None:
    x, weight = leaf(40, 64, dtype=torch.bfloat16), leaf(64, 64, dtype=torch.bfloat16)

    def f(x: Tensor) -> Tensor:
        return samebits.matmul(samebits.matmul(x, weight, out_dtype=torch.float32).bfloat16(), weight)

    with samebits.use_mma_model(AMPERE):
        (want,) = torch.autograd.grad(f(x).sum(), weight)
        (got,) = torch.autograd.grad(checkpoint(f, x, use_reentrant=False).sum(), weight)
    assert_same_bits(got, want)


def test_meta_tensors_and_global_defaults() -> None:
    meta = samebits.linear(torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta"))
    assert (meta.shape, meta.device.type) == ((2, 4), "meta")
    x, weight = leaf(5, 3), leaf(4, 3)
    want = torch.autograd.grad(samebits.linear(x, weight).sum(), weight)[0]
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        got = torch.autograd.grad(samebits.linear(x, weight).sum(), weight)[0]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert_same_bits(got, want)


def test_offsets_are_asserted_once_for_each_state_of_their_tensor() -> None:
    from samebits.ops._sequences import assert_cu_seqlens

    offsets = torch.tensor([0, 3, 8])
    asserted = mock.Mock()
    found = mock.Mock(assert_spans=asserted), ""
    with mock.patch("samebits.ops._sequences.on_gpu", return_value=found):
        for calls, change in ((1, None), (1, None), (2, 4), (2, None)):
            if change is not None:
                offsets[1] = change
            assert_cu_seqlens("linear", offsets, 8, TENSOR_CORE.key)
            assert asserted.call_count == calls
        assert_cu_seqlens("linear", offsets, 9, TENSOR_CORE.key)
        assert asserted.call_args.args == (offsets, 9)


def test_a_capture_is_seen_on_a_device_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == [1])
    on = [mock.Mock(is_cuda=True, device=torch.device("cuda", i), get_device=lambda i=i: i) for i in (0, 1)]
    assert [_memory.capturing(t) for t in on] == [False, True]
    assert not _memory.capturing(torch.ones(1))
    assert current == [0]


def test_no_grad_and_partial_requires_grad() -> None:
    x, weight = leaf(2, 3), leaf(4, 3)
    with torch.no_grad():
        assert not samebits.linear(x, weight).requires_grad
    y = samebits.linear(x.detach(), weight)
    y.sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_addmm_accumulates_in_place_with_and_without_gradients() -> None:
    acc, a, b = torch.ones(3, 4), leaf(3, 5), leaf(5, 4)
    want = samebits.addmm_(acc.clone(), a.detach(), b.detach())
    out = samebits.addmm_(acc, a, b)
    assert out is acc
    assert out.requires_grad
    assert_same_bits(out.detach(), want)
    with pytest.raises(ValueError, match="leaf"):
        samebits.addmm_(torch.ones(3, 4).requires_grad_(), a, b)


def test_concurrent_calls() -> None:
    a, b = values("normal", (200, 300), torch.bfloat16, 0), values("normal", (300, 200), torch.bfloat16, 1)
    want = samebits.matmul(a, b)
    for got in in_threads(*[lambda: samebits.matmul(a, b)] * 8):
        assert_same_bits(got, want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_prepare_runs_every_kind_of_product_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def linear(x: Tensor, weight: Tensor, *bias: Tensor, cu_seqlens: Tensor | None, **rest: Any) -> Tensor:
        seen.append((tuple(x.shape), tuple(weight.shape), len(bias), x.requires_grad, cu_seqlens is not None))
        return samebits.linear(x, weight, *bias, cu_seqlens=cu_seqlens, **rest)

    monkeypatch.setattr(sys.modules["samebits.prepare"], "linear", linear)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=i > 0) for i in range(3)))
    with mode():
        assert samebits.prepare(model, [1, 8, 1], backward=True) == 4
    assert seen == [((m, 4), (4, 4), bias, True, False) for bias in (0, 1) for m in (1, 8)]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model[1].contract = FMA  # as samebits.convert(contract=FMA) would
    assert samebits.prepare(model, [1]) == 3
    seen.clear()
    assert samebits.prepare(torch.ones(3, 2), [(2, 5), np.int64(7)]) == 2
    assert samebits.prepare(torch.ones(3, 2), [7], cu_seqlens=torch.int32) == 1
    assert [(shape, packed) for shape, *_, packed in seen] == [
        ((2, 5, 2), False),
        ((7, 2), False),
        ((7, 2), True),
    ]


@pytest.mark.parametrize(
    ("weights", "rows", "error", "match"),
    [
        (torch.ones(3, 2), 3, TypeError, r"write \[3\]"),
        (torch.ones(3, 2), [1.5], TypeError, "rows"),
        (torch.ones(3, 2), [(2, -1)], ValueError, "sizes of 0 or more"),
        (torch.ones(3, 2), [], ValueError, "nothing to prepare"),
        (torch.nn.ReLU(), [1], ValueError, "0 linear layers"),
        (torch.nn.LazyLinear(3), [1], ValueError, "0 linear layers"),
        (torch.ones(3, 2), [True], TypeError, "rows"),
        (torch.ones(3, 2), None, TypeError, "rows"),
        (5, [1], TypeError, "weights: expected a module or tensors, got int"),
        ([1, 2], [1], TypeError, "weights: expected tensors, got int"),
        (torch.ones(3), [1], TypeError, r"weights: expected dense 2-D .* of shape \(3,\)"),
        (torch.ones(3, 2, dtype=torch.float64), [1], TypeError, "weights: expected .* got torch.float64"),
    ],
)
def test_prepare_refuses(weights: Any, rows: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        samebits.prepare(weights, rows)


@pytest.mark.long
def test_after_fork() -> None:
    # In a process of its own: a fork of this one, which holds what all tests before left, can lack memory.
    code = (
        "import os, torch, samebits\n"
        "a = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))\n"
        "want = samebits.matmul(a, a.mT)\n"
        "if child := os.fork(): raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "os._exit(0 if torch.equal(samebits.matmul(a, a.mT), want) else 1)\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == 0


@pytest.mark.long
def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import samebits;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"samebits"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", samebits.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(samebits, name)
    if callable(value):
        assert value.__doc__ is not None
        assert len(value.__doc__) > 80
