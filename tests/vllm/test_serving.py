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


@pytest.mark.parametrize(
    ("name", "model_impl"), [("qwen3", "auto"), ("qwen3", "transformers"), ("qwen3_moe", "auto")]
)
def test_new_weights(name: str, model_impl: str, engine: Engine, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from samebits.vllm.check import replayed

    llm = engine(name, model_impl=model_impl, enable_prefix_caching=True, block_size=32)
    new = trainer(models.save(name, tmp_path / "new", seed=1))
    asked = prompts(3, 3, 60)
    assert not replayed(new, generate(llm, asked))
    core: Any = llm.llm_engine
    loaded = core.model_executor.driver_worker.get_model()
    loaded.load_weights(load_file(tmp_path / "new" / "model.safetensors").items())
    llm.reset_prefix_cache()
    same(new, generate(llm, asked))
    assert max(o.num_cached_tokens for o in generate(llm, asked)) >= 32
    if model_impl == "auto":
        newer = models.save(name, tmp_path / "newer", seed=2)
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


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [("qwen3", "auto"), ("qwen3", "transformers"), ("gemma2", "auto"), ("granite", "auto")],
)
def test_a_head_in_float32(
    name: str, model_impl: str, engine: Engine, folders: Callable[[str], Path]
) -> None:
    """Also where logits are capped or divided after it; and they are not those of a head in 16 bits."""
    import samebits
    from samebits.vllm.check import replayed

    model = trainer(folders(name))
    llm = engine(
        *(name,),
        hf_overrides={"head_dtype": "float32"},
        model_impl=model_impl,
        logprobs_mode="processed_logprobs" if name == "qwen3" else "raw_logprobs",
    )
    distribution = {"temperature": 0.7} if name == "qwen3" else {}
    outputs = generate(llm, prompts(4, 3, 60), **distribution)
    more = generate(llm, prompts(2, 3, 60), prompt_logprobs=0)
    assert not replayed(model, outputs, **distribution)
    samebits.convert(model, filter=lambda name, _: name == "lm_head", out_dtype=torch.float32)
    same(model, outputs, **distribution)
    same(model, more)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation(
    method: str,
    engine: Engine,
    qwen3: Any,
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens that another model or the prompt proposed have the log-probs of this one."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    own, accepted = RejectionSampler.forward, []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        accepted.append(int((out.sampled_token_ids >= 0).sum()) - len(out.sampled_token_ids))
        return out

    monkeypatch.setattr(RejectionSampler, "forward", forward)
    how: dict[str, Any] = {"ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1}}.get(
        method, {"model": str(folders("qwen3"))}
    )
    llm = engine("qwen3", speculative_config={"method": method, "num_speculative_tokens": 3, **how})
    asked = [2 * p for p in prompts(3, 5, 20)]
    same(qwen3, generate(llm, asked, max_tokens=16, temperature=0.0))
    same(qwen3, generate(llm, asked, max_tokens=16, prompt_logprobs=0))
    assert sum(accepted) > 0


def test_what_changes_the_choice_of_tokens(
    engine: Engine, qwen3: Any, folders: Callable[[str], Path]
) -> None:
    """Raw log-probs are the model's, whatever of its distribution may be sampled."""
    from vllm.sampling_params import StructuredOutputsParams

    models.save_tokenizer(folders("qwen3"))
    llm = engine("qwen3", skip_tokenizer_init=False)
    asked = prompts(3, 3, 30)
    same(qwen3, generate(llm, asked, logit_bias={7: 20.0, 9: 20.0}, min_p=0.1))
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": -1.0}
    same(qwen3, generate(llm, asked, **penalties))
    outputs = generate(llm, asked, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
    allowed = {models.TOKENS.index(c) for c in "ab"}
    assert all({*o.outputs[0].token_ids} <= allowed for o in outputs)
    same(qwen3, outputs)


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
        model(torch.tensor([sequence], device=model.device), use_cache=False)
    assert first_difference(rollout.outputs(sequence), own) == "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_chosen_experts_are_told_and_replayed(
    model_impl: str, engine: Engine, folders: Callable[[str], Path]
) -> None:
    """By vLLM's own capture, which gives them to callers on GPUs alone."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturers

    import samebits
    from samebits.routing import replay

    if not hasattr(capturers, "bind_routed_experts_capturer"):
        pytest.skip("vLLM 0.26 binds its own alone: test_serving_on_gpus.py")

    class Capturer:
        def __init__(self) -> None:
            self.found: dict[int, Any] = {}

        def capture(self, layer: int, experts: Any) -> None:
            self.found[layer] = experts.clone()

    core: Any = engine("qwen3_moe", model_impl=model_impl)
    loaded = core.llm_engine.model_executor.driver_worker.get_model()
    capturer: Any = Capturer()
    capturers.bind_routed_experts_capturer(loaded, capturer)
    (ids,) = prompts(1, 40, 40)
    generate(core, [ids], max_tokens=1)
    experts = torch.zeros(len(ids), 2, 2, dtype=torch.int64)
    for layer, chosen in capturer.found.items():
        experts[:, layer] = chosen

    model = trainer(folders("qwen3_moe"))
    block = model.model.layers[1].mlp
    took: list[Any] = []
    block.experts.register_forward_pre_hook(lambda _, args: took.append(args[1]))

    def run() -> Any:
        model(torch.tensor([ids]))
        return took.pop()

    with torch.no_grad(), samebits.batch_invariant("error"):
        assert torch.equal(run(), experts[:, 1])
        block.gate.weight += torch.randn_like(block.gate.weight) * 0.02  # a trainer with other bits
        assert not torch.equal(run(), experts[:, 1])
        with replay(model, experts):
            assert torch.equal(run(), experts[:, 1])
