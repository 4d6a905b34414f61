"""LoRA by ``peft``: adapters give a row the same bits in every batch, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import samebits
from samebits.mode import batch_invariant
from samebits.testing import assert_same_bits

peft = pytest.importorskip("peft", reason="needs the extra peft")
transformers = pytest.importorskip("transformers", reason="needs the extra peft")

KINDS = {
    "LoRA": {},
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "of all layers": {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
}


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    model = peft.get_peft_model(
        model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    )
    return model


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_its_bits(kind: str, dtype: torch.dtype) -> None:
    model, batch = adapted(dtype, **KINDS[kind]).eval(), ids(4, 7)
    with torch.no_grad(), batch_invariant("error"):
        whole = model(batch).logits
        for i in range(4):
            assert_same_bits(model(batch[i : i + 1]).logits, whole[i : i + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_adapters_do_not_see_padding(dtype: torch.dtype) -> None:
    model, batch = adapted(dtype), ids(3, 6)

    def gradients(padding: int) -> dict[str, Tensor]:
        inputs, labels, mask = (
            F.pad(x, (0, padding), value=value)
            for x, value in ((batch, 0), (batch, -100), (torch.ones_like(batch), 0))
        )
        model.zero_grad()
        with batch_invariant("error"):
            model(inputs, attention_mask=mask, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    little, much = gradients(1), gradients(4)
    assert little
    assert all("lora" in name for name in little)
    for name, grad in little.items():
        assert_same_bits(much[name], grad)


def test_adapters_are_converted_and_merged() -> None:
    model, batch = adapted().eval(), ids(3, 5)
    with torch.no_grad():
        with batch_invariant("error"):
            expected = model(batch).logits
        adapters = [name for name in samebits.convert(model).converted if "lora_" in name]
        assert len(adapters) == 2 * 2 * 3
        with batch_invariant("error"):
            assert_same_bits(model(batch).logits, expected)
            merged = model.merge_and_unload()(batch).logits
    torch.testing.assert_close(merged, expected)
