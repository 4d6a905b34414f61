"""What models of ``transformers`` ask of their attention, without weights."""

from __future__ import annotations

from typing import Any

import pytest

from samebits.engines.refusals import RefusedError
from samebits.engines.trainer import Attention, TrainerModel, place

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
PLAIN = Attention(heads=4, kv_heads=2, size=32, window=None, scale=32**-0.5, softcap=0.0, sinks=False)
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
NARROW = PLAIN._replace(window=16)
SINKS = PLAIN._replace(sinks=True)


def config(kind: str, **options: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**SMALL | options)


@pytest.mark.parametrize(
    ("kind", "options", "asked"),
    [
        ("Llama", {}, [PLAIN, PLAIN]),
        ("Llama", {"sliding_window": 16, "attn_logit_softcapping": 5.0}, [PLAIN, PLAIN]),  # it reads neither
        ("Mistral", {"sliding_window": 16}, [NARROW, NARROW]),
        ("Qwen3", MIXED | {"use_sliding_window": True, "max_window_layers": 1}, [NARROW, PLAIN]),
        (
            "Gemma2",
            MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
            [NARROW._replace(softcap=5.0, scale=0.25), PLAIN._replace(softcap=5.0, scale=0.25)],
        ),
        ("GptOss", MIXED | EXPERTS, [SINKS._replace(window=16), SINKS]),
        ("Mixtral", {"sliding_window": None} | EXPERTS, [PLAIN, PLAIN]),
        ("Granite", {"attention_multiplier": 0.11}, [PLAIN._replace(scale=0.11)] * 2),
        (
            "GraniteMoeHybrid",
            {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_head": 64},
            [None, PLAIN._replace(scale=1.0)],
        ),
    ],
)
def test_attention(kind: str, options: dict[str, Any], asked: list[Attention | None]) -> None:
    expected = {i: attention for i, attention in enumerate(asked) if attention is not None}
    assert TrainerModel(config(kind, **options)).attention == expected


def test_heads_of_a_layer() -> None:
    """MiMo's layers with a window have twice as many of keys and values."""
    options = MIXED | {"v_head_dim": 32, "mlp_layer_types": ["dense", "dense"]}
    asked = TrainerModel(config("MiMoV2Flash", **options)).attention
    assert [attention.kv_heads for attention in asked.values()] == [4, 2]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "BertGeneration",
            {"is_decoder": False},
            r"the attention BertGenerationSelfAttention: it is not causal",
        ),
        ("DiffLlama", {}, r"the attention DiffLlamaAttention: a layer does not ask for it just once"),
        ("Doge", {}, r"the configuration DogeConfig: transformers does not say what its model computes: Key"),
        ("DistilBert", {}, r"the configuration DistilBertConfig: transformers does not .*Unrecognized"),
    ],
)
def test_refusals(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        TrainerModel(config(kind, **options))


def test_layers() -> None:
    """Biases, eps and the head are the model's, whatever the configuration says."""
    trainer = TrainerModel(config("Qwen3", attention_bias=True, rms_norm_eps=1e-3, tie_word_embeddings=True))
    assert {part for (_, part), found in trainer.biases.items() if found == {True}} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert trainer.biases[1, "down_proj"] == trainer.biases[None, "lm_head"] == {False}
    assert trainer.eps[0, "q_norm"] == trainer.eps[None, "norm"] == {1e-3}
    assert trainer.tied
    assert not TrainerModel(config("Qwen3", tie_word_embeddings=False)).tied


def test_options_that_the_code_does_not_read() -> None:
    both = {"logits_scaling": 3.0, "final_logit_softcapping": 10.0}
    granite, gemma = (TrainerModel(config(kind, **both)) for kind in ("Granite", "Gemma2"))
    assert (granite.option("logits_scaling"), granite.option("final_logit_softcapping")) == (3.0, None)
    assert (gemma.option("logits_scaling"), gemma.option("final_logit_softcapping")) == (None, 10.0)


def test_nothing_stays() -> None:
    """The functions that are asked are gone, and the configuration is as it was."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given = config("Llama")
    before, known = given.to_dict(), list(ALL_ATTENTION_FUNCTIONS)
    TrainerModel(given)
    with pytest.raises(RefusedError):
        TrainerModel(config("Doge"))
    assert given.to_dict() == before
    assert given._attn_implementation is None
    assert list(ALL_ATTENTION_FUNCTIONS) == known


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.11.mlp.experts.3.down_proj", (11, "down_proj")),
        ("3.attn", (3, "attn")),
        ("lm_head", (None, "lm_head")),
    ],
)
def test_places(name: str, expected: tuple[int | None, str]) -> None:
    assert place(name) == expected


def test_windows_that_no_sequence_fills() -> None:
    assert NARROW.within(16) == PLAIN
    assert NARROW.within(17) == NARROW
