"""``samebits.nn.Linear`` is PyTorch's layer with the bits of ``samebits.linear``; ``convert`` swaps it in."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samebits
from samebits import FMA, TENSOR_CORE, Contract
from samebits.testing import assert_same_bits, values
from tests.support.devices import DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients(layer: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    y = layer(x, **options)
    return (y, *torch.autograd.grad(y, [*layer.parameters()], y.detach()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_torchs_with_the_bits_of_samebits(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(3)
    theirs = nn.Linear(24, 8, bias, dtype=dtype)
    torch.manual_seed(3)
    ours = samebits.nn.Linear(24, 8, bias, dtype=dtype)
    assert [*theirs.state_dict()] == [*ours.state_dict()]
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert_same_bits(p, q, name)
    x = values("normal", (2, 5, 24), dtype, 0)
    assert_same_bits(ours(x), samebits.linear(x, ours.weight, ours.bias))
    torch.testing.assert_close(ours(x), theirs(x))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(theirs)


def test_contract_and_cu_seqlens_reach_the_product() -> None:
    layer = samebits.nn.Linear(24, 8, dtype=torch.bfloat16, contract=FMA)
    x = values("normal", (9, 24), torch.bfloat16, 0)
    assert_same_bits(layer(x), samebits.linear(x, layer.weight, layer.bias, contract=FMA))
    assert "contract=FMA" in repr(layer)
    cu_seqlens = torch.tensor([0, 4, 9])
    layer = samebits.nn.Linear(24, 8, dtype=torch.bfloat16)
    packed = gradients(layer, x, cu_seqlens=cu_seqlens)
    y = samebits.linear(x, layer.weight, layer.bias, cu_seqlens=cu_seqlens)
    for got, want in zip(packed[1:], torch.autograd.grad(y, [*layer.parameters()], y.detach()), strict=True):
        assert_same_bits(got, want)
    with pytest.raises(TypeError, match=r"samebits\.linear: weight: expected torch\.float32 like x"):
        layer(x.float())


@pytest.mark.parametrize("contract", [TENSOR_CORE, FMA], ids=["mma", "fma"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_float32_results_are_the_accumulators(
    device: str, bias: bool, packed: bool, contract: Contract
) -> None:
    """They are those of ``matmul``, and the gradients those of :func:`samebits.linear` of a rounded one."""
    layer = samebits.nn.Linear(24, 8, bias, dtype=torch.bfloat16, contract=contract, out_dtype=torch.float32)
    layer.to(device)
    x = values("normal", (9, 24), torch.bfloat16, 0).to(device).requires_grad_()
    options = {"cu_seqlens": torch.tensor([0, 4, 9], device=device)} if packed else {}
    y = layer(x, **options)
    product = samebits.matmul(x, layer.weight.mT, out_dtype=torch.float32, contract=contract)
    assert_same_bits(y, product + layer.bias.float() if bias else product)
    assert_same_bits(y.bfloat16(), samebits.linear(x, layer.weight, layer.bias, contract=contract))
    grad = values("normal", (9, 8), torch.float32, 1).to(device)
    leaves = [x, *layer.parameters()]
    got = torch.autograd.grad(y, leaves, grad)
    if contract == TENSOR_CORE:
        narrow = samebits.linear(x, layer.weight, layer.bias, contract=contract, **options)
        want = torch.autograd.grad(narrow, leaves, grad.bfloat16())
    else:  # nothing is rounded before the chains
        wide = [t.detach().float().requires_grad_() for t in leaves]
        want = torch.autograd.grad(samebits.linear(*wide, contract=contract, **options), wide, grad)
        want = tuple(t.bfloat16() for t in want)
    for g, w in zip(got, want, strict=True):
        assert_same_bits(g, w)
    assert_same_bits(layer(x[0]), y[0], "one row")
    assert "out_dtype=torch.float32" in repr(layer)


def test_a_head_in_float32_has_the_bits_of_linear_logp() -> None:
    head = nn.Linear(24, 70, dtype=torch.bfloat16)
    samebits.convert(head, out_dtype=torch.float32)
    x = values("normal", (2, 9, 24), torch.bfloat16, 0).requires_grad_()
    targets = torch.arange(18).view(2, 9)
    leaves = [x, *head.parameters()]
    found = samebits.logp(head(x), targets)
    expected = samebits.linear_logp(x, head.weight, targets, head.bias)
    assert_same_bits(found, expected)
    grad = values("normal", (2, 9), torch.float32, 1)
    for got, want in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert_same_bits(got, want)


def test_a_dtype_of_results_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"samebits\.linear: out_dtype: expected torch\.bfloat16 or torch\.float32"
    ):
        samebits.nn.Linear(24, 8, dtype=torch.bfloat16, out_dtype=torch.float16)(torch.ones(24).bfloat16())
    with pytest.raises(TypeError, match=r"samebits\.convert: out_dtype: expected a torch\.dtype or None"):
        samebits.convert(nn.Linear(2, 2), out_dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out_dtype: expected None beside fp8"):
        samebits.nn.Linear(128, 128, fp8="block", out_dtype=torch.float32)


def test_from_torch_shares_the_parameters() -> None:
    theirs = nn.Linear(6, 4, dtype=torch.bfloat16).eval()
    theirs.weight.requires_grad_(False)
    ours = samebits.nn.Linear.from_torch(theirs, contract=TENSOR_CORE)
    assert ours.weight is theirs.weight
    assert ours.bias is theirs.bias
    assert (ours.training, ours.in_features, ours.out_features, ours.contract) == (False, 6, 4, TENSOR_CORE)
    assert samebits.nn.Linear.from_torch(nn.Linear(6, 4, bias=False)).bias is None


def test_from_torch_refuses_what_a_new_layer_would_lose() -> None:
    hooked = nn.Linear(6, 4)
    hooked.register_forward_hook(lambda *a: None)
    with pytest.raises(TypeError, match=r"it has hooks, which samebits\.convert"):
        samebits.nn.Linear.from_torch(hooked)
    with pytest.raises(TypeError, match="LazyLinear: its weight is not initialized"):
        samebits.nn.Linear.from_torch(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"ReLU: it is not a plain torch\.nn\.Linear"):
        samebits.nn.Linear.from_torch(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["pickle", "torch.save", "deepcopy"])
def test_layers_are_copied_and_stored(protocol: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    samebits.convert(model, contract=FMA)
    if protocol == "pickle":
        back = pickle.loads(pickle.dumps(model))
    elif protocol == "deepcopy":
        back = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        back = torch.load(file, weights_only=False)
    assert type(back[0]) is samebits.nn.Linear
    assert back[0].contract == FMA
    assert_same_bits(back(torch.ones(3, 6)), model(torch.ones(3, 6)))


class Model(nn.Module):
    """Tied weights, a layer in two places, hooks, and layers in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.again = self.up
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(F.gelu(self.again(self.embedding(ids)))))
        return y


