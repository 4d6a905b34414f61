"""Log-probs of sampled tokens and of prompts, for every architecture that is covered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sglang.conftest import Start
from tests.vllm.conftest import prompts, trainer

NATIVE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "glm4", "granite"]
EXPERTS = ["mixtral", "qwen3_moe_sparse", "olmoe", "glm4_moe"]
WINDOWS = ["mistral", "mixtral"]  # of which SGLang has none
OPTIONS = {
    "gemma2": {"json_model_override_args": '{"hidden_act": "gelu_pytorch_tanh"}'},  # as checkpoints have it
    **{name: {"context_length": 16} for name in WINDOWS},
}


@pytest.mark.long
@pytest.mark.parametrize("name", NATIVE + EXPERTS)
def test_bits_of_the_trainer(name: str, start: Start, folders: Callable[[str], Path]) -> None:
    from samebits.engines.parity import compare, replay

    longest = 10 if name in WINDOWS else 40
    samples = start(name, **OPTIONS.get(name, {})).generate(prompts(4, 3, longest))
    model = trainer(folders(name))
    parity = compare(samples, replay(model, [[*s.prompt, *s.tokens] for s in samples]))
    assert parity, str(parity)
    assert parity.tokens == 4 * 6 + sum(len(s.prompt) - 1 for s in samples)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_head_in_float32(name: str, start: Start, folders: Callable[[str], Path]) -> None:
    """Also where its logits are capped or divided."""
    import torch

    import samebits
    from samebits.engines.parity import compare, replay

    samples = start(name, enable_fp32_lm_head=True, **OPTIONS.get(name, {})).generate(prompts(4, 3, 40))
    sequences = [[*s.prompt, *s.tokens] for s in samples]
    model = trainer(folders(name))
    assert not compare(samples, replay(model, sequences))
    samebits.convert(model, filter=lambda name, _: name == "lm_head", out_dtype=torch.float32)
    parity = compare(samples, replay(model, sequences))
    assert parity, str(parity)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_temperature(temperature: float, start: Start, folders: Callable[[str], Path]) -> None:
    """Greedy rows count as of temperature 1."""
    from samebits.engines.parity import compare, replay

    samples = start("qwen3").generate(prompts(3, 3, 20), temperature=temperature)
    sequences = [[*s.prompt, *s.tokens] for s in samples]
    replayed = replay(trainer(folders("qwen3")), sequences, temperature=temperature or 1.0)
    parity = compare([type(s)(s.prompt, s.tokens, s.logprobs) for s in samples], replayed)
    assert parity, str(parity)
