"""``samebits.trl.batch_invariant``: the loss of TRL's trainers has the log-probs of the model's own head."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samebits
import samebits.trl
from samebits.engines import logprobs
from samebits.testing import assert_same_bits
from tests.support.devices import DEVICES

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="the trl extra is not installed: pip install '.[trl]'")
utils = pytest.importorskip("trl.trainer.utils")

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {"final_logit_softcapping": 7.0, "sliding_window": 5, "attn_implementation": "samebits"},
    ),
    "granite": ("Granite", {"logits_scaling": 6.0}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
}
LENGTHS = (7, 4, 9)
ANSWER = 3  # tokens at the end of each row that are scored


def build(name: str, dtype: torch.dtype, device: str, temperature: float) -> nn.Module:
    samebits.transformers.register()
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).to(device, dtype)
    utils.add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def trainer(model: nn.Module, **arguments: Any) -> Any:
    args = trl.GRPOConfig("unused", use_cpu=True, report_to="none", vllm_mode="server", **arguments)
    return SimpleNamespace(model=model, args=args, accelerator=SimpleNamespace(unwrap_model=lambda m: m))


def rows(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 131, (n,), generator=generator).to(device) for n in LENGTHS]


def fused(model: nn.Module, sequences: list[Tensor]) -> Any:
    """What TRL's loss computes: rows with padding on the left, scored at their last tokens."""
    longest = max(map(len, sequences))
    ids = torch.stack([nn.functional.pad(s, (longest - len(s), 0)) for s in sequences])
    labels = ids.clone()
    labels[:, :-ANSWER] = -100
    return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels, fused_lm_head=True)