def test_convert_changes_layers_in_place_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = Model()
    model.down.weight.requires_grad_(False)
    model.up.eval()
    seen = []
    model.up.register_forward_hook(lambda module, args, result: seen.append(type(module)))
    layers = dict(model.named_modules())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    ids = torch.arange(10).reshape(2, 5)
    before = model(ids)

    report = samebits.convert(model)
    assert report.converted == ("up", "down", "head")
    assert report.already == report.unconverted == ()
    assert dict(model.named_modules()) == layers
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.head.weight is model.embedding.weight
    assert model.again is model.up
    assert (model.up.training, model.down.training) == (False, True)
    assert not model.down.weight.requires_grad
    torch.testing.assert_close(model(ids), before)
    assert seen == [nn.Linear, samebits.nn.Linear]
    h = model.embedding(ids)
    want = samebits.linear(F.gelu(samebits.linear(h, model.up.weight, model.up.bias)), model.down.weight)
    assert_same_bits(model(ids), samebits.linear(want, model.embedding.weight))

    again = samebits.convert(model)
    assert again.converted == ()
    assert again.already == ("up", "down", "head")
    assert str(again) == "layers converted: 0; converted before: 3; left as they are: 0"
    otherwise = samebits.convert(model, filter=lambda name, _: name == "head", out_dtype=torch.float32)
    assert otherwise.already == ("up", "down")
    assert [(x.name, x.reason) for x in otherwise.unconverted] == [
        ("head", "it was converted before, with other options")
    ]


