"""The plug-in does nothing until it is asked, and can be undone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.engines.hooks import MovedError
from samebits.engines.refusals import RefusedError
from tests.vllm.conftest import Engine, generate

MODULES = [
    "vllm.lora.lora_model",
    "vllm.lora.lora_weights",
    "vllm.lora.model_manager",
    "vllm.lora.punica_wrapper.punica_cpu",
    "vllm.model_executor.layers.activation",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
    "vllm.model_executor.layers.layernorm",
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.mamba.mamba_mixer2",
    "vllm.model_executor.layers.logits_processor",
    "vllm.model_executor.layers.rotary_embedding.base",
    "vllm.model_executor.layers.vocab_parallel_embedding",
    "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.layers.quantization.online.fp8",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.models.transformers.base",
    "vllm.model_executor.models.transformers.fuser",
    "vllm.model_executor.models.transformers.fusers.moe",
    "vllm.v1.attention.backends.registry",
    "vllm.v1.engine.core",
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu.sample.gumbel",
    "vllm.v1.worker.gpu.structured_outputs",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.sample.logprob",
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.worker.gpu.sample.states",
]


def attributes() -> dict[str, Any]:
    """Of all that hooks could replace."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({f"{module.__name__}.{name}.{k}": v for k, v in vars(value).items()})
    return {k: v for k, v in found.items() if not k.endswith(("__abstractmethods__", "_abc_impl"))}


def test_every_hook_is_undone() -> None:
    import samebits
    import samebits.vllm
    from samebits.vllm import sampling
    from samebits.vllm.plugin import plugin

    before, environment = attributes(), dict(os.environ)
    samebits.vllm.enable()
    hooks = plugin.hooks
    assert hooks is not None
    sampling.install_processed(hooks)
    sampling.install_raw(hooks)
    changed = {k for k, v in attributes().items() if before.get(k) is not v}
    assert len(changed) > 15
    assert os.environ["SAMEBITS_VLLM"] == "1"
    samebits.vllm.disable()
    after = attributes()
    assert {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)} == set()
    assert dict(os.environ) == environment
    assert not samebits.is_batch_invariant_mode_enabled()


def test_a_hook_that_does_not_fit_undoes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler

    import samebits.vllm

    monkeypatch.setattr(Sampler, "compute_logprobs", staticmethod(lambda z: z))
    before = attributes()
    with pytest.raises(MovedError, match=r"Sampler.compute_logprobs: expected a function of \(logits, ...\)"):
        samebits.vllm.enable()
    assert {k for k, v in attributes().items() if before.get(k) is not v} == set()
    assert not samebits.vllm.is_enabled()


@pytest.mark.long
def test_an_engine_that_does_not_ask_is_left_alone(engine: Engine) -> None:
    import samebits
    import samebits.vllm

    before = attributes()
    llm = engine("qwen3", additional_config={}, enforce_eager=True)
    assert {k for k, v in attributes().items() if before.get(k) is not v} == set()
    generate(llm, [[1, 2, 3]], max_tokens=1)
    assert not samebits.vllm.is_enabled()
    assert not samebits.is_batch_invariant_mode_enabled()


def test_an_engine_says_that_samebits_is_on(folders: Callable[[str], Path]) -> None:
    """By the environment too: a trainer beside it asks."""
    from vllm.engine.arg_utils import EngineArgs

    import samebits.vllm

    given = EngineArgs(model=str(folders("qwen3")), max_model_len=128, additional_config={"theirs": 1})
    samebits.vllm.enable()
    try:
        assert given.create_engine_config().additional_config == {"theirs": 1, "samebits": True}
    finally:
        samebits.vllm.disable()


@pytest.mark.parametrize(("plugins", "loaded"), [("", False), ("other", False), ("other,samebits", True)])
def test_plugins_that_vllm_is_told_to_load(
    monkeypatch: pytest.MonkeyPatch, plugins: str, loaded: bool
) -> None:
    import samebits.vllm

    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    if loaded:
        samebits.vllm.options()
        return
    with pytest.raises(RefusedError, match=r"VLLM_PLUGINS=.*name samebits in it"):
        samebits.vllm.options()


def test_samebits_imports_no_vllm() -> None:
    code = "import sys, samebits, samebits.vllm; samebits.vllm.options(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_entry_point() -> None:
    from importlib.metadata import entry_points

    import samebits.vllm

    (found,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "samebits")
    assert found.load() is samebits.vllm.register
