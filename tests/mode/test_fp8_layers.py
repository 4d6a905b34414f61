"""Layers and models of ``transformers`` in block FP8 under the mode."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from torch.nn.functional import ScalingType
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    LlamaConfig,
    Qwen3Config,
)
from transformers.integrations import finegrained_fp8 as fp8

import samebits
import samebits.transformers
from benchmarks.zoo.fp8 import in_fp8
from samebits.contract import FP8
from samebits.mode import exchanged, fp8_layers
from samebits.testing import assert_same_bits, values
from samebits.transformers import register
from tests.mode.conftest import Within
from tests.support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 416,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=64),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=160,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=96,
        q_lora_rank=144,
        qk_rope_head_dim=16,
        qk_nope_head_dim=48,
        v_head_dim=48,
    ),
}


def make(name: str, device: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16, **options)
    return in_fp8(model).to(device).eval()


def layer(n: int, k: int, bias: bool = False, device: str = "cpu") -> tuple[Any, Tensor]:
    """An ``FP8Linear``, and the weight that it was made from."""
    weight = values("normal", (n, k), torch.bfloat16, 1)
    made = fp8.FP8Linear(k, n, block_size=(128, 128), has_bias=bias)
    quantized = samebits.quantize(weight, block=(128, 128))
    made.weight, made.weight_scale_inv = (nn.Parameter(t, requires_grad=False) for t in quantized)
    if bias:
        made.bias = nn.Parameter(values("normal", (n,), torch.bfloat16, 2))
    return made.to(device), weight.to(device)


def product(x: Tensor, layer: Any, weight: Tensor, scale: Tensor) -> Tensor:
    of_x, scale_x = samebits.quantize(x)
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    bias = None if getattr(layer, "bias", None) is None else layer.bias.detach()
    return samebits.scaled_mm(
        of_x, weight.T, scale_x, recipes[0], scale.T, recipes[1], bias=bias, output_dtype=x.dtype
    )


# ---- layers


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_our_product(device: str, bias: bool, dtype: torch.dtype, within: Within) -> None:
    made, _ = layer(200, 300, bias, device)
    x = values("normal", (2, 5, 300), dtype, 3).to(device)
    want = product(x.flatten(0, 1), made, made.weight, made.weight_scale_inv).view(2, 5, 200)
    with within("error"), torch.no_grad():
        assert_same_bits(made(x), want)
        assert_same_bits(made(x[1, 2]), want[1, 2])
        assert made(x[:0]).shape == (0, 5, 200)


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_the_cpu(within: Within) -> None:
    made, _ = layer(384, 7168, True)
    x = values("normal", (37, 7168), torch.bfloat16, 3)
    with within("error"), torch.no_grad():
        want = made(x)
        assert_same_bits(made.to("cuda")(x.to("cuda")).cpu(), want)


@on_devices
def test_gradients_are_those_of_our_layer_in_fp8(device: str, within: Within) -> None:
    made, weight = layer(200, 300, True, device)
    ours = samebits.nn.Linear(300, 200, dtype=torch.bfloat16, device=device, fp8="block")
    ours.weight, ours.bias = nn.Parameter(weight), made.bias
    x = values("normal", (2, 5, 300), torch.bfloat16, 3).to(device).requires_grad_()
    seed = values("normal", (2, 5, 200), torch.bfloat16, 4).to(device)
    with within("error"):
        out = made(x)
    assert_same_bits(out, ours(x))
    want = torch.autograd.grad(ours(x), x, seed)[0]
    found = torch.autograd.grad(out, [x, made.bias], seed, allow_unused=True)  # outside of the context
    assert_same_bits(found[0], want)
    assert found[1] is None  # frozen, as in transformers


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16], ids=str)
def test_scales_may_have_fewer_bits(dtype: torch.dtype, within: Within) -> None:
    made, _ = layer(130, 256)
    scale = made.weight_scale_inv.log2().round().exp2()
    x = values("normal", (3, 256), torch.bfloat16, 3)
    made.weight_scale_inv = nn.Parameter(scale.to(dtype), requires_grad=False)
    with within("error"):
        assert_same_bits(made(x), product(x, made, made.weight, scale))


@on_devices
def test_a_block_diagonal_layer_has_a_product_for_each_group(device: str, within: Within) -> None:
    plain, _ = layer(3 * 128, 200, True, device)
    made = fp8.FP8GroupedLinear(200, 3 * 128, 3, block_size=(128, 128), has_bias=True)
    made.weight, made.weight_scale_inv, made.bias = plain.weight, plain.weight_scale_inv, plain.bias
    x = values("normal", (2, 5, 3, 200), torch.bfloat16, 3).to(device)
    with within("error"), torch.no_grad():
        out = made(x)
    for group in range(3):
        part = torch.arange(group * 128, group * 128 + 128, device=device)
        alone, _ = layer(128, 200, True, device)
        alone.weight = nn.Parameter(plain.weight[part], requires_grad=False)
        alone.weight_scale_inv = nn.Parameter(plain.weight_scale_inv[[group]], requires_grad=False)
        alone.bias = nn.Parameter(plain.bias[part])
        with within("error"), torch.no_grad():
            assert_same_bits(out[..., group, :], alone(x[..., group, :]))


def experts(device: str, implementation: str = "grouped_mm") -> tuple[Any, Tensor, Tensor, Tensor]:
    """A layer of 4 experts, tokens, their experts and the weights of those."""
    model = make("deepseek_v3", device)
    model.set_experts_implementation(implementation)
    x = values("normal", (23, 256), torch.bfloat16, 5).to(device)
    g = torch.Generator().manual_seed(0)
    to = torch.stack([torch.randperm(3, generator=g)[:2] for _ in x]).to(device)  # none to the last
    return model.model.layers[1].mlp.experts, x, to, torch.rand(23, 2, generator=g).to(device)


@on_devices
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "deepgemm", "samebits"])
def test_experts_compute_tokens_by_themselves(device: str, implementation: str, within: Within) -> None:
    register()
    layer, x, to, weights = experts(device, implementation)
    with within("error"), torch.no_grad():
        whole = layer(x, to, weights)
        for i in (0, 7, 22):
            assert_same_bits(layer(x[i : i + 1], to[i : i + 1], weights[i : i + 1])[0], whole[i])
        slots = []
        for slot in range(2):  # of one token, by itself
            e, weight = to[7, slot], weights[7, slot].to(torch.bfloat16)
            inner = product(x[7:8], None, layer.gate_up_proj[e], layer.gate_up_proj_scale_inv[e])
            inner = layer._apply_gate(inner)
            slots.append(product(inner, None, layer.down_proj[e], layer.down_proj_scale_inv[e]) * weight)
        assert_same_bits(torch.stack(slots, 1).sum(1)[0], whole[7])


@on_devices
def test_experts_in_a_loop_compute_tokens_by_themselves(device: str, within: Within) -> None:
    layer, x, to, weights = experts(device, "eager")
    with within("error"), torch.no_grad():
        whole = layer(x, to, weights)
        assert_same_bits(layer(x[7:8], to[7:8], weights[7:8])[0], whole[7])


@on_devices
def test_gradients_of_experts_know_no_mates(device: str, within: Within) -> None:
    """Not even in the sign of a zero."""
    layer, x, to, weights = experts(device)
    seed = -torch.zeros_like(x)
    seed[7] = x[8]

    def gradient(rows: slice) -> Tensor:
        some = x[rows].clone().requires_grad_()
        with within("error"):
            out = layer(some, to[rows], weights[rows])
        return torch.autograd.grad(out, some, seed[rows])[0]

    whole = gradient(slice(None))
    for i in (0, 7):
        assert_same_bits(gradient(slice(i, i + 1))[0], whole[i])
    assert whole[7].any()


@on_devices
def test_slots_of_other_processes_add_nothing(device: str, within: Within) -> None:
    layer, x, to, weights = experts(device)
    layer._is_expert_parallel = True
    elsewhere = torch.where(to == 2, layer.num_experts, to)
    with within("error"), torch.no_grad():
        found = layer(x, elsewhere, weights)
        want = layer(x, to, weights.masked_fill(to == 2, 0.0))
    assert torch.equal(found, want)


@pytest.mark.gpu
def test_a_cuda_graph_takes_experts(within: Within) -> None:
    """Nothing waits for the numbers of their tokens, which may change from one replay to the next."""
    layer, x, to, weights = experts("cuda")
    with within("error"), torch.no_grad():
        wanted = [layer(x, some, weights) for some in (to, to.flip(0))]
        graph, chosen = torch.cuda.CUDAGraph(), to.clone()
        with torch.cuda.graph(graph):
            out = layer(x, chosen, weights)
        for some, want in zip((to, to.flip(0)), wanted, strict=True):
            chosen.copy_(some)
            out.fill_(torch.nan)
            graph.replay()
            assert_same_bits(out, want)


# ---- experts of a model in 16 bits


def in_16_bits(kind: str, device: str = "cpu") -> tuple[Any, Tensor, Tensor, Tensor]:
    """A layer of 4 experts, tokens, their experts and the weights of those."""
    configs: dict[str, Any] = {
        "qwen3_moe": transformers.Qwen3MoeConfig(
            hidden_size=256, moe_intermediate_size=160, num_experts=4, num_experts_per_tok=2
        ),
        "gpt_oss": transformers.GptOssConfig(
            hidden_size=256, intermediate_size=160, num_local_experts=4, num_experts_per_tok=2
        ),
    }
    modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {"qwen3_moe": "Qwen3MoeExperts", "gpt_oss": "GptOssExperts"}[kind]
    made = getattr(modeling, name)(configs[kind]).to(device, torch.bfloat16)
    for i, parameter in enumerate(made.parameters()):
        parameter.data = values("normal", tuple(parameter.shape), torch.bfloat16, i).to(device) * 0.05
    _, x, to, weights = experts(device)
    return made, x, to, weights


CONVERTED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": "block"},
    "segments": {"contract": samebits.TENSOR_CORE.segmented(8)},
}


@on_devices
@pytest.mark.parametrize("how", CONVERTED)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_converted_experts_are_our_layers(kind: str, how: str, device: str, within: Within) -> None:
    """Each expert, on its tokens: outputs and gradients."""
    made, x, to, weights = in_16_bits(kind, device)
    own, options = type(made), CONVERTED[how]
    report = samebits.convert(made, **options)
    assert report.converted == ("",)
    assert samebits.convert(made, **options).already == ("",)
    assert isinstance(made, own)
    x, seed = x.clone().requires_grad_(), values("normal", (23, 256), torch.bfloat16, 9).to(device)
    out = made(x, to, weights)  # with or without the mode
    with within("error"):
        inside = made(x, to, weights)  # functions such as a sigmoid have other gradients there
        assert_same_bits(inside, out)
        order = to.flatten().argsort(stable=True)
        rows = x[:, None].expand(-1, 2, -1).flatten(0, 1)[order]
        ours, found = [], []
        for e, part in enumerate(rows.split(torch.bincount(to.flatten(), minlength=4).tolist())):
            names = ("gate_up_proj", "down_proj")
            up, down = (as_ours(getattr(made, n)[e], made.is_transposed, options) for n in names)
            inner = up(part) + made.gate_up_proj_bias[e] if made.has_bias else up(part)
            inner = down(made._apply_gate(inner))
            found.append(inner + made.down_proj_bias[e] if made.has_bias else inner)
            ours += [up.weight, down.weight]
        slots = torch.cat(found)[order.argsort()].unflatten(0, (23, 2))
        want = (slots * weights[..., None]).sum(1).to(torch.bfloat16)
        assert_same_bits(want, out)
        theirs = torch.autograd.grad(want, [x, *ours], seed)
    grads = torch.autograd.grad(inside, [x, made.gate_up_proj, made.down_proj], seed)
    assert_same_bits(grads[0], theirs[0])
    for grad, of in zip(grads[1:], (theirs[1::2], theirs[2::2]), strict=True):
        assert_same_bits(grad.mT if made.is_transposed else grad, torch.stack(of))


def as_ours(weight: Tensor, transposed: bool, options: dict[str, Any]) -> Any:
    weight = (weight.mT if transposed else weight).detach().contiguous()
    layer = samebits.nn.Linear(weight.shape[1], len(weight), False, dtype=weight.dtype, **options)
    layer.weight = nn.Parameter(weight)
    return layer


@pytest.mark.parametrize("how", CONVERTED)
def test_converted_experts_can_be_copied(how: str) -> None:
    made, *given = in_16_bits("qwen3_moe")
    plain = made(*given)
    samebits.convert(made, **CONVERTED[how])
    want = made(*given)
    assert not torch.equal(plain, want)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_same_bits(copied(*given), want)
        assert samebits.convert(copied, **CONVERTED[how]).already == ("",)
        assert samebits.convert(copied).already == ("",)  # no other options were asked for
        (left,) = samebits.convert(copied, contract=samebits.FMA).unconverted
        assert left.reason == "it was converted before, with other options"


def test_experts_that_stay_as_they_are() -> None:
    made, *_ = in_16_bits("qwen3_moe")
    assert samebits.convert(made).unconverted == ()  # the mode's
    (left,) = samebits.convert(made, fp8="block", filter=lambda *_: False).unconverted
    assert left.reason == "the filter left it out"
    (left,) = samebits.convert(made, fp8="block", contract=samebits.FMA).unconverted
    assert left.reason.startswith("experts in FP8 take no contract")
    (left,) = samebits.convert(made, contract=samebits.FMA, out_dtype=torch.float32).unconverted
    assert left.reason.startswith("experts take no out_dtype")
    made.to(torch.float64)
    (left,) = samebits.convert(made, fp8="block").unconverted
    assert left.reason.startswith("its gate_up_proj is torch.float64")
    made.forward = made.forward
    (left,) = samebits.convert(made, fp8="block").unconverted
    assert left.reason.startswith("its forward was replaced")
    (left,) = samebits.convert(experts("cpu")[0], fp8="block").unconverted
    assert left.reason.startswith("its weights are FP8 already")


def test_operators_of_experts_are_registered() -> None:
    layer, x, *_ = experts("cpu")
    made, *_ = in_16_bits("qwen3_moe")
    ends = torch.tensor([3, 3, 9, 20], dtype=torch.int32)
    weight, scale = layer.gate_up_proj.data, layer.gate_up_proj_scale_inv.data
    ops, tests = torch.ops.samebits, ("test_faketensor", "test_autograd_registration")
    x = x.requires_grad_()
    torch.library.opcheck(
        ops.fp8_grouped_weights.default, (x, weight, scale, ends, FP8.key), test_utils=tests
    )  # others compute with FP8, which PyTorch does not on a CPU
    key = samebits.TENSOR_CORE.on(samebits.HOPPER).key
    torch.library.opcheck(ops.fp8_grouped_linear.default, (x, made.gate_up_proj, ends, None, key))


# ---- what is refused, and what stays as it was


def refused(what: str) -> tuple[dict[str, Any], type[Exception], str]:
    return {
        "static": (
            {"activation_scheme": "static"},
            ValueError,
            'activation_scheme: one scale for all activations is not a row\'s own; expected "dynamic"',
        ),
        "per tensor": ({"block_size": None}, ValueError, r"weight_block_size: expected \(128, 128\), got No"),
        "other blocks": ({"block_size": [64, 128]}, ValueError, r"weight_block_size: .*got \[64, 128\]"),
        "fp4": ({"weight": torch.zeros(8, 64, dtype=torch.int8)}, TypeError, "weight: .*torch.float8_e4m3fn"),
        "scales": ({"weight_scale_inv": torch.ones(2, 1)}, ValueError, r"weight_scale_inv: .*\(1, 1\).*2, 1"),
        "scales in float64": ({"weight_scale_inv": torch.ones(1, 1).double()}, TypeError, "scale_inv: .*64"),
        "bias": ({"bias": torch.zeros(3)}, ValueError, r"bias: expected shape \(8,\), got \(3,\)"),
        "bias in float64": ({"bias": torch.zeros(8).double()}, TypeError, "bias: .*got torch.float64"),
        "bias elsewhere": ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias: .*cpu like input"),
        "float64": ({}, TypeError, "input: expected bfloat16, float16 or float32, got torch.float64"),
        "width": ({}, ValueError, r"input: expected shape \(..., 128\), got \(2, 64\)"),
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        *("static", "per tensor", "other blocks", "fp4", "scales", "scales in float64"),
        *("bias", "bias in float64", "bias elsewhere", "float64", "width"),
    ],
)
def test_forms_without_a_contract_are_refused(what: str, within: Within) -> None:
    given, kind, said = refused(what)
    made, _ = layer(8, 128)
    for name, value in given.items():
        value = nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value
        setattr(made, name, value)
    width, dtype = 64 if what == "width" else 128, torch.float64 if what == "float64" else torch.bfloat16
    with within(), pytest.raises(kind, match=f"samebits.batch_invariant: FP8Linear: .*{said}"):
        made(torch.ones(2, width, dtype=dtype))


@pytest.mark.parametrize(("rows", "given"), [(300, 3), (3 * 128, 2)])
def test_groups_that_share_a_scale_or_are_missing_are_refused(rows: int, given: int, within: Within) -> None:
    made = fp8.FP8GroupedLinear(200, rows, 3, block_size=(128, 128))
    said = r"weight: expected a multiple of 128 rows" if rows == 300 else r"x: expected shape \(..., 3, K\)"
    with within(), pytest.raises(ValueError, match=f"FP8GroupedLinear: {said}"):
        made(torch.ones(5, given, 200, dtype=torch.bfloat16))


def test_without_the_mode_layers_do_their_own(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = layer(8, 128)
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    with within("error"):
        made(x)
    monkeypatch.setattr(fp8, "fp8_linear", lambda input, *_, **__: input[:, :8] * 3)
    assert made(x).eq(3).all()


def test_weights_that_were_dequantized_are_those_of_a_plain_layer(within: Within) -> None:
    made, weight = layer(8, 128)
    made.weight = nn.Parameter(weight)
    x = values("normal", (3, 128), torch.bfloat16, 3)
    with within("error"):
        assert_same_bits(made(x), samebits.linear(x, weight))


def test_convert_leaves_layers_that_are_in_fp8() -> None:
    made, _ = layer(8, 128)
    (left,) = samebits.convert(made).unconverted
    assert left.reason.startswith("its weight is FP8 already")


def test_compiled_layers_have_the_same_bits() -> None:
    made, _ = layer(130, 256)
    x = values("normal", (3, 256), torch.bfloat16, 3)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with samebits.batch_invariant("error"), torch.no_grad():
        assert_same_bits(compiled(x), made(x))


@pytest.mark.long
@pytest.mark.parametrize("enter", ["set_batch_invariant_mode", "batch_invariant"])
def test_transformers_may_be_loaded_later(enter: str) -> None:
    """Under the mode already."""
    code = f"""
