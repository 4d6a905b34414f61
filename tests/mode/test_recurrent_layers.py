"""Recurrent layers of transformers under the mode: any way through a sequence has the same bits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.mode import recurrent_layers
from samebits.mode.patches import ChangedError
from samebits.testing import assert_same_bits

transformers = pytest.importorskip("transformers")


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    if not hasattr(transformers, "Qwen3NextForCausalLM"):
        pytest.skip("this version has no Qwen3-Next")
    samebits.transformers.register()
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=0,
        mlp_only_layers=[0, 1],
        attn_implementation="samebits",
    )
    return transformers.Qwen3NextForCausalLM(config).to(dtype).eval()


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 64, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.long
@torch.no_grad()
def test_pieces_padding_and_beams() -> None:
    net, long, short = model(), tokens(70), tokens(9, 1)
    with samebits.batch_invariant():
        want, alone = net(long).logits, net(short).logits
        cache = transformers.DynamicCache(config=net.config)
        pieces = [
            net(long[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 1), (1, 20), (20, 64), (64, 65), (65, 66), (66, 70))
        ]
        assert_same_bits(torch.cat(pieces, 1), want)

        ids, mask = torch.zeros(2, 75, dtype=torch.long), torch.zeros(2, 75, dtype=torch.long)
        ids[0, 5:], ids[1, 66:] = long[0], short[0]
        mask[0, 5:], mask[1, 66:] = 1, 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = net(ids, attention_mask=mask, position_ids=positions).logits
        assert_same_bits(padded[:1, 5:], want)
        assert_same_bits(padded[1:, 66:], alone)

        options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        found = net.generate(ids, attention_mask=mask, **options)
        own = net.generate(long, **options)
        assert found.sequences[0, 75:].tolist() == own.sequences[0, 70:].tolist()
        assert_same_bits(found.sequences_scores[:1], own.sequences_scores)


def test_packed_sequences_restart_in_the_recurrence() -> None:
    """The mask names their tokens."""
    net = model()
    module = sys.modules[type(net).__module__]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    embeds = torch.zeros(1, 6, 32)
    with samebits.batch_invariant():
        mask = module.create_recurrent_attention_mask(
            config=net.config,
            inputs_embeds=embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        told = recurrent_layers.sequences_of(mask)
        assert told.offsets is not None
        assert told.offsets.tolist() == [0, 3, 5, 6]
    gaps = recurrent_layers.sequences_of(torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 0, 0]]))
    assert gaps.tokens is not None
    assert gaps.offsets is not None
    assert gaps.tokens.tolist() == [1, 2, 4, 5, 6, 7]
    assert gaps.offsets.tolist() == [0, 3, 6]


@torch.no_grad()
def test_layers_are_their_own_outside_of_the_mode() -> None:
    net, ids = model(torch.float32), tokens(20)
    cache = transformers.DynamicCache(config=net.config)
    net(ids, past_key_values=cache)
    (state,) = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
    assert state.shape == (1, 2, 16, 16)
    with samebits.batch_invariant(), pytest.raises(ValueError, match="outside of the mode"):
        net(tokens(1), past_key_values=cache)


def test_a_version_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    module = sys.modules[type(net).__module__]
    monkeypatch.delattr(module, "torch_chunk_gated_delta_rule")
    with pytest.raises(ChangedError, match="torch_chunk_gated_delta_rule is missing"):
        recurrent_layers._cover(module.__name__)
