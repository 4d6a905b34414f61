"""The mode of the whole process: what only it covers, and that nothing of it stays."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.mode import (
    UncoveredError,
    batch_invariant,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)
from samebits.mode.calls import outermost
from samebits.mode.operators import operator_rules
from samebits.testing import assert_same_bits, values
from tests.mode.test_mode import COVERED, UNCOVERED, X
from tests.support.devices import DEVICES
from tests.support.threads import in_threads

W = values("normal", (40, 40), torch.float32, 1) / 8
B = values("normal", (40,), torch.float32, 2)


class TestTheSwitch:
    def test_on_and_off(self) -> None:
        assert not is_batch_invariant_mode_enabled()
        enable_batch_invariant_mode()
        enable_batch_invariant_mode("error")
        try:
            assert is_batch_invariant_mode_enabled()
            with pytest.raises(UncoveredError, match=r"aten\.logcumsumexp"):
                X.logcumsumexp(0)
            with set_batch_invariant_mode(False):
                assert not is_batch_invariant_mode_enabled()
                X.logcumsumexp(0)
            with pytest.raises(UncoveredError):
                X.logcumsumexp(0)
        finally:
            disable_batch_invariant_mode()
        assert not is_batch_invariant_mode_enabled()
        disable_batch_invariant_mode()

    def test_an_error_inside_restores_what_was(self) -> None:
        with pytest.raises(KeyError), set_batch_invariant_mode():
            raise KeyError
        assert not is_batch_invariant_mode_enabled()

    @pytest.mark.parametrize(
        "enable", [enable_batch_invariant_mode, lambda x: set_batch_invariant_mode(True, x)]
    )
    def test_a_wrong_argument(self, enable: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match="on_uncovered"), enable("no") or set_batch_invariant_mode(False):
            pass
        assert not is_batch_invariant_mode_enabled()

    def test_what_is_not_covered_has_no_kernel_of_ours(self) -> None:
        aten, rules = torch.ops.aten, operator_rules()
        for op in (aten.view.default, aten.relu.default, aten.copy_.default, aten.cat.default):
            assert op not in rules
        for op in (aten.add.Tensor, aten.mul.Tensor, aten.exp.default):
            assert all("CUDA" not in key for key in rules[op].keys)

    def test_gradients_outside_are_pytorchs_again(self) -> None:
        leaves = [t.detach().clone().requires_grad_() for t in (X, W, B)]

        def run() -> tuple[Tensor, ...]:
            loss = (F.layer_norm(X @ leaves[1] + leaves[2], (40,)).softmax(-1) * leaves[0]).sum()
            return torch.autograd.grad(loss, leaves)

        before, stance = run(), torch._dynamo.eval_frame._stance.stance
        with set_batch_invariant_mode():
            run()
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch._dynamo.eval_frame._stance.stance == stance
        assert torch.backends.mha.get_fastpath_enabled()
        for got, want in zip(run(), before, strict=True):
            assert_same_bits(got, want)

    def test_disabling_while_a_backward_runs(self) -> None:
        halfway, disabled = threading.Event(), threading.Event()

        class Waits(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                halfway.set()
                assert disabled.wait(30)
                return grads[0]

        found: list[Tensor] = []

        def run() -> None:
            w = W.clone().requires_grad_()
            y = Waits.apply(F.linear(X, w) * B).sum()
            found.extend(torch.autograd.grad(y, w))

        enable_batch_invariant_mode("error")
        worker = threading.Thread(target=run)
        worker.start()
        assert halfway.wait(30)
        disable_batch_invariant_mode()
        disabled.set()
        worker.join()
        assert found[0].shape == W.shape

    @pytest.mark.long
    def test_a_child_process_inherits_it(self) -> None:
        code = (
            "import os, torch, samebits, torch.nn.functional as F\n"
            "samebits.enable_batch_invariant_mode('error')\n"
            "if child := os.fork(): raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
            "x, w = torch.randn(5, 300), torch.randn(7, 300)\n"
            "os._exit(0 if torch.equal(F.linear(x, w), samebits.linear(x, w)) else 1)\n"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

    @pytest.mark.long
    @pytest.mark.parametrize("where", ["_at_backend", "_in_context"])
    def test_the_first_time_may_be_interrupted(self, where: str) -> None:
        """It takes seconds. The next time registers everything."""
        code = f"""
import torch, samebits
import torch.nn.functional as F
from samebits.mode import kernels
made, left = kernels.{where}, iter(range(20))
def interrupted(*args):
    if next(left, None) is None:
        raise KeyboardInterrupt
    return made(*args)
