"""Rotary positions for engines, beside ``transformers``' own modules: the same bits."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import samebits
from samebits.engines import frequencies
from samebits.engines.refusals import RefusedError
from samebits.testing import assert_same_bits

transformers = pytest.importorskip("transformers")


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def drawn(*sizes: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * scale


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.5] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 128}
ROTARY = [
    ("llama", "Llama", rope("default")),
    ("llama", "Llama", rope("linear", factor=4.0)),
    ("llama", "Llama", rope("llama3", factor=8.0, **LLAMA3)),
    ("llama", "Llama", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    ("phi3", "Phi3", rope("longrope", **LONG) | {"max_position_embeddings": 512, "pad_token_id": 0}),
    ("glm4", "Glm4", rope("default", partial_rotary_factor=0.5)),
    ("gemma3", "Gemma3Text", {"num_hidden_layers": 6}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "config", "options"), ROTARY, ids=lambda v: str(v)[:40])
def test_rotary(name: str, config: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    c = getattr(transformers, f"{config}Config")(**SMALL | options)
    own, module = frequencies.rotary_module(c), modeling(name)
    positions = torch.tensor([0, 1, 3, 90, 127])
    q, k = (drawn(5, heads * 32, seed=heads).to(dtype) for heads in (4, 2))
    for layer_type in set(getattr(c, "layer_types", None) or [None]) if name == "gemma3" else [None]:
        with torch.no_grad(), samebits.batch_invariant("error"):
            cos, sin = frequencies.rotary_module(c)(q, positions[None], *([layer_type] if layer_type else []))
            of_q, of_k = module.apply_rotary_pos_emb(
                *(t.view(1, 5, -1, 32).transpose(1, 2) for t in (q, k)), cos, sin
            )
            table = frequencies.table(own, 128, dtype, torch.device("cpu"), layer_type).chunk(2, -1)
            got = samebits.rotary(
                *(q.view(5, -1, 32), k.view(5, -1, 32), *table),
                positions=positions,
                rotary_dim=2 * table[0].shape[-1],
                layout="pairs" if name == "glm4" else "halves",
            )
        for x, expected in zip(got, (of_q, of_k), strict=True):
            assert_same_bits(x, expected[0].transpose(0, 1).contiguous())


def test_frequencies_that_a_batch_decides_are_refused() -> None:
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    c = transformers.Phi3Config(**SMALL, **rope("longrope", **LONG), **lengths, pad_token_id=0)
    frequencies.check_length(c, 128)
    with pytest.raises(RefusedError, match=r"longrope frequencies change .* than 128.*maximum length of 128"):
        frequencies.check_length(c, 129)


def test_frequencies_of_the_cpu() -> None:
    c = transformers.LlamaConfig(**SMALL, vocab_size=64, intermediate_size=64, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(c)
    rotary = model.model.rotary_emb
    expected = rotary.inv_freq.clone()
    rotary.inv_freq.mul_(1.0000001)  # as if a GPU had computed them
    frequencies.on_the_cpu(model)
    assert_same_bits(rotary.inv_freq, expected)
