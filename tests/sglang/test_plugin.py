"""The plug-in does nothing until it is asked, says what does not fit, and can be undone."""

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
from tests.sglang.conftest import arguments

MODULES = [
    "sglang.srt.layers.activation",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.layers.layernorm",
    "sglang.srt.layers.logits_processor",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.layers.rotary_embedding.base",
    "sglang.srt.layers.sampler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.utils",
]


def attributes() -> dict[str, Any]:
    """Of all that hooks could replace, and what registries hold."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({f"{module.__name__}.{name}.{k}": v for k, v in vars(value).items()})
    server = importlib.import_module("sglang.srt.server_args")
    found |= {f"choice {name}": True for name in server.ATTENTION_BACKEND_CHOICES}
    found |= {f"backend {name}": True for name in found[f"{MODULES[1]}.ATTENTION_BACKENDS"]}
    return {k: v for k, v in found.items() if not k.endswith(("__abstractmethods__", "_abc_impl"))}


def changed(before: dict[str, Any]) -> set[str]:
    after = attributes()
    return {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)}


def test_every_hook_is_undone() -> None:
    import samebits
    import samebits.sglang

    before, environment = attributes(), dict(os.environ)
    samebits.sglang.enable()
    assert {
        "sglang.srt.layers.layernorm.RMSNorm.forward",
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.process_weights_after_loading",
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward",
        "sglang.srt.layers.sampler.Sampler.forward",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "sglang.srt.models.qwen3.apply_qk_norm",
        "sglang.srt.models.qwen3_moe.enable_fused_set_kv_buffer",
        "backend samebits",
        "choice samebits",
    } <= changed(before)
    assert os.environ["SAMEBITS_SGLANG"] == "1"
    samebits.sglang.disable()
    assert changed(before) == set()
    assert dict(os.environ) == environment
    assert not samebits.is_batch_invariant_mode_enabled()


def test_a_hook_that_does_not_fit_undoes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.sampler import Sampler

    import samebits.sglang

    monkeypatch.setattr(Sampler, "forward", lambda self, logits: logits)
    before = attributes()
    with pytest.raises(MovedError, match=r"Sampler.forward: expected a function of \(self, logits_output, "):
        samebits.sglang.enable()
    assert changed(before) == set()
    assert not samebits.sglang.is_enabled()


def test_an_engine_that_does_not_ask_is_left_alone(folders: Callable[[str], Path]) -> None:
    import samebits.sglang

    before = attributes()
    args = arguments(folders("qwen3"), rl_on_policy_target=None)
    assert args.attention_backend != "samebits"
    assert changed(before) == set()
    assert not samebits.sglang.is_enabled()


@pytest.mark.parametrize("how", ["target", "environment"])
def test_who_asks(how: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By either, SGLang's own target, which has another trainer's bits, stays off."""
    import samebits.sglang

    if how == "environment":
        monkeypatch.setenv("SAMEBITS_SGLANG", "1")
    args = arguments(folders("qwen3"), rl_on_policy_target="samebits" if how == "target" else None)
    assert samebits.sglang.is_enabled()
    assert (args.attention_backend, args.page_size) == ("samebits", 16)
    assert args.rl_on_policy_target is None
    assert not args.enable_deterministic_inference
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert (args.moe_runner_backend, args.disable_shared_experts_fusion) == ("triton", True)


def test_the_command_line_knows_the_target() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    import samebits.sglang

    samebits.sglang.register()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "m", "--rl-on-policy-target", "samebits"])
    assert given.rl_on_policy_target == "samebits"


@pytest.mark.parametrize(("plugins", "loaded"), [("", True), ("other", False), ("other, samebits", True)])
def test_plugins_that_sglang_is_told_to_load(
    monkeypatch: pytest.MonkeyPatch, plugins: str, loaded: bool
) -> None:
    import samebits.sglang

    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    if loaded:
        samebits.sglang.options()
        return
    with pytest.raises(RefusedError, match=r"SGLANG_PLUGINS=other.*name samebits in it"):
        samebits.sglang.options()


@pytest.mark.parametrize("version", ["9.9.9", "0.5.16"], ids=["unknown", "on another device"])
def test_an_unknown_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """SGLang would log what a plug-in raises, and serve without it. So its process ends."""
    import sglang
    from sglang.srt import plugins

    import samebits.sglang
    from samebits.sglang import plugin

    monkeypatch.setattr(sglang, "__version__", version)
    monkeypatch.setattr(plugin, "device", lambda: "cpu" if version == "9.9.9" else "xpu")
    with pytest.raises(RefusedError, match=rf"SGLang {version} on .pu.*was tested with .*_ANY_VERSION=1"):
        samebits.sglang.enable()
    monkeypatch.setenv("SAMEBITS_SGLANG", "1")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    with pytest.raises(SystemExit, match=rf"RefusedError: samebits: SGLang {version} on .pu"):
        plugins.load_plugins()
    assert not samebits.sglang.is_enabled()
    monkeypatch.setenv("SAMEBITS_SGLANG_ANY_VERSION", "1")
    samebits.sglang.enable()
    assert samebits.sglang.is_enabled()


def test_samebits_imports_no_sglang() -> None:
    code = (
        "import sys, samebits, samebits.sglang; samebits.sglang.options(); sys.exit('sglang' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_the_entry_point() -> None:
    from importlib.metadata import entry_points

    import samebits.sglang

    (found,) = (e for e in entry_points(group="sglang.srt.plugins") if e.name == "samebits")
    assert found.load() is samebits.sglang.register
