"""Models with recurrent layers: their states are in vLLM's cache, and log-probs are the trainer's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm import models
from tests.vllm.conftest import Engine, generate, prompts, trainer

pytestmark = pytest.mark.long

NAMES = ["granite_hybrid", "qwen3_next"]


def same(folder: Path, *outputs: Any) -> None:
    from samebits.vllm.check import replayed

    model = trainer(folder)
    for found in outputs:
        parity = replayed(model, found)
        assert parity, str(parity)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_batches_and_decoding(name: str, engine: Engine, tmp_path: Path) -> None:
    """Also where a checkpoint has decays in float32, which a trainer loads in its dtype."""
    from safetensors.torch import load_file, save_file

    folder = models.save(name, tmp_path / name)
    weights = load_file(folder / "model.safetensors")
    for key in [k for k in weights if k.endswith("A_log")]:
        weights[key] = weights[key].float() + torch.rand(len(weights[key])) * 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm = engine(folder, max_num_seqs=3, max_num_batched_tokens=40)
    asked = [[5], *prompts(4, 2, 100), *prompts(1, 60, 60)]  # the last passes a chunk's end as it decodes
    same(folder, generate(llm, asked, prompt_logprobs=0, max_tokens=8), generate(llm, asked[4:], n=2))


@pytest.mark.parametrize("name", NAMES)
def test_preemption(
    name: str, engine: Engine, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    own, preempted = Scheduler._preempt_request, []

    def preempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(1)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    # A sequence takes a page for the states of each layer, and one for so many keys.
    llm = engine(name, block_size=32, max_model_len=256, num_gpu_blocks_override=8, max_num_seqs=2)
    page = llm.llm_engine.vllm_config.cache_config.block_size
    outputs = generate(llm, prompts(2, page - 6, page - 3), max_tokens=10)
    assert preempted
    same(folders(name), outputs)


def test_vllm_finds_a_convolutions_inputs_first(engine: Engine) -> None:
    """On a GPU it runs kernels of its own on them before it serves, and copies them as what they are."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec
    from vllm.model_executor.warmup.qwen_triton_warmup import _qwen_gdn_warmup_config

    llm = engine("qwen3_next")
    core: Any = llm.llm_engine.engine_core.engine_core
    loaded = core.model_executor.driver_worker.get_model()
    assert loaded.get_mamba_state_copy_func()[0] is get_conv_copy_spec
    own = _qwen_gdn_warmup_config(core.vllm_config.compilation_config.static_forward_context)
    assert own is not None
    assert own.conv_state.shape[1:] == (own.conv_dim, own.conv_kernel_size - 1)


@pytest.mark.parametrize("name", NAMES)
def test_prefix_cache(name: str, engine: Engine, folders: Callable[[str], Path]) -> None:
    llm = engine(
        *(name,),
        **{
            "block_size": 32,
            "max_model_len": 256,
            "enable_prefix_caching": True,
            "mamba_cache_mode": "align",
        },
    )
    page = llm.llm_engine.vllm_config.cache_config.block_size
    draw = random.Random(5)
    head = [draw.randrange(1, 319) for _ in range(page + 3)]
    asked = [head + tail for tail in prompts(3, 3, 20)]
    outputs = generate(llm, asked), generate(llm, asked), generate(llm, asked[:1], n=3)
    assert min(o.num_cached_tokens for o in outputs[1]) >= page
    same(folders(name), *outputs)
