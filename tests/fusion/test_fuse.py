"""``samebits.fuse``: what is recognised, proven and left; what a fused model goes through."""

from __future__ import annotations

import copy
import importlib
import io
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

import samebits
from samebits.fusion import fuse_parts, loss, proofs
from samebits.mode import batch_invariant
from samebits.testing import assert_same_bits, values
from tests.fusion.support import assert_same, ids, llama, step
from tests.support.devices import DEVICES

forms: Any = importlib.import_module("samebits.fusion.forms")  # with what it imports
OPERATORS = ("add_rms_norm", "rotary", "norm_rotary", "gated")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often fused operators were called."""
    found: Counter[str] = Counter()

    def count(where: Any, name: str) -> None:
        own = getattr(where, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    for name in OPERATORS:
        count(forms, name)
    count(loss, "linear_logp")
    count(loss, "cross_entropy")
    return found


def kinds(fusion: samebits.fusion.Fusion) -> dict[str, int]:
    return {f.what: len(f.names) for f in fusion.fused}


def test_a_model_keeps_its_bits_and_its_keys(calls: Counter[str]) -> None:
    model = llama()
    expected, keys = step(model), list(model.state_dict())
    fusion = samebits.fuse(model)
    assert kinds(fusion) == {
        "RMS norm": 9,
        "residual sum and RMS norm": 2,
        "gated activation": 2,
        "rotary positions": 2,
        "RMS norms of heads and rotary positions": 2,
        "loss from logits": 1,
    }
    assert not fusion.left
    calls.clear()
    assert_same(step(model), expected)
    assert calls == {"add_rms_norm": 5, "norm_rotary": 2, "gated": 2}
    assert list(model.state_dict()) == keys
    with batch_invariant("ignore"), torch.no_grad():  # decoding
        calls.clear()
        model.generate(ids(1, 4), max_new_tokens=3, do_sample=False)
    assert calls == {"add_rms_norm": 15, "norm_rotary": 6, "gated": 6}


def test_an_engines_modules_are_fused_without_a_call(calls: Counter[str]) -> None:
    class Norm(nn.Module):  # not of transformers
        weight: Tensor
        variance_epsilon: float

        forward = type(llama().model.norm).forward

    model = llama()
    expected, others = step(model), Norm()
    others.weight, others.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6
    calls.clear()
    fusion = fuse_parts(nn.ModuleList([model, others]))
    assert kinds(fusion) == {
        "RMS norm": 9,
        "residual sum and RMS norm": 2,
        "gated activation": 2,
        "rotary positions": 2,
    }
    assert type(others) is Norm
    calls.clear()
    assert_same(step(model), expected)
    assert calls == {"add_rms_norm": 9, "rotary": 2, "gated": 2}
    fusion.undo()
    calls.clear()
    assert_same(step(model), expected)
    assert not calls


def test_proofs_do_not_depend_on_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(proofs, "known", {})
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they load
    try:
        with torch.device("meta"), torch.inference_mode():
            fusion = fuse_parts(model)
    finally:
        torch.set_default_dtype(dtype)
    assert all(torch.bfloat16 in f.dtypes for f in fusion.fused)
    assert len(fusion.fused) == 4


def test_what_runs_on_a_gpu_is_proven_on_the_cpu() -> None:
    model = llama()
    on_gpu = proofs.Forms(torch.device("cpu"), runs_on="cuda")
    form, _ = on_gpu.norm(model.model.norm)
    own, _ = proofs.Forms(torch.device("cpu")).norm(model.model.norm)
    assert form is not None
    assert own is not None
    assert {k[0] for k in form.proven} == {k[0] for k in form.after_sum} == {"cuda"}
    assert [k[1:] for k in form.proven] == [k[1:] for k in own.proven]
    assert form.fused is not own.fused
    assert on_gpu.norm(model.model.norm)[0] is form


class Passes(TorchDispatchMode):
    """Operators of PyTorch that compute something as large as all hidden states."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        large = any(isinstance(t, Tensor) and t.numel() >= self.size for t in tree_leaves(out))
        if large and op.namespace != "samebits" and not op.is_view:
            self.found[op.overloadpacket.__name__] += 1
        return out


