"""verl's FSDP engine, with the hooks of ``samebits.verl``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: .ci/trainers.txt names what it needs", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
os.environ |= {"HF_HUB_OFFLINE": "1", "VERL_PLATFORM": "cpu"}
sys.path.insert(0, str(EXAMPLES))
importlib.import_module("verl_cpu")

import samebits  # noqa: E402
from samebits.engines.hooks import MovedError  # noqa: E402
from samebits.engines.refusals import RefusedError  # noqa: E402

WORDS = 300
LENGTHS = [17, 5, 30, 2, 11, 24]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tied"), tied=True)


def save(path: Path, tied: bool = False) -> Path:
    """A tiny Qwen 2, with more rows than its tokenizer has words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tests.vllm.models import build

    model = build("qwen2")
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def on() -> Iterator[ModuleType]:
    module = importlib.import_module("samebits.verl")
    module.enable()
    yield module
    module.disable()


def configs(folder: Path, fused: bool = False, **model: Any) -> tuple[Any, Any, Any, Any]:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    return (
        HFModelConfig(
            path=str(folder),
            **{
                "use_fused_kernels": fused,
                "fused_kernel_options": {"impl_backend": "torch"},
                "override_config": {"attn_implementation": "sdpa"},
                **model,
            },
        ),
        FSDPEngineConfig(strategy="fsdp2", wrap_policy={"min_num_params": 0}),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=4, lr_warmup_steps=0),
        CheckpointConfig(),
    )


def engine(folder: Path, **options: Any) -> Any:
    from verl.workers.engine import EngineRegistry

    model, fsdp, optimizer, checkpoint = configs(folder, **options)
    made = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=fsdp,
        optimizer_config=optimizer,
        checkpoint_config=checkpoint,
    )
    made.initialize()
    return made


def batch(sequences: list[list[int]], *, rows: int, packed: bool, fused: bool, temperature: float) -> Any:
    from verl.utils import tensordict_utils as tu

    def nested(parts: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested([torch.tensor(s) for s in sequences]),
            "position_ids": nested([torch.arange(len(s)) for s in sequences]),
            "loss_mask": nested([torch.ones(len(s)) for s in sequences]),
        },
        {
            "calculate_entropy": True,
            "micro_batch_size_per_gpu": rows,
            "temperature": temperature,
            "use_dynamic_bsz": False,
            "use_fused_kernels": fused,
            "use_remove_padding": packed,
        },
    )


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, WORDS, (n,), generator=generator).tolist() for n in LENGTHS]


def has_float32_logits(made: Any) -> bool:
    return getattr(made.module.get_output_embeddings(), "out_dtype", None) == torch.float32


def log_probs(made: Any, asked: list[list[int]], **options: Any) -> list[Tensor]:
    """Of each sequence, all tokens but the first."""
    with made.eval_mode():
        output = made.forward_backward_batch(batch(asked, **options), None, forward_only=True)
    found = output["model_output"]
    assert all(bool(torch.isfinite(e).all()) for e in found["entropy"].unbind())
    return [row[:-1].detach() for row in found["log_probs"].unbind()]


def differing(a: list[Tensor], b: list[Tensor]) -> int:
    pairs = zip(a, b, strict=True)
    return sum(int((x.view(torch.int32) != y.view(torch.int32)).sum()) for x, y in pairs)


