"""Block FP8: a checkpoint's weights, and weights that the engine quantizes as it loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from tests.vllm import models
from tests.vllm.conftest import Engine, generate, prompts, trainer

pytestmark = pytest.mark.long


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose layers are in FP8, but for the head."""
    from safetensors.torch import load_file, save_file
    from transformers import FineGrainedFP8Config

    folder = models.save("qwen3_wide", tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        blocks = tensors[name].float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
        tensors |= {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = models.config("qwen3_wide")
    config.quantization_config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_checkpoint(
    model_impl: str, checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    from samebits.vllm.check import replayed

    outputs = generate(engine(checkpoint, model_impl=model_impl), prompts(4, 3, 40), prompt_logprobs=0)
    # Without a GPU, transformers would load it dequantized.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = trainer(checkpoint, device_map="cpu")
    monkeypatch.undo()
    assert isinstance(model.model.layers[0].mlp.down_proj, FP8Linear)
    parity = replayed(model, outputs)
    assert parity, str(parity)
    assert parity.tokens > 4 * 6 + 30


def test_weights_that_the_engine_quantizes(engine: Engine, folders: Callable[[str], Path]) -> None:
    from samebits.vllm.check import replayed

    outputs = generate(engine("qwen3_wide", quantization="fp8_per_block"), prompts(4, 3, 40))
    model: Any = trainer(folders("qwen3_wide"))
    assert not replayed(model, outputs)
    samebits.convert(model, fp8="block", filter=lambda name, _: name != "lm_head")
    parity = replayed(model, outputs)
    assert parity, str(parity)