def test_a_fused_step_has_no_other_passes_over_memory() -> None:
    """No casts, no copies and no zeros: only sums of gradients, and that after a layer."""
    model, labels = llama(), ids(4, 48)
    samebits.fuse(model)
    with batch_invariant("ignore"):
        model(labels, labels=labels).loss.backward()  # sizes that are computed once
        model.zero_grad()
        with Passes(labels.numel() * model.config.hidden_size) as passes:
            model(labels, labels=labels, use_cache=False).loss.backward()
    forward, products_of_a_norm = 1, 1 + 2  # gate and up; q, k and v
    assert passes.found == {"add": 2 * (forward + products_of_a_norm + 1)}


def test_outside_of_the_mode_the_own_code_runs(calls: Counter[str]) -> None:
    model = llama()
    expected = model(ids()).logits
    samebits.fuse(model)
    calls.clear()
    assert_same_bits(model(ids()).logits, expected)
    assert not calls
    samebits.enable_batch_invariant_mode("ignore")
    try:
        model(ids())
    finally:
        samebits.disable_batch_invariant_mode()
    assert calls


def test_undo_gives_classes_back(calls: Counter[str]) -> None:
    model = llama()
    classes, expected = [type(m) for m in model.modules()], step(model)
    fusion = samebits.fuse(model)
    assert [type(m) for m in model.modules()] != classes
    assert not samebits.fuse(model).fused, "a fused model has nothing to fuse"
    fusion.undo()
    fusion.undo()
    assert [type(m) for m in model.modules()] == classes
    calls.clear()
    assert_same(step(model), expected)
    assert not calls


def test_undo_refuses_classes_that_changed_since() -> None:
    model = llama()
    fusion = samebits.fuse(model)
    layer = model.model.layers[0]
    fused = type(layer)
    layer.__class__ = type("Sharded", (fused,), {})
    with pytest.raises(RuntimeError, match="got Sharded"):
        fusion.undo()
    layer.__class__ = fused
    fusion.undo()


class Norm(nn.Module):
    """As Llama's; its mean is of n - 1 entries if it is off by one."""

    def __init__(self, off: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.small, self.off = 1e-5, off

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - self.off)
        return self.scale * (x * torch.rsqrt(mean + self.small)).to(dtype)


class Layer(nn.Module):
    """Two sums with norms, of which one follows what is not a sum of rows; and a gate."""

    def __init__(self, off: int = 0, act: Any = F.silu) -> None:
        super().__init__()
        self.first, self.second, self.act = Norm(off), Norm(off), act
        self.up, self.gate = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        moved = x + shift  # which is broadcast
        y = self.first(moved)
        x = x + self.act(self.gate(y)) * self.up(y)
        kept = x
        x = self.second(kept)
        return x + kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_modules_of_ones_own(dtype: torch.dtype, calls: Counter[str]) -> None:
    torch.manual_seed(0)
    layer = Layer().to(dtype)
    given = torch.randn(3, 5, 16, dtype=dtype), torch.randn(16, dtype=dtype)

    def run() -> list[Tensor]:
        layer.zero_grad()
        x = given[0].clone().requires_grad_()
        with batch_invariant("ignore"):
            y = layer(x, given[1])
            y.backward(torch.ones_like(y))
        return [y, x.grad, *(p.grad for p in layer.parameters())]

    expected = run()
    fusion = samebits.fuse(layer, given)
    assert kinds(fusion) == {"RMS norm": 2, "residual sum and RMS norm": 1, "gated activation": 1}
    calls.clear()
    for found, want in zip(run(), expected, strict=True):
        assert_same_bits(found, want)
    assert calls["add_rms_norm"] == (1 if dtype == torch.float32 else 2)


def test_what_differs_is_left() -> None:
    """A norm with another mean; an activation with other bits than its name says."""
    layer = Layer(off=1, act=lambda x: F.silu(x) * 1.0078125).bfloat16()
    given = torch.randn(3, 5, 16).bfloat16(), torch.randn(16).bfloat16()
    fusion = samebits.fuse(layer, given)
    assert not fusion.fused
    assert {type(layer), type(layer.first)} == {Layer, Norm}
    assert str(fusion).startswith("nothing was fused")


