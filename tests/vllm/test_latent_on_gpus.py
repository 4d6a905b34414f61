"""Latent attention's half for GPUs: what it does without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samebits
from samebits.engines.refusals import RefusedError
from tests.vllm import models


def test_the_expanded_form_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.vllm import covered

    text = SimpleNamespace(kv_lora_rank=512)
    model = SimpleNamespace(
        runner_type="generate", is_multimodal_model=False, use_mla=False, hf_text_config=text
    )
    config = SimpleNamespace(model_config=model, speculative_config=None)
    monkeypatch.setattr(covered, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    what, reason, _ = next(covered._found(config))
    assert (what, reason) == ("MLA in its expanded form", "it has not been proven on a GPU")


@pytest.mark.parametrize("option", ["quant_config", "lora_config"])
def test_no_refusal_on_a_gpu_sends_to_the_expanded_form(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    from samebits.vllm import covered

    text = SimpleNamespace(kv_lora_rank=512)
    model = SimpleNamespace(
        **{"runner_type": "generate", "is_multimodal_model": False, "use_mla": True, "hf_text_config": text}
    )
    options = {"quant_config": None, "lora_config": None} | {option: object()}
    config = SimpleNamespace(model_config=model, speculative_config=None, **options)
    for on_cpu in (True, False):
        monkeypatch.setattr(covered, "current_platform", SimpleNamespace(is_cpu=lambda is_it=on_cpu: is_it))
        what, _, remedy = next(covered._found(config))
        assert what.startswith("MLA with")
        assert ("VLLM_MLA_DISABLE" in remedy) == on_cpu


def test_an_undo_leaves_no_attention_function() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import samebits.vllm

    before = {*ALL_ATTENTION_FUNCTIONS.valid_keys()}
    samebits.vllm.enable()
    during = {*ALL_ATTENTION_FUNCTIONS.valid_keys()}
    samebits.vllm.disable()
    assert during - before == {"samebits_mla"}
    assert {*ALL_ATTENTION_FUNCTIONS.valid_keys()} == before


class Layer(nn.Module):
    """vLLM's layer, for one prompt."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given, self.num_heads, self.v_head_dim = given, given["num_heads"], given["v_head_dim"]

    def forward(self, q: Tensor, latent: Tensor, rotated: Tensor, output_shape: torch.Size) -> Tensor:
        from samebits.latent import absorbed, expanded

        weight, size = self.given["kv_b_proj"].weight, self.given["qk_nope_head_dim"]
        keys = torch.cat([latent[:, None], rotated], -1)[None]
        by_head = absorbed(q.transpose(0, 1), weight, size).transpose(0, 1)[None]
        values = keys[..., : latent.shape[-1]]
        out = samebits.attention(by_head, keys, values, causal=True, scale=self.given["scale"])
        return expanded(out[0].transpose(0, 1), weight, size).transpose(0, 1).reshape(output_shape)


def test_layers_before_0_27_hand_latent_vectors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.attention import mla_attention

    from samebits.fusion import fuse_parts
    from samebits.latent import absorb
    from samebits.vllm import mla

    monkeypatch.setattr(mla_attention, "MLAAttention", Layer)
    monkeypatch.setitem(mla.ALL_ATTENTION_FUNCTIONS, mla._FUNCTION, mla._hand_on)  # as its install does
    samebits.transformers.register()
    model, trainer = models.build("deepseek_v3"), models.build("deepseek_v3")
    trainer.set_attn_implementation("samebits")
    kind = type(model.model.layers[0].self_attn)
    of = SimpleNamespace(get_num_attention_heads=lambda parallel: model.config.num_attention_heads)
    backend = SimpleNamespace(
        **{"model": model, "model_config": of, "text_config": model.config, "parallel_config": None},
        **{"cache_config": None, "quant_config": None},
    )
    found = mla.instances(backend)
    assert len(found) == model.config.num_hidden_layers
    assert type(trainer.model.layers[0].self_attn) is kind
    absorb(trainer)
    ids = torch.tensor([[5, 9, 2, 77, 31, 8, 300]])
    with torch.no_grad(), samebits.batch_invariant():
        out = model(ids, use_cache=False, attention_instances=found).logits
        expected = trainer(ids, use_cache=False).logits
        samebits.testing.assert_same_bits(out, expected)
        kinds = {f.what: len(f.names) for f in fuse_parts(model).fused}
        assert kinds == {
            "RMS norm": 9,
            "gated activation": 2,
            "residual sum and RMS norm": 2,
            "rotary positions": 2,
        }
        out = model(ids, use_cache=False, attention_instances=found).logits
        samebits.testing.assert_same_bits(out, expected)


def test_layers_that_were_not_proven_are_refused() -> None:
    from samebits.vllm import mla

    layer = nn.Module()
    layer.kv_b_proj, layer.kv_lora_rank = nn.Linear(2, 2), 2  # type: ignore[assignment]
    with pytest.raises(RefusedError, match="on no list of what was proven"):
        mla.instances(SimpleNamespace(model=layer))