import sys, torch, samebits
with samebits.{enter}():
    assert "transformers" not in sys.modules
    from transformers.integrations.finegrained_fp8 import FP8Linear
    layer = FP8Linear(128, 8, (128, 128))
    torch.nn.init.ones_(layer.weight_scale_inv)
    layer.weight.data = torch.ones(8, 128).to(torch.float8_e4m3fn)
    assert layer(torch.ones(2, 128)).eq(128).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_layers_that_cannot_be_covered_are_an_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version of ``transformers``, say."""
    monkeypatch.setattr(exchanged, "_asked", [])
    monkeypatch.setattr(exchanged, "_changes", {fp8.__name__: [fp8_layers._cover]})
    monkeypatch.delattr(fp8, "FP8GroupedLinear")
    own = fp8.FP8Linear.forward
    for _ in range(2):
        with pytest.raises(AttributeError, match="FP8GroupedLinear"):
            exchanged.cover(lambda: True)
    assert fp8.FP8Linear.forward is own


# ---- models


@on_devices
@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_bits(name: str, device: str, within: Within) -> None:
    """A row alone, in a batch, with padding, in chunks and in decoding."""
    register()
    model = make(name, device, attn_implementation="samebits")
    ids = torch.randint(0, 96, (3, 60), generator=torch.Generator().manual_seed(0)).to(device)
    with within("error"), torch.no_grad():
        whole = model(ids).logits
        assert whole.isfinite().all()
        assert_same_bits(model(ids[1:2]).logits[0], whole[1])
        padded = torch.cat([ids, ids[:, :9]], 1)
        mask = torch.ones_like(padded)
        mask[:, 60:] = 0
        assert_same_bits(model(padded, attention_mask=mask).logits[:, :60], whole)
        steps, cache = [], None
        for start, stop in ((0, 40), (40, 57), (57, 58), (58, 59), (59, 60)):
            out = model(ids[:2, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        assert_same_bits(torch.cat(steps, 1), whole[:2])


def test_a_checkpoint_runs_as_it_is(tmp_path: Path, within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    model = make("deepseek_v3", "cpu")
    model.config.quantization_config = FineGrainedFP8Config().to_dict()
    model.save_pretrained(tmp_path, save_original_format=False)
    # Without a GPU, transformers would load it dequantized.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    monkeypatch.undo()
    assert isinstance(loaded.model.layers[1].mlp.experts, fp8.FP8Experts)
    ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    with within("error"), torch.no_grad():
        assert_same_bits(loaded(ids).logits, model(ids).logits)