class Detached(Layer):
    """Its sum has no gradient of what is used after the norm, which no proof of a part shows."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        total = x + self.up(x)
        y: Tensor = self.first(total)
        total.add_(1.0)
        out: Tensor = y + total
        return out


class Power(Norm):
    """Its root is a power, whose gradient has other bits in float32. Rounded to 16 bits they rarely show."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True) + self.small
        out: Tensor = (wide * torch.pow(mean, -0.5) * self.scale.float()).type_as(x)
        return out


def test_16_bits_do_not_hide_what_differs() -> None:
    layer = Layer().bfloat16()
    layer.first, layer.second = Power().bfloat16(), Power().bfloat16()
    given = torch.randn(3, 5, 16).bfloat16(), torch.randn(16).bfloat16()
    assert set(kinds(samebits.fuse(layer, given))) == {"gated activation"}


def test_a_module_whose_whole_differs_is_left() -> None:
    """In place, what was to be kept for the backward changes: the fused form fails, or differs."""
    layer = Detached().bfloat16()
    given = torch.randn(3, 5, 16).bfloat16(), torch.randn(16).bfloat16()
    fusion = samebits.fuse(layer, given)
    assert [(u.what, u.names) for u in fusion.left] == [("residual sum and RMS norm", ("",))], fusion
    assert type(layer) is Detached
    assert type(layer.first) is not Norm


def test_a_wrong_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator with one wrong bit, in the forward or in the backward, fuses nothing."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 1.0078125

    own = forms.gated
    given = torch.randn(3, 5, 16).bfloat16(), torch.randn(16).bfloat16()
    for wrong in (lambda y: y * 1.0078125, cast(Any, Off).apply):
        proofs.known.clear()
        monkeypatch.setattr(forms, "gated", lambda *a, wrong=wrong, **k: wrong(own(*a, **k)))
        assert "gated activation" not in kinds(samebits.fuse(Layer().bfloat16(), given))
    proofs.known.clear()
    monkeypatch.setattr(forms, "gated", own)
    assert "gated activation" in kinds(samebits.fuse(Layer().bfloat16(), given))


GATED_NORMS = {
    "qwen3_next": "Qwen3NextRMSNormGated",
    "qwen3_5": "Qwen3_5RMSNormGated",
    "olmo_hybrid": "OlmoHybridRMSNormGated",
}