def test_a_filter_that_raises_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ZeroDivisionError):
        samebits.convert(model, filter=lambda name, module: bool(1 / (1 - int(name))))
    assert [type(layer) for layer in model] == [nn.Linear] * 2


def test_convert_takes_a_layer_a_filter_and_a_contract() -> None:
    layer: nn.Module = nn.Linear(4, 4)
    assert samebits.convert(layer, contract=FMA).converted == ("",)
    assert type(layer) is samebits.nn.Linear
    assert layer.contract == FMA
    model = Model()
    report = samebits.convert(model, filter=lambda name, module: name != "head")
    assert report.converted == ("up", "down")
    assert [(u.name, u.reason) for u in report.unconverted] == [("head", "the filter left it out")]
    assert type(model.head) is nn.Linear


class Quantised(nn.Linear):
    pass


def wrapped() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Quantised(4, 4), "not a plain torch.nn.Linear"),
        (wrapped, "its forward was replaced on the instance"),
        (lambda: nn.LazyLinear(3), "run the model once first"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "convert first, then parametrize"),
        (lambda: nn.Linear(4, 4).double(), "its weight is torch.float64"),
        (lambda: nn.Bilinear(2, 2, 2), "computes products itself"),
        (lambda: nn.LSTM(2, 2), "computes products itself"),
        (lambda: nn.Conv1d(2, 2, 1), "computes products itself"),
        (lambda: nn.MultiheadAttention(4, 2), "computes products itself"),
        (lambda: nn.MultiheadAttention(4, 2).out_proj, "not a plain torch.nn.Linear"),
    ],
)
def test_what_is_not_converted_is_named_with_the_reason(make: Any, says: str) -> None:
    model = nn.Sequential(make())
    kind = type(model[0])
    report = samebits.convert(model)
    assert report.converted == ()
    assert type(model[0]) is kind
    first = report.unconverted[0]
    assert (first.name, first.kind) == ("0", kind.__name__)
    assert says in first.reason
    assert f"0 ({kind.__name__}): " in str(report)


def test_layers_that_pytorchs_modules_bypass_are_not_converted() -> None:
    def transformer() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    model = transformer()
    report = samebits.convert(model)
    assert report.converted == ()
    reasons = {u.name: u.reason for u in report.unconverted}
    assert set(reasons) == {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    assert "uses its weight without calling it" in reasons["self_attn.out_proj"]
    assert "torch.backends.mha.set_fastpath_enabled(False)" in reasons["linear1"]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert samebits.convert(model).converted == ("linear1", "linear2")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_conv1d_of_transformers_is_named() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    report = samebits.convert(nn.Sequential(pytorch_utils.Conv1D(4, 3)))
    assert "its weight is transposed" in report.unconverted[0].reason


def test_convert_before_parametrizing_and_weight_norm() -> None:
    layer = nn.Linear(8, 4)
    samebits.convert(layer)
    nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(3, 8)
    assert_same_bits(layer(x), samebits.linear(x, layer.weight, layer.bias))
    assert samebits.convert(layer).already == ("",)


def with_main_grads(layer: samebits.nn.Linear, *names: str) -> samebits.nn.Linear:
    for name in names:
        parameter = getattr(layer, name)
        parameter.main_grad = torch.zeros(parameter.shape)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["", "f32 out"])
