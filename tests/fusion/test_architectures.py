"""A sample of the architectures that ``python -m benchmarks fusion`` compares."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.fusion import measure
from benchmarks.zoo.build import names

NORM, SUM, GATE, ROTARY = "RMS norm", "residual sum and RMS norm", "gated activation", "rotary positions"
LOSS = "loss from hidden states"
FAMILIES = {
    "llama": {NORM, SUM, GATE, ROTARY, LOSS},
    "gemma2": {NORM, SUM, GATE, ROTARY},  # its logits are capped
    "olmo2": {NORM, GATE, ROTARY, LOSS},  # norms before sums
    "glm": {NORM, SUM, GATE, ROTARY, LOSS},  # pairs, of a part of a head
    "cohere": {GATE, ROTARY},  # layer norms; pairs in float32
    "gpt_oss": {NORM, SUM, GATE, ROTARY, LOSS},  # clamped gates in turns
    "deepseek_v3": {NORM, SUM, GATE, ROTARY, LOSS},  # experts; pairs that go to halves
    "gpt2": {LOSS},
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_bits(name: str) -> None:
    found = measure(name, dict(names())[name], "cpu")
    assert {f["what"] for f in found["fused"]} == FAMILIES[name], found
    for compared in found["dtypes"].values():
        assert compared["differ"] == 0, found
        assert compared["values"] > 0, found