def gated_norm(of: str = "qwen3_next", dtype: torch.dtype = torch.bfloat16) -> Any:
    source = pytest.importorskip(f"transformers.models.{of}.modeling_{of}")
    norm = getattr(source, GATED_NORMS[of])(48, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


def gates(dtype: torch.dtype, kind: str = "normal") -> list[Tensor]:
    """Heads' rows, their gates, and the gradient of what a norm makes of them."""
    return [values(kind, (2, 7, 48), dtype, seed) for seed in range(3)]


def run_gated(norm: Any, x: Tensor, gate: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_(), norm.weight]
    with batch_invariant("error"):
        y = norm(leaves[0], leaves[1])
        return [y, *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


@pytest.mark.parametrize("of", GATED_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_norms(of: str, dtype: torch.dtype, device: str, calls: Counter[str]) -> None:
    """Two operators in 16 bits. In float32 the own code runs, as that of a norm does."""
    norm = gated_norm(of, dtype).to(device)
    own = type(norm)
    given = [gates(dtype, kind) for kind in ("normal", "tiny")] + [[8 * t for t in gates(dtype)]]
    given[0][0][0], given[0][1][0, :3], given[0][2][1] = 0.0, -0.0, 0.0
    given = [[t.to(device) for t in tensors] for tensors in given]
    expected = [run_gated(norm, *tensors) for tensors in given]
    fusion = samebits.fuse(norm)
    assert kinds(fusion) == {"gated RMS norm": 1}
    assert fusion.fused[0].dtypes == (torch.bfloat16, torch.float16)
    assert not fusion.left
    calls.clear()
    for tensors, wanted in zip(given, expected, strict=True):
        for found, want in zip(run_gated(norm, *tensors), wanted, strict=True):
            assert_same_bits(found, want)
    assert calls == ({} if dtype == torch.float32 else {"add_rms_norm": 3, "gated": 3})
    with torch.no_grad():
        norm(*given[0][:2])
        assert calls["gated"] == (0 if dtype == torch.float32 else 3), "not in the mode"
    fusion.undo()
    assert type(norm) is own


def test_a_gated_norm_of_other_operands_runs_its_own_code(calls: Counter[str]) -> None:
    norm, (x, gate, grad) = gated_norm(), gates(torch.bfloat16)
    wide, of_gelu, another = copy.deepcopy(norm).float(), copy.deepcopy(norm), copy.deepcopy(norm)
    of_gelu.activation = "gelu"
    cases = [
        (norm, x, gate.float()),  # whose gate has another dtype
        (norm, x, gate[:, :1]),  # or shape
        (norm, x.float(), gate),
        (wide, x, gate),  # whose weight has another dtype
        (another, x, gate),  # that gets another activation
    ]
    others = [*cases[:-1], (of_gelu, x, gate)]
    expected = [run_gated(*case, grad) for case in others]
    samebits.fuse(nn.ModuleList([norm, wide, another]))
    another.activation = "gelu"
    calls.clear()
    for case, wanted in zip(cases, expected, strict=True):
        for found, want in zip(run_gated(*case, grad), wanted, strict=True):
            assert_same_bits(found, want)
    assert not calls
    run_gated(norm, x, gate, grad)
    assert calls == {"add_rms_norm": 1, "gated": 1}


def test_gated_norms_of_other_activations_and_orders(calls: Counter[str]) -> None:
    """An activation that `gated` has is recognised. A gate before the norm is not."""
    norm, tensors = gated_norm(), gates(torch.bfloat16)
    norm.activation = "sigmoid"
    expected = run_gated(norm, *tensors)
    assert kinds(samebits.fuse(norm)) == {"gated RMS norm": 1}
    calls.clear()
    for found, want in zip(run_gated(norm, *tensors), expected, strict=True):
        assert_same_bits(found, want)
    assert calls == {"add_rms_norm": 1, "gated": 1}
    source = pytest.importorskip("transformers.models.zamba2.modeling_zamba2")
    other = source.Zamba2RMSNormGated(48, 48).bfloat16()
    assert "gated RMS norm" not in kinds(samebits.fuse(other))


class OwnNorm(nn.Module):
    """A gated norm that may do without its gate, or all it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 48))
        self.eps, self.act, self.enabled = 1e-5, F.silu, True

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if not self.enabled:
            return x * self.weight
        wide = x.float()
        rows = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return rows if gate is None else (rows * self.act(gate.float())).to(x.dtype)


def test_a_gated_norm_without_its_gate_runs_its_own_code(calls: Counter[str]) -> None:
    norm, (x, gate, _) = OwnNorm().bfloat16(), gates(torch.bfloat16)
    own = type(norm)
    with batch_invariant("error"):
        wanted = norm(x), norm(x, None), norm(x, gate)
        fusion = samebits.fuse(norm)
        calls.clear()
        found = norm(x), norm(x, None), norm(x, gate)
    assert kinds(fusion) == {"gated RMS norm": 1}, "no norm alone, since none is run"
    assert calls == {"add_rms_norm": 1, "gated": 1}
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
    fusion.undo()
    assert type(norm) is own


@pytest.mark.parametrize(("name", "value"), [("act", F.relu), ("enabled", False), ("eps", 1e-2)])
def test_a_gated_norm_whose_attributes_change(name: str, value: Any, calls: Counter[str]) -> None:
    """As its activation may be a function, and not its name. The number is read whenever it runs."""
    norm, tensors = OwnNorm().bfloat16(), gates(torch.bfloat16)
    other = copy.deepcopy(norm)
    setattr(other, name, value)
    leaves = [t.clone().requires_grad_() for t in tensors[:2]]
    samebits.fuse(norm)
    calls.clear()
    with batch_invariant("error"):
        run = torch.compile(norm, backend="aot_eager", fullgraph=True)
        assert_same_bits(run(*leaves), norm(*leaves))
        assert calls["gated"] > 0
        setattr(norm, name, value)
        calls.clear()
        want = other(*leaves)
        assert_same_bits(norm(*leaves), want)
        assert_same_bits(run(*leaves), want)
    assert (calls["gated"] > 0) == (name == "eps")


def test_a_wrong_gated_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = forms.gated
    monkeypatch.setattr(proofs, "known", {})
    monkeypatch.setattr(forms, "gated", lambda *a, **k: own(*a, **k) * 1.0078125)
    assert "gated RMS norm" not in kinds(samebits.fuse(gated_norm()))
    proofs.known.clear()
    monkeypatch.setattr(forms, "gated", lambda *a, rounding, **k: own(*a, **k))  # rounded twice
    assert "gated RMS norm" not in kinds(samebits.fuse(gated_norm()))


def test_a_compiled_gated_norm_is_fused(calls: Counter[str]) -> None:
    norm, tensors = gated_norm(), gates(torch.bfloat16)
    expected = run_gated(norm, *tensors)
    samebits.fuse(norm)
    with batch_invariant("error"):
        run = torch.compile(norm, backend="aot_eager", fullgraph=True)
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        y = run(*leaves)
        found = [y, *torch.autograd.grad(y, [*leaves, norm.weight], tensors[2])]
    for t, want in zip(found, expected, strict=True):
        assert_same_bits(t, want)


def test_what_was_not_called_is_left() -> None:
    layer = Layer().bfloat16()
    fusion = samebits.fuse(layer)
    assert type(layer) is Layer
    assert kinds(fusion) == {"RMS norm": 2}
    assert {u.reason for u in fusion.left} == {
        "it was not called: give fuse the `inputs` of a forward that does"
    }


class Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.ones_like(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * x


def test_a_gate_whose_activation_is_fused_itself(calls: Counter[str]) -> None:
    layer, x = Gated(), torch.randn(5, 16)
    fusion = samebits.fuse(layer, (x,))
    assert {f.kind for f in fusion.fused} == {"Sigmoid", "Gated"}
    assert not fusion.left
    calls.clear()
    with batch_invariant():
        layer(x)
    assert calls["gated"] == 1, "the product has the activation in it"


def test_operands_that_were_not_proven_take_the_own_code(calls: Counter[str]) -> None:
    layer = Layer().bfloat16()
    samebits.fuse(layer, (torch.randn(2, 4, 16).bfloat16(), torch.randn(16).bfloat16()))
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    calls.clear()
    with batch_invariant("ignore"):
        layer.double()(x, x)
    assert not calls


def test_hooks_of_a_norm_see_its_call() -> None:
    model, seen = llama(), []
    samebits.fuse(model)
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda module, args, out: seen.append((args, out)))
    expected = step(model)
    assert [type(out) for _, out in seen] == [Tensor]
    norm._forward_hooks.clear()
    assert_same(step(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, calls: Counter[str]) -> None:
    model = llama()
    expected = step(model)
    samebits.fuse(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls.clear()
    assert_same(step(model, use_cache=False), expected)
    assert [calls["gated"], calls["norm_rotary"]] == [4, 4], "layers run twice"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    model = llama()
    expected = step(model)
    samebits.fuse(model)
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, backend=keep)
    for _ in range(2):
        assert_same(step(model, compiled), expected)
    found = Counter(
        str(n.target).split(".")[1] for g in graphs for n in g.graph.nodes if "samebits" in str(n.target)
    )
    assert [found[n] for n in OPERATORS] == [5, 0, 2, 2], found
    torch._dynamo.reset()


@pytest.mark.long
def test_compile_with_the_mode_inside() -> None:
    model = llama()
    with batch_invariant("ignore"), torch.no_grad():
        expected = model(ids()).logits
    samebits.fuse(model)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with batch_invariant("ignore"):
            out: Tensor = model(x).logits
            return out

    with torch.no_grad():
        assert_same_bits(run(ids()), expected)
    torch._dynamo.reset()


def test_copies_stay_fused_and_pickles_do_not(calls: Counter[str]) -> None:
    model = llama()
    own = [type(m) for m in model.modules()]
    expected = step(model)
    samebits.fuse(model)
    other = copy.deepcopy(model)
    calls.clear()
    assert_same(step(other), expected)
    assert calls["gated"] == 2
    other.lm_head.weight.data.zero_()
    assert_same(step(model), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [type(m) for m in loaded.modules()] == own
    assert_same(step(loaded), expected)


@pytest.mark.parametrize("first", ["fuse", "adapters"])
def test_lora(first: str, calls: Counter[str]) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra peft")
    found = []
    for fused in (False, True):
        model = llama()
        if fused and first == "fuse":
            samebits.fuse(model)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        if fused and first == "adapters":
            samebits.fuse(model)
        calls.clear()
        found.append(step(model))
        assert calls == ({"add_rms_norm": 5, "norm_rotary": 2, "gated": 2} if fused else {})
    assert_same(*found)


def test_autocast_has_the_bits_of_the_own_code() -> None:
    model = llama(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        samebits.fuse(model)
        assert_same(step(model), expected)


def test_frozen_weights() -> None:
    model = llama()
    for p in model.parameters():
        p.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    expected = step(model)
    samebits.fuse(model)
    assert_same(step(model), expected)


@pytest.mark.parametrize("many", [False, True], ids=["mean", "num_items_in_batch"])
def test_the_loss_in_float32(many: bool, calls: Counter[str]) -> None:
    model, labels = llama(torch.float32), ids()
    labels[0, 3:5] = -100
    given: dict[str, Any] = {"labels": labels} | ({"num_items_in_batch": torch.tensor(23)} if many else {})
    expected = step(model, **given)
    fusion = samebits.fuse(model, loss=True)
    assert kinds(fusion)["loss from hidden states"] == 1
    calls.clear()
    found = step(model, **given)
    assert calls["linear_logp"] == 1
    assert "logits" not in found
    expected.pop("logits")
    assert_same(found, expected)
    assert "logits" in step(model), "without labels"


def test_the_loss_in_16_bits_is_of_logits_in_float32() -> None:
    model, labels = llama(), ids()
    fusion = samebits.fuse(model, loss=True)
    (found,) = (f for f in fusion.fused if f.what == "loss from hidden states")
    assert found.dtypes == (torch.float32, torch.bfloat16, torch.float16)
    fused = step(model, labels=labels)
    fusion.undo()
    own = step(model, labels=labels)
    model.lm_head.__class__ = loss.WideHead
    wide = step(model, labels=labels)
    wide.pop("logits")
    assert_same(fused, wide)
    assert fused["loss"] != own["loss"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", ["mean", "num_items_in_batch", "shift_labels"])
def test_the_loss_from_logits(given: str, dtype: torch.dtype, calls: Counter[str]) -> None:
    """Logits are returned, and are not stored in float32."""
    model, labels = llama(dtype), ids()
    labels[0, 3:5] = -100
    others = {
        "mean": {},
        "num_items_in_batch": {"num_items_in_batch": torch.tensor(23)},
        "shift_labels": {"shift_labels": labels.roll(-1, 1)},
    }
    expected = step(model, labels=labels, **others[given])
    (found,) = (f for f in samebits.fuse(model).fused if f.what == "loss from logits")
    assert found.dtypes == (torch.bfloat16, torch.float16)
    calls.clear()
    assert_same(step(model, labels=labels, **others[given]), expected)
    assert calls["cross_entropy"] == (dtype != torch.float32)
    with pytest.raises(IndexError, match=r"samebits\.cross_entropy: target"):
        step(model.bfloat16(), labels=labels.masked_fill(labels > 50, 97))
    with batch_invariant("ignore"), pytest.raises((ValueError, RuntimeError)):  # as of the own code
        model(ids(), labels=labels[:, :4])


def test_a_loss_of_scaled_logits_is_left() -> None:
    import transformers

    config = transformers.GraniteConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        logits_scaling=4.0,
    )
    fusion = samebits.fuse(transformers.GraniteForCausalLM(config), loss=True)
    assert "loss from hidden states" in {u.what for u in fusion.left}, fusion


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="model: expected a Module, got int"):
        samebits.fuse(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected parameters on a CPU or a GPU, got meta"):
        samebits.fuse(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        samebits.fuse(llama(), {"nothing": 1})
