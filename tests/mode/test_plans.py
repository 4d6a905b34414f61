"""Plans of calls that autograd records: what they give is what the calls themselves give."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import samebits
from samebits.backends import pytorch_in_c, replay
from samebits.backends.cuda import runtime
from samebits.mode import kernels
from samebits.testing import assert_same_bits

BF16 = torch.bfloat16


_device = -2  # the current one: no tensor's


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int8))
def _current(found: Any) -> int:
    found[0] = _device
    return 0


_nothing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)  # is launched
_INSTEAD = {"_ZN3c104cuda9GetDeviceEPa": _current, "aoti_torch_get_current_cuda_stream": _nothing}


@pytest.fixture
def plans() -> Iterator[None]:
    """Calls on CPU tensors are looked up as those on GPUs are. What they compute, the CPU computes."""
    global _device
    if not replay.available:
        pytest.skip("the extension was not built")
    replay.forget()
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        launches = (_nothing,) * 3
        pytorch_in_c.configure(mock.Mock(), mock.Mock(), *launches, allocate=torch.empty_strided, **_INSTEAD)
        _device = -1  # the CPU
        try:
            yield
        finally:
            _device = -2
            runtime._allow_replays.cache_clear()
            replay.forget()


def of_operators() -> list[Any]:
    """What replays calls of PyTorch's operators."""
    return [r for r in replay._replays if r.run.__module__ == kernels.__name__]


def make(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


# Of x[2, 5, 64], w[64, 64] and b[64].
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "mm": lambda x, w, b: torch.mm(x[0], w),
    "matmul": lambda x, w, b: x @ w,
    "matmul of a vector": lambda x, w, b: x[0, 0] @ w,
    "bmm": lambda x, w, b: torch.bmm(x, w.expand(2, 64, 64)),
    "addmm": lambda x, w, b: torch.addmm(b, x[0], w),
    "softmax": lambda x, w, b: x.softmax(-1),
    "softmax over tokens": lambda x, w, b: F.softmax(x, dim=1),
    "log_softmax": lambda x, w, b: x.log_softmax(-1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (64,), b, b.clone()),
    "layer_norm, one vector twice": lambda x, w, b: F.layer_norm(x, (64,), b, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (64,), b, eps=1e-6),
    "sum": lambda x, w, b: x.sum(-1),
    "sum over tokens": lambda x, w, b: x.sum((0, 1), keepdim=True),
    "mean": lambda x, w, b: x.mean(),
    "norm": lambda x, w, b: x.norm(dim=-1),
    "embedding": lambda x, w, b: F.embedding(torch.arange(10).view(2, 5), w),
    "cross_entropy": lambda x, w, b: F.cross_entropy(x[0], torch.arange(5)),
    "cross_entropy of pictures": lambda x, w, b: F.cross_entropy(x, torch.zeros(2, 64, dtype=torch.int64)),
    "attention": lambda x, w, b: F.scaled_dot_product_attention(
        *(x.view(2, 5, 4, 16).transpose(1, 2),) * 3, is_causal=True
    ),
}
PLANNED = set(CALLS) - {"cross_entropy of pictures", "softmax over tokens"}


def _run(name: str, within: Callable[[Any], Any]) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in (make(2, 5, 64), make(64, 64), make(64))]
    with within("error"):
        out = CALLS[name](*leaves)
        grads = torch.autograd.grad(out, leaves, make(*out.shape), allow_unused=True)
    return [out.detach(), *(torch.zeros(0) if g is None else g for g in grads)]


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_has_the_bits_of_the_call(name: str, plans: None) -> None:
    replay.forget()
    first, *others = (_run(name, samebits.batch_invariant) for _ in range(4))
    plans_found = [plan for r in of_operators() for plan in r.recipes.values() if callable(plan)]
    assert bool(plans_found) == (name in PLANNED)
    for again in others:
        for got, want in zip(again, first, strict=True):
            assert_same_bits(got, want, name)


@pytest.mark.parametrize("name", [*CALLS, "linear_logp"])
def test_no_cycle_keeps_a_call(name: str, plans: None) -> None:
    """What cycles keep lives on until Python looks for them, and a graph that lives on breaks captures."""
    calls = CALLS | {"linear_logp": lambda x, w, b: samebits.linear_logp(x[0], w, torch.arange(5))}
    with mock.patch.dict(CALLS, calls):
        for _ in range(2):  # PyTorch's first imports keep their frames
            _run(name, samebits.batch_invariant)
        replay.forget()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                leaves = [t.requires_grad_() for t in (make(2, 5, 64), make(64, 64), make(64))]
                with samebits.batch_invariant("error"):
                    out = CALLS[name](*leaves)
                    torch.autograd.grad(out, leaves, make(*out.shape), allow_unused=True)
                kept = [weakref.ref(x) for x in (*leaves, out)]
                del leaves, out
                assert [ref() for ref in kept] == [None] * 4
        finally:
            gc.enable()


