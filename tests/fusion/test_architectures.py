"""A sample of the architectures that ``python -m benchmarks fusion`` compares."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.fusion import measure
from benchmarks.zoo.build import names

NORM, SUM, GATE, ROTARY = "RMS norm", "residual sum and RMS norm", "gated activation", "rotary positions"
GATED_NORM = "gated RMS norm"
LOSS, OF_LOGITS = "loss from hidden states", "loss from logits"
HEADS = "RMS norms of heads and rotary positions"
FAMILIES = {
    "llama": {NORM, SUM, GATE, ROTARY, LOSS, OF_LOGITS},
    "gemma2": {NORM, SUM, GATE, ROTARY, OF_LOGITS},  # its logits are capped
    "qwen3_moe": {NORM, SUM, GATE, ROTARY, HEADS, LOSS, OF_LOGITS},
    "qwen3_next": {NORM, GATED_NORM, SUM, GATE, ROTARY, HEADS, LOSS, OF_LOGITS},
    "gemma3_text": {NORM, SUM, GATE, ROTARY, LOSS, OF_LOGITS},  # norms of heads after they are transposed
    "olmo2": {NORM, GATE, ROTARY, LOSS, OF_LOGITS},  # norms before sums
    "glm": {NORM, SUM, GATE, ROTARY, LOSS, OF_LOGITS},  # pairs, of a part of a head
    "cohere": {GATE, ROTARY, OF_LOGITS},  # layer norms; pairs in float32
    "gpt_oss": {NORM, SUM, GATE, ROTARY, LOSS, OF_LOGITS},  # clamped gates in turns
    "deepseek_v3": {NORM, SUM, GATE, ROTARY, LOSS, OF_LOGITS},  # experts; pairs that go to halves
    "gpt2": {LOSS, OF_LOGITS},
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_bits(name: str) -> None:
    found = measure(name, dict(names())[name], "cpu")
    assert {f["what"] for f in found["fused"]} == FAMILIES[name], found
    for compared in found["dtypes"].values():
        assert compared["differ"] == 0, found
        assert compared["values"] > 0, found