def test_main_grad_has_the_bits_of_one_batch(
    dtype: torch.dtype, micro_batches: int, packed: bool, out_dtype: torch.dtype | None
) -> None:
    layer = with_main_grads(samebits.nn.Linear(24, 8, dtype=dtype, out_dtype=out_dtype), "weight", "bias")
    x = values("normal", (4, 19, 24), dtype, 0).requires_grad_()
    want = torch.zeros(8, 24), torch.zeros(8, 1)
    with torch.no_grad():
        own = layer(x).detach()
        dy = own.to(dtype)
        for x_s, dy_s in zip(x, dy, strict=True):
            samebits.addmm_(want[0], dy_s.mT, x_s)
            samebits.addmm_(want[1], dy_s.mT, torch.ones(19, 1, dtype=dtype))
    for part, grad in zip(x.chunk(micro_batches), own.chunk(micro_batches), strict=True):
        cu_seqlens = None
        if packed:
            cu_seqlens = torch.arange(len(part) + 1) * 19
            part, grad = part.flatten(0, 1), grad.flatten(0, 1)
        layer(part, cu_seqlens).backward(grad)
    assert_same_bits(layer.weight.main_grad, want[0])
    assert_same_bits(layer.bias.main_grad, want[1][:, 0])
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert layer.weight.grad_added_to_main_grad is True
    assert_same_bits(x.grad, samebits.matmul(dy, layer.weight).detach())


def test_main_grad_of_one_parameter_leaves_the_other_to_autograd() -> None:
    plain = samebits.nn.Linear(8, 4)
    layer = with_main_grads(copy.deepcopy(plain), "weight")
    x = torch.randn(2, 3, 8)
    _, weight, bias = gradients(plain, x)
    y = layer(x)
    y.backward(y.detach())
    assert_same_bits(layer.weight.main_grad, weight)
    assert_same_bits(layer.bias.grad, bias)
    layer.weight.requires_grad_(False)
    layer.weight.main_grad.zero_()
    layer(x).sum().backward()
    assert not layer.weight.main_grad.any()


def test_main_grad_under_autocast_is_not_rounded_to_the_low_precision() -> None:
    layer = with_main_grads(samebits.nn.Linear(24, 8), "weight", "bias")
    x = torch.randn(2, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(y.detach())
    want = torch.zeros(8, 24)
    for x_s, dy_s in zip(x.bfloat16(), y.detach(), strict=True):
        samebits.addmm_(want, dy_s.mT, x_s)
    assert_same_bits(layer.weight.main_grad, want)


@pytest.mark.parametrize(
    ("main_grad", "error", "match"),
    [
        (
            torch.zeros(4, 8, dtype=torch.bfloat16),
            TypeError,
            "weight.main_grad: expected a dense float32 tensor, got torch.bfloat16",
        ),
        (
            torch.zeros(8, 4),
            ValueError,
            r"weight.main_grad: expected shape \(4, 8\) like weight, got \(8, 4\)",
        ),
        (3, TypeError, "got int"),
        (
            torch.zeros(4, 8, device="meta"),
            ValueError,
            "main_grad: expected device cpu like weight, got meta",
        ),
        (torch.zeros(4, 8, requires_grad=True), ValueError, "requires no grad"),
    ],
)
def test_a_main_grad_of_another_kind_is_refused(main_grad: Any, error: type[Exception], match: str) -> None:
    layer = samebits.nn.Linear(8, 4)
    layer.weight.main_grad = main_grad
    with pytest.raises(error, match=match):
        layer(torch.ones(2, 8))
    with torch.no_grad():
        layer(torch.ones(2, 8))


def test_a_main_grad_that_shares_memory_is_refused_and_nothing_is_written() -> None:
    layer, x, shared = samebits.nn.Linear(8, 4), torch.zeros(4, 8), torch.zeros(36)
    layer.bias.main_grad = shared[32:]
    for name, main_grad in {
        "weight": layer.weight.data,
        "x": x,
        "bias.main_grad": shared[4:].view(4, 8),
    }.items():
        layer.weight.main_grad = main_grad
        with pytest.raises(
            ValueError, match=f"main_grad: expected memory of its own, got memory that {name}"
        ):
            layer(x)
    layer.weight.main_grad = torch.zeros(1, 1).expand(4, 8)
    with pytest.raises(ValueError, match=r"weight\.main_grad: expected elements that do not overlap"):
        layer(x)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_main_grad_that_was_exchanged_before_the_backward_is_looked_at_again(name: str) -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight", "bias")
    y = layer(torch.ones(2, 8))
    parameter = getattr(layer, name)
    parameter.main_grad = torch.zeros(9, *parameter.shape[1:])
    with pytest.raises(ValueError, match=f"{name}.main_grad: expected shape"):
        y.sum().backward()
    assert not any(p.main_grad.any() for p in layer.parameters())


def test_main_grad_saves_an_operand_only_for_the_other_ones_gradient() -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight", "bias")
    layer.weight.requires_grad_(False)
    x = torch.ones(2, 8)
    y = layer(x)
    x.add_(1)
    y.sum().backward()
    assert layer.bias.main_grad.tolist() == [2.0] * 4
    layer.weight.requires_grad_()
    y = layer(torch.ones(2, 8))
    with torch.no_grad():
        layer.weight.add_(1)
    y.sum().backward()
    assert layer.weight.main_grad.tolist() == [[2.0] * 8] * 4


@pytest.mark.parametrize("x", [None, 5, torch.ones(2, 8, dtype=torch.int64)], ids=str)
def test_main_grad_changes_no_error(x: Any) -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"samebits\.linear: x: expected"),
    ):
        layer(x)