x, w, v = torch.randn(64, 500), torch.randn(500, 30), torch.randn(100)
for kernels.{where} in (interrupted, made):
    try:
        with samebits.batch_invariant("error"):
            assert x.mm(w).equal(samebits.matmul(x, w))
        with samebits.set_batch_invariant_mode(True, "error"):
            assert x.mm(w).equal(samebits.matmul(x, w))
            assert F.silu(v).equal(torch.stack([F.silu(e) for e in v]))  # has a rule of CPUs
        assert kernels.{where} is made
    except KeyboardInterrupt:
        assert kernels.{where} is interrupted
        assert not samebits.is_batch_invariant_mode_enabled()
"""
        assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

    def test_settings_come_back_after_the_last_of_both_modes(self) -> None:
        with batch_invariant("error"):
            enable_batch_invariant_mode("error")
        assert not torch.backends.mha.get_fastpath_enabled()
        with batch_invariant("error"):
            disable_batch_invariant_mode()
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled()

    def test_an_inner_context_does_not_speak_for_autograds_threads_afterwards(self) -> None:
        with batch_invariant("error"):
            with batch_invariant("ignore"):
                assert outermost.context == "ignore"
            assert outermost.context == "error"


class TestWhatItCovers:
    def test_other_threads(self) -> None:
        def elsewhere() -> None:
            assert_same_bits(F.linear(X, W, B), samebits.linear(X, W, B))

        with set_batch_invariant_mode(True, "error"):
            in_threads(elsewhere)

    def test_calls_that_do_not_come_from_python(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is old
            script = torch.jit.trace(lambda x: torch.mm(x, W).softmax(-1), X[0], check_trace=False)
        with set_batch_invariant_mode(True, "error"):
            assert_same_bits(script(X[0]), samebits.matmul(X[0], W).softmax(-1))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", COVERED)
    def test_inference_mode(self, name: str, device: str) -> None:
        x, w, b = (t.to(device) for t in (X, W, B))
        with set_batch_invariant_mode(True, "error"):
            want = COVERED[name](x, w, b)
            with torch.inference_mode():
                got = COVERED[name](x, w, b)
                assert_same_bits(got.clone(), want)
        assert got.is_inference()
        assert not got.requires_grad

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", COVERED)
    def test_gradients_in_a_padded_batch(self, name: str, device: str) -> None:
        seed = values("normal", tuple(X.shape), torch.float32, 3).to(device)
        leaves = [t.to(device, copy=True).requires_grad_() for t in (W, B)]

        def run(rows: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            y = COVERED[name](rows, *leaves)
            if y.shape != grad.shape:
                pytest.skip("its result has another shape")
            return torch.autograd.grad(y, leaves, grad, allow_unused=True)

        padded, zeros = (torch.zeros(6, 8, 40, device=device) for _ in range(2))
        padded[:, :3], zeros[:, :3] = X.to(device), seed
        x = X.to(device)
        if not COVERED[name](x, *leaves).requires_grad:
            return
        with set_batch_invariant_mode(True, "error"):
            in_padding, alone = run(padded, zeros), run(x, seed)
        with batch_invariant("error"):
            of_context = run(x, seed)
        for got, want, other in zip(in_padding, alone, of_context, strict=True):
            if want is not None:
                assert_same_bits(got, want)
                assert_same_bits(other, want)

    @pytest.mark.parametrize("device", DEVICES)
    def test_gradients_of_all_that_broadcasts(self, device: str) -> None:
        """Also of functions that the context leaves to PyTorch; in other threads and twice, too."""
        x, y = (t.to(device) for t in (X, X.flip(0)))

        def run_elsewhere(f: Callable[[Tensor], Tensor], w: Tensor) -> None:
            (got,) = torch.autograd.grad(f(w).sum(), w)
            assert_same_bits(got, total)

        functions: list[Callable[[Tensor], Tensor]] = [
            lambda w: x * w,
            lambda w: x + w[None],
            lambda w: torch.where(x > 0, w, y),
            lambda w: torch.maximum(x, w),
            lambda w: torch.addcmul(x, y, w),
            lambda w: w.expand(6, 3, 40) * x,
            lambda w: x / w,
        ]
        with set_batch_invariant_mode(True, "error"):
            for f in functions:
                w = B.to(device, copy=True).requires_grad_()

                leaf = w.detach().expand(x.shape).clone().requires_grad_()
                (each,) = torch.autograd.grad(f(leaf).sum(), leaf)
                total = torch.zeros(40, device=device)
                for row in each.flatten(0, 1):
                    total += row
                (got,) = torch.autograd.grad(f(w).sum(), w, create_graph=True)
                assert_same_bits(got.detach(), total)
                in_threads(partial(run_elsewhere, f, w))

    @pytest.mark.parametrize(
        "f", [torch.float_power, torch.arctan2, torch.special.xlogy, torch.hypot, torch.atan2]
    )
    def test_gradients_of_functions_of_two_tensors(self, f: Callable[[Tensor, Tensor], Tensor]) -> None:
        leaves = [(t.abs() + 0.5).requires_grad_() for t in (X[0], X[1])]
        want = torch.autograd.grad(f(*leaves), leaves, W[:3])
        with set_batch_invariant_mode(True, "error"):
            got = torch.autograd.grad(f(*leaves), leaves, W[:3])
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)

    @pytest.mark.parametrize("name", [n for n in UNCOVERED if n != "sparse.mm"])
    def test_what_is_reported(self, name: str) -> None:
        with set_batch_invariant_mode(True, "error"), pytest.raises(UncoveredError):
            UNCOVERED[name]()

    @pytest.mark.parametrize(
        "f",
        [
            lambda x: x.log_softmax(-1).gather(1, torch.zeros(6, 1, 40, dtype=torch.int64)),
            lambda x: x.index_select(0, torch.tensor([0, 0])),
            lambda x: x.take(torch.tensor([1, 1])),
            lambda x: x.double() * torch.ones(40, dtype=torch.double, requires_grad=True),
        ],
    )
    def test_what_autograd_calls_is_not_reported(self, f: Callable[[Tensor], Tensor]) -> None:
        """As under the context. But what Python code calls in a backward is."""
        with set_batch_invariant_mode(True, "error"):
            y = f(X.clone().requires_grad_())
            y.backward(torch.ones_like(y))
            leaf = X.clone().requires_grad_()
            leaf.register_hook(lambda grad: grad.logcumsumexp(0))
            with pytest.raises(UncoveredError):
                leaf.exp().sum().backward()

    def test_sums_in_threads_without_python(self) -> None:
        """They are not autograd's, though no Python function has called them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is old

            @torch.jit.script
            def forked(x: Tensor) -> Tensor:
                return torch.jit.wait(torch.jit.fork(torch.sum, x, [0]))  # type: ignore[no-any-return]

        x = values("normal", (2000, 50), torch.float32, 0)
        with set_batch_invariant_mode(True, "error"):
            assert_same_bits(forked(x), x.sum(0))

    def test_compiled_functions_run_eagerly(self) -> None:
        compiled: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(graph)
            return graph.forward

        f = torch.compile(lambda x: F.linear(x, W).softmax(-1), backend=backend)
        with set_batch_invariant_mode(True, "error"):
            assert_same_bits(f(X), samebits.linear(X, W).softmax(-1))
        assert not compiled
        f(X)
        assert len(compiled) == 1

    def test_a_context_within(self) -> None:
        with set_batch_invariant_mode(True, "error"):
            with batch_invariant("ignore"):
                X.logcumsumexp(0)
                assert_same_bits(F.linear(X, W), samebits.linear(X, W))
            with pytest.raises(UncoveredError):
                X.logcumsumexp(0)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64)