@pytest.mark.parametrize("name", CALLS)
def test_under_the_switch(name: str, plans: None) -> None:
    def switched(on_uncovered: Any) -> Any:
        return samebits.set_batch_invariant_mode(True, on_uncovered)

    first, *others = (_run(name, switched) for _ in range(4))
    for again in others:
        for got, want in zip(again, first, strict=True):
            assert_same_bits(got, want, name)


def test_a_plan_knows_which_arguments_are_one(plans: None) -> None:
    """Two tensors on the same memory have gradients of their own; one tensor given twice has their sum."""
    x, w = make(4, 64), make(64)
    for _ in range(4):
        twice = w.clone().requires_grad_()
        with samebits.batch_invariant("error"):
            (both,) = torch.autograd.grad(F.layer_norm(x, (64,), twice, twice).sum(), twice)
        room = w.clone()
        one, other = (room.detach().requires_grad_() for _ in range(2))
        with samebits.batch_invariant("error"):
            parts = torch.autograd.grad(F.layer_norm(x, (64,), one, other).sum(), (one, other))
        assert_same_bits(parts[1], torch.full_like(w, 4))
        assert_same_bits(parts[0] + parts[1], both)


def test_what_is_recorded_follows_from_the_call(plans: None) -> None:
    x, w = make(4, 64), make(64, 64)
    for _ in range(3):
        for records in ((False, True), (True, False), (True, True), (False, False)):
            leaves = [t.clone().requires_grad_(r) for t, r in zip((x, w), records, strict=True)]
            with samebits.batch_invariant("error"):
                y = F.linear(*leaves)
                with torch.no_grad():
                    assert not F.linear(*leaves).requires_grad
            assert y.requires_grad == any(records)
            if any(records):
                y.sum().backward()
            assert [t.grad is not None for t in leaves] == list(records)


@pytest.mark.parametrize("name", ["layer_norm", "sum"])
def test_a_result_without_gradients_is_no_view(name: str, plans: None) -> None:
    """Also where a call of the same tensors, made with gradients on, has left a plan."""
    call: Callable[[Tensor], Tensor] = {
        "layer_norm": lambda x: F.layer_norm(x.transpose(1, 2), (5,)),
        "sum": lambda x: torch.sum(x.transpose(1, 2), (0,), True),
    }[name]
    x, w = make(2, 5, 64), torch.zeros(1, dtype=BF16, requires_grad=True)
    for _ in range(4):
        with samebits.batch_invariant("error"):
            call(x)
            with torch.no_grad():
                y = call(x)
        assert (y.add_(w)).requires_grad


def test_double_backward_and_checkpoints(plans: None) -> None:
    x, w = (t.requires_grad_() for t in (make(4, 64), make(64, 64)))
    seen = []
    for _ in range(4):
        with samebits.batch_invariant("error"):
            (g,) = torch.autograd.grad(F.linear(x, w).square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(g.square().sum(), w)
            y: Any = checkpoint(lambda x: F.linear(x, w).softmax(-1), x, use_reentrant=False)
            (third,) = torch.autograd.grad(y.square().sum(), w)
        seen.append((second, third))
    for again in seen[1:]:
        for got, want in zip(again, seen[0], strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["layer_norm", "cross_entropy", "attention"])
def test_one_result_of_several_is_as_good(name: str, plans: None) -> None:
    """What else a plan's operator computes is kept: for a second backward, and under checkpoints."""
    found = []
    for _ in range(4):
        leaves = [t.requires_grad_() for t in (make(2, 5, 64), make(64, 64), make(64))]
        x = leaves[0]
        with samebits.batch_invariant("error"):
            out = CALLS[name](*leaves)
            again: Any = checkpoint(CALLS[name], *leaves, use_reentrant=False)
            grad = make(*out.shape)
            first = torch.autograd.grad(out, x, grad, retain_graph=True)
            if name == "attention":
                with pytest.raises(NotImplementedError, match="second derivatives"):
                    torch.autograd.grad(out, x, grad, create_graph=True)
            found.append((*first, *torch.autograd.grad(out, x, grad), *torch.autograd.grad(again, x, grad)))
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(out, x, grad)
    for gradients in found:
        for got in gradients:
            assert_same_bits(got, found[0][0])
