"""Whatever the engine does with a request, its log-probs are the trainer's."""

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


@pytest.fixture(scope="module")
def qwen3(folders: Callable[[str], Path]) -> Any:
    return trainer(folders("qwen3"))


def same(model: Any, outputs: Any, **distribution: Any) -> None:
    from samebits.vllm.check import replayed

    parity = replayed(model, outputs, **distribution)
    assert parity, str(parity)


def test_prefix_cache_and_chunked_prefill(engine: Engine, qwen3: Any) -> None:
    draw = random.Random(5)
    head = [draw.randrange(1, 319) for _ in range(70)]
    asked = [head + tail for tail in prompts(4, 3, 20)]
    llm = engine(
        "qwen3", enable_prefix_caching=True, block_size=32, max_num_batched_tokens=24, max_num_seqs=8
    )
    same(qwen3, generate(llm, asked))
    again = generate(llm, asked)
    assert min(o.num_cached_tokens for o in again) >= 64
    same(qwen3, again)
    same(qwen3, generate(llm, asked[:2], n=4))  # from the cache, too
    same(qwen3, generate(llm, asked[1:2], prompt_logprobs=0, max_tokens=1))


def test_preemption(engine: Engine, qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    own, preempted = Scheduler._preempt_request, []

    def preempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(1)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    llm = engine("qwen3", block_size=32, num_gpu_blocks_override=9, max_num_seqs=4)
    outputs = generate(llm, prompts(4, 55, 60), max_tokens=20)
    assert preempted
    same(qwen3, outputs)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_new_weights(model_impl: str, engine: Engine, tmp_path: Path) -> None:
    from samebits.vllm.check import replayed

    llm = engine("qwen3", model_impl=model_impl)
    new = trainer(models.save("qwen3", tmp_path / "new", seed=1))
    asked = prompts(3, 3, 30)
    assert not replayed(new, generate(llm, asked))
    core: Any = llm.llm_engine
    loaded = core.model_executor.driver_worker.get_model()
    loaded.load_weights((name, t.clone()) for name, t in new.state_dict().items())
    same(new, generate(llm, asked))
    if model_impl == "auto":
        newer = models.save("qwen3", tmp_path / "newer", seed=2)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(newer)})
        same(trainer(newer), generate(llm, asked))


def test_processed_log_probs(engine: Engine, qwen3: Any) -> None:
    llm = engine("qwen3", logprobs_mode="processed_logprobs")
    asked = prompts(3, 3, 30)
    for distribution in (
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ):
        same(qwen3, generate(llm, asked, **distribution), **distribution)


def test_an_engine_in_processes_of_its_own(
    engine: Engine, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = engine("qwen3")
    outputs = generate(llm, prompts(3, 3, 30))
    llm.llm_engine.engine_core.shutdown()
    same(qwen3, outputs)


def test_where_it_differs(engine: Engine, folders: Callable[[str], Path]) -> None:
    """The tool names the first module with other bits."""
    from samebits.engines.parity import compare, first_difference, outputs_of_modules, replay
    from samebits.vllm.rollout import Rollout

    engine  # noqa: B018  (for its clean-up)
    rollout = Rollout(str(folders("qwen3")), 64, 0.5)
    model = trainer(folders("qwen3"))
    samples = rollout.sample(prompts(2, 20, 30), 4)
    assert compare(samples, replay(model, [[*s.prompt, *s.tokens] for s in samples]))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] *= 2
    parity = compare(samples, replay(model, [[*s.prompt, *s.tokens] for s in samples]))
    assert not parity
    assert parity.first is not None
    sequence = [*samples[0].prompt, *samples[0].tokens]
    with torch.no_grad(), outputs_of_modules(model) as own:
        model(torch.tensor([sequence]), use_cache=False)
    assert first_difference(rollout.outputs(sequence), own) == "model.layers.1.mlp.down_proj"
