"""Latent attention (MLA) in its absorbed form, in models of ``transformers``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits import latent
from samebits.testing import assert_same_bits, values
from tests.support.devices import DEVICES

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 48,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu"]
IDS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(1))


def model_of(kind: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Any:
    torch.manual_seed(0)
    given = SMALL | changed
    config = getattr(transformers, f"{kind}Config")(**given)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)


def test_products_are_those_of_each_head() -> None:
    q, weight = (
        values("normal", (2, 3, 5, 20), torch.bfloat16, 1),
        values("normal", (51, 32), torch.bfloat16, 2),
    )
    out = values("normal", (2, 3, 5, 32), torch.bfloat16, 3)
    found, back = latent.absorbed(q, weight, 12), latent.expanded(out, weight, 12)
    assert found.shape == (2, 3, 5, 40)
    assert back.shape == (2, 3, 5, 5)
    for b in range(2):
        for h in range(3):
            of_head = weight[17 * h : 17 * (h + 1)]
            assert_same_bits(found[b, h, :, :32], samebits.matmul(q[b, h, :, :12], of_head[:12]))
            assert_same_bits(found[b, h, :, 32:], q[b, h, :, 12:])
            assert_same_bits(back[b, h], samebits.linear(out[b, h], of_head[12:]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("sizes", [(3, 12, 8, 5, 32), (4, 64, 32, 64, 128)])
def test_an_engine_has_the_same_products_in_its_layout(
    device: str, tokens: int, sizes: tuple[int, ...]
) -> None:
    heads, size, rotated, of_values, inner = sizes
    dtype = torch.bfloat16
    q = values("normal", (tokens, heads, size + rotated), dtype, 1, device)
    weight = values("normal", (heads * (size + of_values), inner), dtype, 2, device)
    x = values("normal", (tokens, heads, inner), dtype, 3, device)
    found = latent.queries_of_rows(q, weight, size)
    assert found.is_contiguous()
    assert_same_bits(found, latent.absorbed(q.transpose(0, 1), weight, size).transpose(0, 1))
    out = torch.full((tokens, heads * of_values), torch.nan, dtype=dtype, device=device)
    latent.values_of_rows(x, weight, size, out)
    expected = latent.expanded(x.transpose(0, 1), weight, size).transpose(0, 1)
    assert_same_bits(out, expected.reshape(out.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_however_it_is_fed(kind: str, device: str) -> None:
    """Alone, in a batch, behind padding, in decoding; close to the expanded form."""
    model, ids = model_of(kind, device), IDS.to(device)
    with samebits.batch_invariant("ignore"), torch.no_grad():
        expanded = model(ids).logits
        assert len(latent.absorb(model)) == 2
        want = model(ids).logits
        assert not torch.equal(want, expanded)
        assert (want - expanded).norm() < 0.05 * expanded.norm()
        assert_same_bits(model(ids[1:]).logits, want[1:])
        padded = torch.nn.functional.pad(ids, (7, 0))
        mask, places = (padded != 0).long(), (torch.arange(31, device=device) - 7).clamp(0)
        behind = model(padded, attention_mask=mask, position_ids=places.expand(2, -1)).logits[:, 7:]
        assert_same_bits(behind, want)
        part = model(ids[:, :20], use_cache=True)
        steps = [part.logits]
        for i in range(20, 24):
            steps.append(
                model(ids[:, i : i + 1], past_key_values=part.past_key_values, use_cache=True).logits
            )
        assert_same_bits(torch.cat(steps, 1), want)


def gradients(model: Any) -> dict[str, Tensor]:
    model(IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients() -> None:
    """Those of the expanded form in float32, but for rounding."""
    model, wide = model_of("DeepseekV3"), model_of("DeepseekV3", dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    latent.absorb(model)
    with samebits.batch_invariant("ignore"):
        found = gradients(model)
    want = gradients(wide)
    assert found.keys() == want.keys()
    for name, grad in found.items():
        if "self_attn" in name:
            assert (grad - want[name]).norm() < 0.03 * want[name].norm(), name


def test_layers_stay_what_they_were() -> None:
    samebits.transformers.register()
    model = model_of("DeepseekV3", attn_implementation="samebits")
    names = latent.absorb(model)
    assert names == latent.absorb(model) == tuple(f"model.layers.{i}.self_attn" for i in range(2))
    assert type(model.model.layers[0].self_attn).__name__ == "DeepseekV3Attention"
    with torch.no_grad():
        want = model(IDS).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert latent.absorb(other) == names
            assert_same_bits(other(IDS).logits, want)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected layers of latent attention, found none"):
        latent.absorb(torch.nn.Linear(2, 2))
    model = model_of("DeepseekV3")
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Identity()
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.kv_b_proj: expected a linear layer .* Identity"
    ):
        latent.absorb(model)
    layer = torch.nn.Module()
    layer.kv_b_proj, layer.kv_lora_rank = torch.nn.Linear(2, 2), 2
    with pytest.raises(ValueError, match=r"expected a layer of one of transformers\..* got one of torch\.nn"):
        latent.absorb(layer)
    model = model_of("DeepseekV3")
    latent.absorb(model)
    with pytest.raises(RuntimeError, match=r"expected to run within samebits\.batch_invariant, or"):
        model(IDS)


@pytest.mark.parametrize("what", ["an adapter", "a contract"])
def test_what_comes_to_the_weight_later_is_refused(what: str) -> None:
    """Only the weight is read, so an adapter would have no effect, and a contract none either."""
    samebits.transformers.register()
    model = model_of("DeepseekV3", attn_implementation="samebits")
    latent.absorb(model)
    if what == "an adapter":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["kv_b_proj"]))
    else:
        samebits.convert(model, contract=samebits.TENSOR_CORE.segmented(8))
    with pytest.raises(ValueError, match=r"kv_b_proj: expected a linear layer without bias, adapter"):
        model(IDS)
