"""Adapters in the engine, several in a batch, against PEFT's in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.engines.refusals import RefusedError
from tests.vllm.conftest import Engine, generate, prompts, trainer

pytestmark = pytest.mark.long

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "wide": {"r": 16, "lora_alpha": 12, "target_modules": LAYERS},
    "narrow": {"r": 5, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj", "down_proj"]},
}


@pytest.fixture(params=["granite", "qwen2", "olmo2"])
def adapted(request: pytest.FixtureRequest, folders: Callable[[str], Path], tmp_path: Path) -> Any:
    """A model's name; the trainer's with all adapters, and a folder with these.

    Qwen2 has biases. vLLM runs the code of `transformers` for OLMo 2.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed: .ci/vllm.txt has it")
    model: Any = trainer(folders(request.param))
    for name, options in ADAPTERS.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config, autocast_adapter_dtype=False)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    return request.param, model.eval(), tmp_path


def test_adapters_beside_each_other(adapted: Any, engine: Engine) -> None:
    from vllm.lora.request import LoRARequest

    from samebits.vllm.check import replayed

    name, model, folder = adapted
    llm = engine(name, enable_lora=True, max_lora_rank=16, max_loras=2)
    requests = {a: LoRARequest(a, i, str(folder / a)) for i, a in enumerate(ADAPTERS, 1)}
    asked = prompts(6, 3, 30)
    of = ["wide", None, "narrow", "wide", "narrow", None]
    outputs = generate(llm, asked, prompt_logprobs=0, lora_request=[requests[a] if a else None for a in of])
    for adapter in (*ADAPTERS, None):
        own = [o for o, a in zip(outputs, of, strict=True) if a == adapter]
        if adapter is None:
            with model.disable_adapter():
                parity = replayed(model, own)
        else:
            model.set_adapter(adapter)
            parity = replayed(model, own)
        assert parity, f"{adapter}: {parity}"
        assert parity.tokens > 2 * 6
    model.set_adapter("narrow")
    assert not replayed(model, [o for o, a in zip(outputs, of, strict=True) if a == "wide"])


@pytest.mark.parametrize("adapted", ["qwen2"], indirect=True)
def test_a_slot_that_others_had(adapted: Any, engine: Engine) -> None:
    """Also where its memory was lost meanwhile, and where another bias has been put into a layer."""
    from vllm.lora.request import LoRARequest

    from samebits.vllm.check import replayed

    name, model, folder = adapted
    llm = engine(name, enable_lora=True, max_lora_rank=16, max_loras=1, max_cpu_loras=2)
    requests = {a: LoRARequest(a, i, str(folder / a)) for i, a in enumerate(ADAPTERS, 1)}

    def check(adapter: str) -> None:
        model.set_adapter(adapter)
        outputs = generate(llm, prompts(4, 3, 30), prompt_logprobs=0, lora_request=requests[adapter])
        parity = replayed(model, outputs)
        assert parity, f"{adapter}: {parity}"

    for adapter in ("wide", "narrow", "wide", "narrow"):
        check(adapter)
    loaded = llm.llm_engine.model_executor.driver_worker.get_model()
    layers = [m for m in loaded.modules() if "samebits_adapters" in vars(m)]
    slices = [bool(there) for m in layers[:4] for there in m.samebits_adapters.scalings[0].isfinite()]
    assert slices == [True, False, False, False, False, True, True]  # "narrow" has no k, v, o and gate
    for layer in layers:  # level 2 of vLLM's sleep keeps no such memory
        own = layer.samebits_adapters
        for lost in (own.weights[own.n :], own.b, own.scalings):
            lost.fill_(torch.nan)
        if own.biases is not None:
            own.biases[own.n :] = torch.nan
    for i in (1, 2):
        assert llm.llm_engine.remove_lora(i)
    for adapter in ADAPTERS:
        check(adapter)
    changed = loaded.model.layers[0].self_attn.qkv_proj.base_layer
    changed.bias.data = changed.bias.data + 0.5
    of_trainer = model.base_model.model.model.layers[0].self_attn
    with torch.no_grad():
        for part in (of_trainer.q_proj, of_trainer.k_proj, of_trainer.v_proj):
            part.base_layer.bias += 0.5
    check("narrow")


def test_adapters_that_are_refused(engine: Engine, tmp_path: Path, folders: Callable[[str], Path]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: .ci/vllm.txt has it")
    from vllm.lora.request import LoRARequest

    llm = engine("qwen3", enable_lora=True, max_lora_rank=16)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"target_modules": ["embed_tokens", "q_proj"]}, r"adapter \d+ for .*embed_tokens of class"),
        ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 4}}, "has a rank_pattern"),
    ]
    for at, (options, said) in enumerate(refused, 1):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, **options)
        model = peft.get_peft_model(trainer(folders("qwen3")), config, autocast_adapter_dtype=False)
        model.save_pretrained(tmp_path / str(at), save_embedding_layers=False)
        with pytest.raises(RefusedError, match=said):
            generate(llm, [[1, 2, 3]], lora_request=LoRARequest("a", at, str(tmp_path / str(at))))
