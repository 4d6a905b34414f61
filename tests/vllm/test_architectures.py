"""Log-probs of sampled tokens and of prompts, for every architecture that is covered, in both ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Engine, generate, prompts, trainer

NATIVE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "glm4", "granite"]
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss", "glm4_moe"]
OTHERS = ["olmo2", "starcoder2"]


@pytest.mark.long
@pytest.mark.parametrize("name", NATIVE + EXPERTS + OTHERS)
def test_bits_of_the_trainer(name: str, engine: Engine, folders: Callable[[str], Path]) -> None:
    from samebits.vllm.check import replayed

    llm = engine(name)
    chosen = llm.llm_engine.vllm_config.model_config.model_impl
    assert (chosen == "transformers") == (name in OTHERS)
    parity = replayed(trainer(folders(name)), generate(llm, prompts(4, 3, 40), prompt_logprobs=0))
    assert parity, str(parity)
    assert parity.tokens > 4 * 6 + 30


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "granite", "gpt_oss", "deepseek_v3"])
def test_native_architectures_run_by_transformers_code_too(
    name: str, engine: Engine, folders: Callable[[str], Path]
) -> None:
    from samebits.vllm.check import replayed

    before = trainer(folders(name))  # which the engine must leave alone
    outputs = generate(engine(name, model_impl="transformers"), prompts(3, 3, 40))
    assert replayed(before, outputs)
    assert replayed(trainer(folders(name)), outputs)


@pytest.mark.long
def test_latent_attention_in_its_absorbed_form(
    monkeypatch: pytest.MonkeyPatch,  # before the engine, which restores at its end what it has found
    engine: Engine,
    folders: Callable[[str], Path],
) -> None:
    from samebits.fusion import forms
    from samebits.latent import absorb
    from samebits.vllm.check import replayed
    from samebits.vllm.experts import routers

    calls: Counter[str] = Counter()

    def counted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return own(*args, **kwargs)

        return run

    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    llm = engine("deepseek_v3")
    assert llm.llm_engine.vllm_config.model_config.use_mla
    assert routers(llm.llm_engine.model_executor.driver_worker.get_model())
    model = trainer(folders("deepseek_v3"))
    for name in ("add_rms_norm", "gated"):
        monkeypatch.setattr(forms, name, counted(name, getattr(forms, name)))
    outputs = generate(llm, prompts(4, 3, 40), prompt_logprobs=0)
    layers = model.config.num_hidden_layers
    assert calls["gated"] / layers == calls["add_rms_norm"] / (1 + 4 * layers) > 0
    assert not replayed(model, outputs)
    absorb(model)
    parity = replayed(model, outputs)
    assert parity, str(parity)
