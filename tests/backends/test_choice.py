"""The choice of a backend: which computes, and that nothing else ever does."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import samebits
from samebits import FMA, TENSOR_CORE, backends
from samebits.mode import overrides
from samebits.ops import _checks, _rows, cross_entropy
from samebits.ops import expand as expand_module
from samebits.ops._checks import check_operands
from samebits.ops._operator import Operator
from samebits.ops.expand import expand
from tests.support.threads import in_threads


def key_of(t: torch.Tensor) -> str:
    return check_operands("matmul", None, {"a": t, "b": t})[1]


def test_use_backend_as_a_context_nests_restores_and_stays_in_its_thread() -> None:
    before = backends.chosen_backend("cuda")
    with samebits.use_backend("triton"):
        seen = in_threads(lambda: backends.chosen_backend("cuda"))
        assert backends.chosen_backend("cuda") == "triton"
        with samebits.use_backend(None):
            assert backends.chosen_backend("cuda") is None
        with pytest.raises(RuntimeError, match="inside"), samebits.use_backend("cuda"):
            raise RuntimeError("inside")
        assert backends.chosen_backend("cuda") == "triton"
    assert seen == [before] == [backends.chosen_backend("cuda")] == [None]


def test_use_backend_as_a_function() -> None:
    samebits.use_backend("triton")
    try:
        assert backends.chosen_backend("cuda") == "triton"
    finally:
        samebits.use_backend(None)
    assert backends.chosen_backend("cuda") is None


def test_use_backend_as_a_decorator_and_again() -> None:
    chosen = samebits.use_backend("triton")(lambda: backends.chosen_backend("cuda"))
    assert backends.chosen_backend("cuda") is None
    assert [chosen(), backends.chosen_backend("cuda"), chosen()] == ["triton", None, "triton"]
    context = samebits.use_backend("triton")
    samebits.use_backend("cuda")
    for _ in range(2):
        with context, context:
            assert backends.chosen_backend("cuda") == "triton"
        assert backends.chosen_backend("cuda") == "cuda"
    context(lambda: None)
    assert backends.chosen_backend("cuda") == "cuda"
    samebits.use_backend(None)
    with pytest.raises(TypeError, match="neither yields nor awaits"):
        samebits.use_backend("triton")(lambda: (yield))
    outer, inner = samebits.use_backend("triton"), samebits.use_backend("cuda")
    assert outer(inner(lambda: backends.chosen_backend("cuda")))() == "cuda"
    assert backends.chosen_backend("cuda") is None


def test_an_explicit_backend_never_falls_back() -> None:
    a = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"expected one of .*, got 'cublas'"):
        samebits.use_backend("cublas")
    for name in ("cuda", "triton"):
        with (
            samebits.use_backend(name),
            pytest.raises(ValueError, match=f"backend {name}: expected GPU tensors, got cpu"),
        ):
            samebits.matmul(a, a)
    with samebits.use_backend("reference"):
        assert samebits.matmul(a, a).tolist() == [[2.0, 2.0], [2.0, 2.0]]
        with pytest.raises(ValueError, match="backend reference: expected CPU tensors, got cuda"):
            backends.chosen_backend("cuda")
    if not torch.cuda.is_available():
        with pytest.raises(
            backends.UnavailableError, match=r"^samebits: no backend for this GPU tensor. triton: "
        ):
            backends.on_gpu("matmul", f"{FMA.key}@triton", 0)
        with pytest.raises(backends.UnavailableError, match=r"tensor. cuda: .*; triton: "):
            backends.on_gpu("matmul", FMA.key, 0)
    with pytest.raises(backends.UnavailableError, match="triton: it does not compute rows yet"):
        backends.on_gpu("rows", f"{FMA.key}@triton", 0)


@pytest.mark.parametrize("operation", ["matmul", "logp", "linear_logp", "assert_spans"])
def test_the_automatic_order(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels, Triton, an error with both reasons; of an explicit choice, that one or an error."""
    pytest.importorskip("triton")
    pytest.importorskip("cuda.core")
    runs: set[str] = set()

    def require(name: str, device: int) -> None:
        if name not in runs:
            raise backends.UnavailableError(f"no {name} here")

    for name in ("cuda", "triton"):
        module = importlib.import_module(f"samebits.backends.{name}.runtime")
        monkeypatch.setattr(module, "require", partial(require, name))

    def chosen(asked: str | None) -> str:
        try:
            module, key = backends.on_gpu.__wrapped__(operation, backends.pack_key(FMA.key, asked), 0)
        except backends.UnavailableError as error:
            return str(error).removeprefix("samebits: no backend for this GPU tensor. ")
        assert key == FMA.key
        return str(module.__name__)

    by = {name: f"samebits.backends.{name}.{operation}" for name in ("cuda", "triton")}
    assert chosen(None) == "cuda: no cuda here; triton: no triton here"
    runs.add("triton")
    assert (chosen(None), chosen("triton")) == (by["triton"], by["triton"])
    assert chosen("cuda") == "cuda: no cuda here"
    runs.add("cuda")
    assert (chosen(None), chosen("cuda"), chosen("triton")) == (by["cuda"], by["cuda"], by["triton"])
    runs.remove("triton")
    assert chosen("triton") == "triton: no triton here"