def expected(
    folder: Path, asked: list[list[int]], temperature: float, head: torch.dtype | None = None
) -> list[Tensor]:
    """Of the model of ``transformers``, one sequence at a time, with the tokenizer's words alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = len(AutoTokenizer.from_pretrained(folder))
    samebits.transformers.register()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "samebits"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    samebits.convert(model.lm_head, out_dtype=head)
    found = []
    with torch.no_grad(), samebits.batch_invariant("error"):
        for ids in asked:
            logits = model(torch.tensor([ids])).logits[0].float()
            logits[:, words:] = -torch.inf
            every = torch.log_softmax(logits / torch.full((), temperature), -1)
            found.append(every[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
    return found


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
def test_log_probs_are_those_of_the_model_however_they_are_batched(
    folder: Path, tied: Path, group: None, on: ModuleType, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    folder = tied if fused else folder  # else verl's fused head gets a shard of the weight
    asked = sequences()
    own = {temperature: expected(folder, asked, temperature) for temperature in (1.0, 0.7)}
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", Qwen2ForCausalLM.forward)  # verl exchanges it if fused
    made = engine(folder, fused=fused)
    for temperature in own:
        for rows, packed in ((6, True), (1, True), (3, False)):
            given = log_probs(made, asked, rows=rows, packed=packed, fused=fused, temperature=temperature)
            assert differing(given, own[temperature]) == 0, (temperature, rows, packed)


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
def test_a_head_in_float32(
    folder: Path, tied: Path, group: None, on: ModuleType, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    folder, asked = tied if fused else folder, sequences()
    own, narrow = expected(folder, asked, 0.7, torch.float32), expected(folder, asked, 0.7)
    assert differing(own, narrow) > 0
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", Qwen2ForCausalLM.forward)
    made = engine(folder, fused=fused, override_config={"head_dtype": "float32"})
    assert has_float32_logits(made)
    given = log_probs(made, asked, rows=3, packed=True, fused=fused, temperature=0.7)
    assert differing(given, own) == 0


def trained(folder: Path, steps: int, **options: Any) -> list[Tensor]:
    """Weights after so many steps."""

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        return -model_output["log_probs"].values().sum() / 100, {}

    made = engine(folder, **options)
    for _ in range(steps):
        with made.train_mode():
            data = batch(sequences(), rows=3, packed=True, fused=False, temperature=0.7)
            made.forward_backward_batch(data, loss)
            assert made.optimizer_step() > 0
    return [p.full_tensor().detach() for p in made.module.parameters()]


@pytest.mark.long
def test_fused_layers_have_the_same_bits(
    folder: Path, group: None, on: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samebits.fusion import forms

    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        own = getattr(forms, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(forms, name, counted)

    for name in ("add_rms_norm", "rotary", "gated"):
        count(name)
    options = {"override_config": {"samebits_fuse": True}}
    made = engine(folder, **options)
    assert not hasattr(made.model_config.hf_config, "samebits_fuse"), "it would be in every checkpoint"
    calls.clear()
    given = log_probs(made, sequences(), rows=3, packed=True, fused=False, temperature=0.7)
    layers, batches = 2, 2
    each = layers * batches
    assert calls == {"add_rms_norm": 2 * each + batches, "rotary": each, "gated": each}
    assert differing(given, expected(folder, sequences(), 0.7)) == 0
    ours, own = trained(folder, 2, **options), trained(folder, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, own, strict=True))


@pytest.mark.long
def test_steps_train_and_repeat(folder: Path, group: None, on: ModuleType) -> None:
    first, again, before = trained(folder, 2), trained(folder, 2), trained(folder, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, before, strict=True))


def test_a_fused_head_of_a_shard_is_refused(
    folder: Path, group: None, on: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", Qwen2ForCausalLM.forward)
    made = engine(folder, fused=True)
    with pytest.raises(RefusedError, match="use_fused_kernels under fsdp2"):
        log_probs(made, sequences(), rows=6, packed=True, fused=True, temperature=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 8}, "LoRA"),
        ({"use_liger": True}, "use_liger"),
        ({"override_config": {"head_dtype": "float16"}}, "head_dtype='float16'"),
        ({"fused": True, "fused_kernel_options": {"impl_backend": "triton"}}, "impl_backend='triton'"),
    ],
    ids=["lora", "liger", "head", "triton"],
)
def test_what_has_no_equal_bits_is_refused(
    folder: Path, group: None, on: ModuleType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        engine(folder, **options)


def test_a_rollout_with_other_log_probs_is_refused(on: ModuleType) -> None:
    from verl.workers.config import RolloutConfig
    from verl.workers.rollout.base import BaseRollout

    kind = type("Rollout", (BaseRollout,), dict.fromkeys(BaseRollout.__abstractmethods__))
    fine = RolloutConfig(name="vllm", mode="async", temperature=0.7)
    kind(fine, None, None)
    wide = SimpleNamespace(override_config={"head_dtype": "float32"})
    with pytest.raises(RefusedError, match=r"head_dtype: 'float32': the rollout's is None"):
        kind(fine, wide, None)
    nested = SimpleNamespace(override_config={"model_config": {"head_dtype": "float32"}})
    with pytest.raises(RefusedError, match=r"head_dtype: 'float32': the rollout's is None"):
        kind(fine, nested, None)
    overrides = {"vllm": {"hf_overrides": {"head_dtype": "float32"}}}
    kind(replace(fine, engine_kwargs=overrides), wide, None)
    for setting in ({"top_p": 0.9}, {"top_k": 20}, {"logprobs_mode": "raw_logprobs"}, {"name": "sglang"}):
        with pytest.raises(RefusedError, match=f"rollout.{next(iter(setting))}="):
            kind(replace(fine, **setting), None, None)


def test_other_engines_are_refused(on: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine import EngineRegistry

    other = type("Other", (), {})
    monkeypatch.setitem(EngineRegistry._engines["language_model"], "other", {"cpu": other})
    with pytest.raises(RefusedError, match="strategy='other'"):
        EngineRegistry.get_engine_cls("language_model", "other")


def test_everything_is_put_back(on: ModuleType) -> None:
    from verl.utils.debug import metrics
    from verl.workers.engine.fsdp import transformer_impl as fsdp

    assert fsdp.logprobs_from_logits.__module__ == on.__name__
    assert os.environ["SAMEBITS_VLLM"] == "1"
    on.disable()
    assert "SAMEBITS_VLLM" not in os.environ
    assert fsdp.logprobs_from_logits.__module__ == "verl.utils.torch_functional"
    assert metrics.calculate_debug_metrics.__module__ == metrics.__name__


def test_a_moved_function_is_an_error(on: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine.fsdp import transformer_impl as fsdp

    on.disable()
    monkeypatch.setattr(fsdp, "logprobs_from_logits", lambda logits: logits)
    with pytest.raises(MovedError, match=r"logprobs_from_logits: expected a function of \(logits, labels"):
        on.enable()
    assert not on.is_enabled()