@pytest.mark.parametrize("size", [(), (1,)])
def test_main_grad_beside_a_bias_of_one_number_is_refused(size: tuple[int, ...]) -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight")
    layer.bias = nn.Parameter(torch.zeros(size))
    with pytest.raises(ValueError, match=r"bias: expected shape \(4,\) beside main_grad"):
        layer(torch.ones(2, 8))
    assert not layer.weight.main_grad.any()


def test_main_grad_under_vmap_is_refused() -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight")
    with pytest.raises(NotImplementedError, match=r"nn\.Linear: main_grad: torch\.vmap is not"):
        torch.vmap(layer)(torch.ones(3, 2, 8))
    assert not layer.weight.main_grad.any()


def test_main_grad_under_compile_is_refused() -> None:
    layer = with_main_grads(samebits.nn.Linear(8, 4), "weight")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="main_grad"):
        compiled(torch.ones(2, 8))


class Branches(torch.nn.Module):
    """Layers in a module and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.relu(self.first(x)))


@pytest.mark.parametrize("fp8", [None, "block"])
def test_tools_that_rewrite_models_take_converted_ones(fp8: Any) -> None:
    """`torch.fx` has a call of each layer in its graph, `torch.jit.script` calls it in Python."""
    model = Branches()
    calls = [n.target for n in torch.fx.symbolic_trace(model).graph.nodes if n.op == "call_module"]
    samebits.convert(model, fp8=fp8)
    x = torch.randn(3, 8)
    traced, scripted = torch.fx.symbolic_trace(model), torch.jit.script(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == calls
    assert isinstance(model.first, samebits.nn.Linear)
    assert isinstance(traced.first, samebits.nn.Linear)
    expected = model(x)
    expected.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for tool in (traced, scripted):
        model.zero_grad()
        out = tool(x)
        assert_same_bits(out, expected)
        out.sum().backward()
        for name, p in tool.named_parameters():
            assert_same_bits(p.grad, grads[name])


def test_sequences_are_traced_and_scripted(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = samebits.nn.Linear(8, 4)

        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            return self.layer(x, cu_seqlens)

    Packed.forward.__annotations__ = {"x": Tensor, "cu_seqlens": Tensor, "return": Tensor}
    model, args = Packed(), (torch.randn(5, 8), torch.tensor([0, 2, 5]))
    for tool in (torch.fx.symbolic_trace, torch.jit.script):
        assert_same_bits(tool(model)(*args), model(*args))
    with pytest.raises(RuntimeError, match="Could not export Python function"):
        torch.jit.script(model).save(str(tmp_path / "model"))
