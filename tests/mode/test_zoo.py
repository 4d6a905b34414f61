"""A sample of the architectures that ``python -m benchmarks zoo`` measures: all of them keep their bits."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import samebits.transformers
from benchmarks.zoo.build import names
from benchmarks.zoo.checks import results
from benchmarks.zoo.report import verdict

CHECKS = ("rows", "right padding", "left padding", "decode", "gradients")
SAMPLE = """
    llama qwen3_next inkling_text gpt_oss gpt2 mamba t5 whisper deepseek_v3-fp8
""".split()  # noqa: SIM905
NIGHTLY = "mixtral deepseek_v3 bert vit".split()  # whose layers are in others of these  # noqa: SIM905


@pytest.mark.long
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)])
def test_an_architecture_keeps_its_bits(name: str) -> None:
    samebits.transformers.register()
    found = results(name, dict(names() + names(fp8=True))[name], "cpu", CHECKS)
    assert verdict(found) == ("passes", ""), verdict(found)
    asked = [r for checks in found["checks"].values() for r in checks.values() if isinstance(r, float)]
    assert len(asked) >= 4, found  # and not because nothing applies