def own(model: nn.Module, sequence: Tensor, temperature: float) -> Tensor:
    """Log-probs by the model's own head, of a row that is alone."""
    logits = model(input_ids=sequence[None]).logits[0, -ANSWER - 1 : -1].float()
    if temperature != 1:
        logits = logits / torch.tensor(temperature, device=logits.device)
    return logits.log_softmax(-1).gather(-1, sequence[-ANSWER:, None])[:, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_a_row_alone(
    name: str, temperature: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sequences = build(name, torch.bfloat16, device, temperature), rows(device)
    with torch.no_grad(), samebits.trl.batch_invariant(trainer(model, temperature=temperature)):
        expected = torch.stack([own(model, s, temperature) for s in sequences])
        found = fused(model, sequences)
        with torch.autocast(device, torch.bfloat16):
            cast = fused(model, sequences)
        monkeypatch.setattr(logprobs, "_LOGITS", 131 * 2)
        pieces = fused(model, sequences)
    for some in (found, cast, pieces):
        assert_same_bits(some.log_probs[:, -ANSWER:], expected)
        assert_same_bits(some.entropy, found.entropy)
    with torch.no_grad(), samebits.batch_invariant():
        theirs = fused(model, sequences).log_probs[:, -ANSWER:]
    assert (theirs != expected).any(), "TRL's own log-probs would do"


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_a_head_in_float32(name: str) -> None:
    """Its logits are capped and divided in float32, too."""
    model, sequences = build(name, torch.bfloat16, "cpu", 0.7), rows("cpu")
    with torch.no_grad(), samebits.trl.batch_invariant(trainer(model)):
        narrow = fused(model, sequences)
    samebits.convert(model, filter=lambda name, _: name == "lm_head", out_dtype=torch.float32)
    with torch.no_grad(), samebits.trl.batch_invariant(trainer(model)):
        expected = torch.stack([own(model, s, 0.7) for s in sequences])
        found = fused(model, sequences)
    assert_same_bits(found.log_probs[:, -ANSWER:], expected)
    assert (found.log_probs != narrow.log_probs).any()


def test_entropy_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = build("qwen3", torch.float32, "cpu", 0.7), rows("cpu")

    def results(context: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        with context:
            found = fused(model, sequences)
            loss = (found.log_probs[:, -ANSWER:] * torch.tensor([0.5, -1, 2])).sum() + found.entropy.sum()
            gradients = torch.autograd.grad(loss, [*model.parameters()])
        return found.log_probs.detach(), found.entropy.detach(), [*gradients]

    whole = results(samebits.trl.batch_invariant(trainer(model)))
    monkeypatch.setattr(logprobs, "_LOGITS", 131 * 2)
    pieces = results(samebits.trl.batch_invariant(trainer(model)))
    hook = model.base_model.register_forward_pre_hook(samebits.trl._count_positions, with_kwargs=True)
    theirs = results(samebits.batch_invariant())
    hook.remove()
    for ours in (whole, pieces):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same_bits(pieces[0], whole[0])
    assert_same_bits(pieces[1], whole[1])


def test_everything_is_undone() -> None:
    model, head = build("qwen3", torch.bfloat16, "cpu", 1.0), utils._ChunkedLogProbFunction
    with contextlib.suppress(ZeroDivisionError), samebits.trl.batch_invariant(trainer(model)):
        assert utils._ChunkedLogProbFunction is not head
        raise ZeroDivisionError
    assert utils._ChunkedLogProbFunction is head
    assert not model.base_model._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching: expected False",
        ),
        ({"use_vllm": True, "top_p": 0.9}, "top_p: expected 1.0, got 0.9"),
        ({"use_vllm": True, "top_k": 5}, "top_k: expected 0, got 5"),
        ({"use_vllm": True, "min_p": 0.1}, "min_p: expected 0.0, got 0.1"),
        ({"use_vllm": True, "repetition_penalty": 1.1}, "repetition_penalty: expected 1.0, got 1.1"),
        ({"use_vllm": True, "cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32: expected False"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex: expected"),
        ({"use_vllm": True, "generation_kwargs": {"seed": 1, "min_tokens": 2}}, r"got \['min_tokens'\]"),
    ],
)
def test_settings_that_move_log_probs_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = build("qwen3", torch.bfloat16, "cpu", 1.0)
    with (
        pytest.raises(ValueError, match=f"samebits.trl.batch_invariant: .*{message}"),
        samebits.trl.batch_invariant(trainer(model, **arguments)),
    ):
        pass


def test_models_that_round_otherwise_are_refused() -> None:
    model = build("qwen3", torch.bfloat16, "cpu", 1.0)
    ours = trainer(model, use_vllm=True)
    ours.args.vllm_mode = "colocate"
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, head_dtype=torch.bfloat16),
        additional_config={"other": 1},
    )
    ours.vllm_generation = SimpleNamespace(
        llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    )
    with pytest.raises(ValueError, match="vllm_generation: expected an engine under samebits, got"):
        samebits.trl.batch_invariant(ours).__enter__()
    config.additional_config["samebits"] = True
    with samebits.trl.batch_invariant(ours):
        pass
    config.model_config.head_dtype = torch.float32
    with pytest.raises(
        ValueError, match=r"model: expected a head whose logits are torch\.float32, got torch"
    ):
        samebits.trl.batch_invariant(ours).__enter__()
    samebits.convert(model.lm_head, out_dtype=torch.float32)
    with samebits.trl.batch_invariant(ours):
        pass
    config.model_config.head_dtype = torch.bfloat16
    ours.ref_model = build("qwen3", torch.bfloat16, "cpu", 1.0)
    with pytest.raises(ValueError, match=r"ref_model: expected a head of out_dtype=torch\.float32, got None"):
        samebits.trl.batch_invariant(ours).__enter__()
    del ours.ref_model
    model.lm_head.out_dtype = None
    model.float()
    with pytest.raises(ValueError, match=r"model: expected all weights in torch\.bfloat16"):
        samebits.trl.batch_invariant(ours).__enter__()
    model.bfloat16().lm_head.float()
    with pytest.raises(ValueError, match="model: expected all weights in"):
        samebits.trl.batch_invariant(ours).__enter__()
    model.bfloat16().config._attn_implementation = "eager"
    with pytest.raises(ValueError, match='attn_implementation: expected "sdpa" or "samebits"'):
        samebits.trl.batch_invariant(ours).__enter__()


def test_another_head_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden

    ours = trainer(build("qwen3", torch.bfloat16, "cpu", 1.0))
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(RuntimeError, match=r"got \(ctx, hidden\). This version of TRL has another head"):
        samebits.trl.batch_invariant(ours).__enter__()
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(RuntimeError, match="This version of TRL has another head"):
        samebits.trl.batch_invariant(ours).__enter__()