def test_the_kernels_that_stay_change_nothing() -> None:
    with set_batch_invariant_mode():
        pass
    assert torch.func.grad(lambda s: s * 2 + 1)(torch.tensor(3.0)) == 2
    doubled = torch.tensor(3.0, requires_grad=True) * 2
    assert type(doubled.grad_fn).__name__ == "MulBackward0"
    doubled.detach_()
    x = torch.tensor(2.0)
    assert torch.ops.aten.mul_.Tensor(x, 2) is x
    assert (torch.add(2, 3), torch.mul(2, 3.5), torch.floor_divide(7, 2)) == (5, 7, 3)


NUMBERS = (2, 0.1, True, 1e-45, 1 + 2j, -7)
OF_NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "+": lambda x, n: x + n,
    "-": lambda x, n: x - n,
    "reversed -": lambda x, n: n - x,
    "*": lambda x, n: x * n,
    "/": lambda x, n: x / n,
    "//": lambda x, n: x // n,
    "**": lambda x, n: x**n,
    "reversed **": lambda x, n: n**x,
    "alpha": lambda x, n: torch.add(x, n, alpha=2),
    "rounded": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "*=": lambda x, n: x.clone().mul_(n),
    "+= alpha": lambda x, n: x.clone().add_(n, alpha=3),
    "xlogy": torch.xlogy,
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_numbers_for_tensors(name: str, dtype: torch.dtype) -> None:
    """PyTorch hands them to kernels in Python as numbers, and does not take them back as such."""

    def tried(x: Tensor, number: Any) -> Any:
        try:
            return OF_NUMBERS[name](x, number)
        except (RuntimeError, TypeError):
            return "refused"

    for shape, number in itertools.product(((4,), ()), NUMBERS):
        x = torch.tensor([1, 2, 3, 0]).to(dtype) if shape else torch.tensor(3).to(dtype)
        want = tried(x, number)
        with set_batch_invariant_mode(True, "ignore"):
            got = tried(x, number)
        again = tried(x, number)  # the kernels stay
        for result in (got, again):
            if isinstance(want, str):
                assert result == want
                continue
            assert (result.dtype, result.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(result, want, rtol=1e-6, atol=0, equal_nan=True)
