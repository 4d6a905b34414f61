"""Engines for the tests: several in a process, one after the other."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models

INSTALLED = importlib.util.find_spec("vllm") is not None
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
Engine = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INSTALLED:
        return
    here = f"{Path(__file__).parent}{os.sep}"
    skip = pytest.mark.skip(reason="vllm is not installed: .ci/run has an environment with it")
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models, by name. Each is saved once."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = models.save(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return folder


@pytest.fixture(scope="session", autouse=True)
def _overrides_once() -> None:
    """vLLM registers its overrides of Triton's kernels for each engine, and can do so once in a process.

    Here it does so before any test has computed: it stops at a library that numba has loaded.
    """
    from vllm.platforms import current_platform

    if not current_platform.register_triton_kernel_overrides:
        return  # vLLM 0.26 has none
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)


@pytest.fixture
def engine(folders: Callable[[str], Path]) -> Iterator[Engine]:
    """Makes one engine, of a model's name or folder, and arguments of ``LLM``. It ends with the test."""
    import torch
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.envs import disable_envs_cache

    import samebits.vllm

    def start(name: str | Path, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,  # of which vLLM computes a batch first, to see what it needs
            "num_gpu_blocks_override": 256,  # else a gigabyte of cache is cleared for each engine
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        if on() == "cuda":
            defaults["gpu_memory_utilization"] = 0.2  # of several engines, and of trainers
        folder = name if isinstance(name, Path) else folders(name)
        gc.freeze()  # vLLM collects five times as it starts, and would look at all that was imported
        return LLM(str(folder), **defaults | samebits.vllm.options() | options)

    try:
        yield start
    finally:
        samebits.vllm.disable()
        if torch.distributed.is_initialized():
            cleanup_dist_env_and_memory()
        else:  # the engine has ended already, with its last reference
            disable_envs_cache()
            gc.unfreeze()
        assert not torch.is_inference_mode_enabled()


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 319) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def generate(llm: Any, ids: list[list[int]], lora_request: Any = None, **options: Any) -> Any:
    """Outputs with the log-probs of sampled tokens."""
    from vllm import SamplingParams

    defaults: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    params = SamplingParams(detokenize=False, **defaults | options)
    asked = [{"prompt_token_ids": p} for p in ids]
    return llm.generate(asked, params, use_tqdm=False, lora_request=lora_request)


def on() -> str:
    """The kind of device that engines and trainers run on."""
    import torch

    return "cuda" if torch.cuda.device_count() else "cpu"


def trainer(folder: Path, **options: Any) -> Any:
    """The model of ``transformers``, as a trainer has it, on the engine's device."""
    import torch
    from transformers import AutoModelForCausalLM

    import samebits

    samebits.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="samebits", **options
    )
    return model.eval().to(on())