@pytest.mark.parametrize(
    ("operation", "called"),
    [
        ("attention", "attention"),
        ("rows", "rows"),
        ("scaled", "products in FP8"),
        ("quantize", "FP8 values and their scales"),
    ],
)
def test_what_only_the_cuda_kernels_compute(
    operation: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under an explicit choice of Triton, and without cuda-core, an error says why, and what to do."""
    from samebits.backends.cuda import compiler, runtime

    asked = backends.on_gpu.__wrapped__
    said = f"triton: it does not compute {called} yet"
    with pytest.raises(backends.UnavailableError, match=f"for this GPU tensor. {said}$"):
        asked(operation, backends.pack_key(FMA.key, "triton"), 0)
    with monkeypatch.context() as patched:
        patched.setattr(compiler.importlib.util, "find_spec", _without("cuda.core"))
        with pytest.raises(
            backends.UnavailableError, match=f"cuda: .* need the package cuda-core — install .*; {said}$"
        ):
            asked(operation, FMA.key, 0)
    monkeypatch.setattr(runtime, "require", lambda device: None)
    assert asked(operation, FMA.key, 0)[0].__name__ == f"samebits.backends.cuda.{operation}"


def _without(package: str) -> Callable[[str], object]:
    """``find_spec`` where a package is not installed."""
    find = importlib.util.find_spec
    return lambda name, *of: None if name == package else find(name, *of)


def chosen(kind: str, operation: str = "") -> str | None:
    """The backend that is chosen, also for tensors on a CPU."""
    name = backends._choice.backend
    return None if name is None else backends.having(operation, name)


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": samebits.linear,
    "matmul": samebits.matmul,
    "bmm": lambda x, w: samebits.bmm(x[None], w[None]),
    "linear_logp": lambda x, w: samebits.linear_logp(x, w, torch.zeros(4, dtype=torch.int64)),
    "logp": lambda x, w: samebits.logp(x, torch.zeros(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_backward_follows_the_choice_of_its_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator, forward and backward, is given the backend that was asked for, and by it alone."""
    keys: list[str] = []
    right = Operator._run

    def run(self: Operator, *args: Any) -> Any:
        keys.extend(x for x in args if isinstance(x, str))
        return right(self, *args)

    monkeypatch.setattr(_checks, "chosen_backend", chosen)
    monkeypatch.setattr(Operator, "_run", run)
    x, w = (torch.ones(4, 4, requires_grad=True) for _ in range(2))
    with samebits.use_backend("triton"), torch.no_grad():
        PRODUCTS[name](x, w)
    with samebits.use_backend("triton"):
        y = PRODUCTS[name](x, w)
    forward = len(keys)
    with samebits.use_backend("cuda"):
        torch.autograd.grad(y.sum(), x)
    assert 0 < forward < len(keys)
    assert all(backends.unpack_key(key)[1] == "triton" for key in keys), keys


NOT_BY_TRITON: dict[str, Callable[[torch.Tensor], object]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "attention": lambda x: samebits.attention(*[x[None, :, None]] * 3),
    "attention of PyTorch": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "gradient of broadcasting": lambda x: torch.autograd.grad(1 + x + x[:, :1], x, torch.ones(4, 4)),
    "gradient of expand": lambda x: torch.autograd.grad(x[:, :1].expand(4, 4), x, torch.ones(4, 4)),
}


@pytest.mark.parametrize("name", NOT_BY_TRITON)
def test_what_triton_does_not_compute_is_refused_under_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and attention, in place of PyTorch's: neither it nor another backend computes them then."""
    for module in (_checks, _rows, cross_entropy, expand_module, overrides):
        monkeypatch.setattr(module, "chosen_backend", chosen)
    x = torch.ones(4, 4, requires_grad=True)
    with (
        samebits.batch_invariant(),
        samebits.use_backend("triton"),
        pytest.raises(backends.UnavailableError, match="backend triton does not compute it yet"),
    ):
        NOT_BY_TRITON[name](x)


def test_a_view_needs_no_backend() -> None:
    with samebits.use_backend("triton"):
        assert expand(torch.ones(4, 1), (4, 4)).sum() == 16


def test_tensor_core_is_refused_where_no_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's matrix units, and those of NVIDIA GPUs before sm_80. FMA asks for none."""
    pytest.importorskip("triton")
    from samebits.backends.triton import matmul

    for hip, name, *capability in (("6.4", "AMD Instinct MI300X", 9, 4), (None, "Tesla T4", 7, 5)):
        properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        check = matmul.check_contract.__wrapped__
        for contract in (TENSOR_CORE, TENSOR_CORE.on(samebits.HOPPER)):
            said = f"{name} gives, so TENSOR_CORE has no MmaModel for it; contract=samebits.FMA works"
            with pytest.raises(backends.UnavailableError, match=said):
                check(contract.key, 0)
        check(FMA.key, 0)
    monkeypatch.setattr(torch.version, "hip", None)
    properties.major, properties.minor = 9, 0
    check(TENSOR_CORE.key, 0)
    with pytest.raises(ValueError, match="expected the family of Tesla T4, HOPPER"):
        check(TENSOR_CORE.on(samebits.AMPERE).key, 0)


def test_the_choice_is_no_part_of_the_contract() -> None:
    key = backends.pack_key(TENSOR_CORE.key, "triton")
    assert backends.unpack_key(key) == (TENSOR_CORE.key, "triton")
    assert backends.contract_of(key) == backends.contract_of(TENSOR_CORE.key) == TENSOR_CORE


def test_torch_compile_sees_a_new_choice() -> None:
    compiled = torch.compile(lambda a: samebits.matmul(a, a), backend="aot_eager", fullgraph=True)
    a = torch.ones(2, 2)
    compiled(a)
    with samebits.use_backend("triton"), pytest.raises(Exception, match="expected GPU tensors, got cpu"):
        compiled(a)
    assert_ones = compiled(a)
    assert assert_ones.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_triton_refuses_what_its_launch_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from samebits.backends.triton import assert_spans, matmul, runtime

    for offsets in (
        [0, 2_000_000_000, -2_000_000_000, 5],
        [0, 6, 5],
        [1, 5],
        [0, 4],
    ):  # the first wraps in int32
        with pytest.raises(RuntimeError, match="expected offsets that rise from 0 to 5"):
            assert_spans.assert_spans(torch.tensor(offsets, dtype=torch.int32), 5)
    assert_spans.assert_spans(torch.tensor([0, 3, 3, 5], dtype=torch.int32), 5)
    one = torch.ones(1, 1, 1, 1).expand(2**31, 1, 1, 1)
    with pytest.raises(ValueError, match="has a size above 2147481600"):
        matmul.addbmm_later(one[:, 0], one, one, None, accumulate=False, contract=FMA.key)()
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"expected 16-bit operands.*, got torch\.float32"):
        matmul.addbmm_later(
            one[0], one, one, None, accumulate=False, contract=TENSOR_CORE.on(samebits.HOPPER).key
        )()
    for version in ("3.6.0+git12", "3.6.0.dev20250901", "3.10.0"):
        monkeypatch.setattr(runtime, "_version", lambda version=version: version)
        if not torch.cuda.is_available():
            with pytest.raises(backends.UnavailableError, match="PyTorch finds no GPU"):
                runtime.require(0)
    monkeypatch.setattr(runtime, "_version", lambda: "3.5.1")
    with pytest.raises(backends.UnavailableError, match=r"triton 3\.5\.1 is older than 3\.6"):
        runtime.require(0)


def test_threads_share_a_choice_and_not_what_was_there_before() -> None:
    choice = backends.use_backend("triton")
    backends.use_backend(None)
    turns = threading.Barrier(2, timeout=20)

    def work(before: str | None, second: bool) -> str | None:
        backends.use_backend(before)
        for turn in (False, True):
            turns.wait()
            if turn == second:
                choice.__enter__()
        for turn in (False, True):
            turns.wait()
            if turn == second:
                choice.__exit__()
        return backends._choice.backend

    assert in_threads(partial(work, None, False), partial(work, "cuda", True)) == [None, "cuda"]
