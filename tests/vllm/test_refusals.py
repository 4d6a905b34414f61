"""What is not covered is refused by name, before the engine serves."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from samebits.engines.refusals import RefusedError
from tests.vllm.conftest import Engine, generate

SEGMENTS = {"samebits": {"segments": 8}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def _draft(**changed: Any) -> dict[str, Any]:
    plain = {"architecture": "Qwen3ForCausalLM", "is_hybrid": False, "quantization": None}
    return {
        "method": "draft_model",
        "attention_backend": None,
        "draft_model_config": SimpleNamespace(**plain | changed),
    }


def _segments(count: int) -> dict[str, Any]:
    return {"additional_config": {"samebits": {"segments": count}}}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("qwen3", {"quantization": "fp8"}, r"quantization='fp8': .*quantization='fp8_per_block'"),
        ("qwen3", {"compilation_config": {"mode": 3}}, r"compilation mode .*kernels of its own"),
        ("qwen3", {"hf_overrides": {"head_dtype": "float16"}}, r"head_dtype=torch.float16: .*torch.float32"),
        ("mixtral", {"enable_lora": True}, r"enable_lora with a mixture of experts: .*merge the adapter"),
        (
            "qwen3",
            {"enable_lora": True, "cpu_offload_gb": 1},
            r"enable_lora with weights offloaded .*neither",
        ),
        ("olmoe", {"hf_overrides": {"clip_qkv": 8.0}}, r"clip_qkv=8.0 .*give model_impl=.transformers"),
        (
            "qwen3",
            {"hf_overrides": {"attention_bias": True}},
            r"self_attn.\w+_proj .*: bias is False, and in transformers True.*give model_impl=.transformers",
        ),
        ("gpt_oss", {"hf_overrides": {"attention_bias": False}}, r"attn.qkv_proj .*: bias is True, and in"),
        ("gpt_oss", {"hf_overrides": {"rms_norm_eps": 1e-6}}, r"norm of class RMSNorm: eps is 1e-05, and in"),
        ("llama", {"hf_overrides": {"sliding_window": 16}}, r"0.self_attn.attn .*: window is 16, and in"),
        (
            "qwen3",
            {"hf_overrides": {"attn_logit_softcapping": 5.0}, "model_impl": "transformers"},
            r"0\S* of class Attention: softcap is 5.0, and in transformers 0.0.*run it without samebits",
        ),
        (
            "qwen3",
            {"hf_overrides": {"rope_parameters": PARTIAL}},
            r"rotary positions: the engine turns .* entries of a head, transformers .*remove partial_rotary",
        ),
        ("gemma3", {"hf_overrides": {"use_bidirectional_attention": True}}, r"attention to later tokens"),
        ("granite_hybrid", {"enable_lora": True}, r"enable_lora with recurrent layers of GraniteMoeHybrid"),
        (
            "qwen3",
            {"speculative_config": NGRAM, "logprobs_mode": "processed_logprobs"},
            r"speculative_config with logprobs_mode='processed_logprobs': .*ask for raw ones",
        ),
        (
            "qwen3_next",
            {"speculative_config": NGRAM},
            r"speculative_config with .*Qwen3Next.*: a state",
        ),
        ("falcon_h1", {}, r"recurrent layers of FalconH1.*: of models with such layers these are covered"),
        ("olmo2", {"hf_overrides": {"llama_4_scaling": {"beta": 1}}}, r"llama_4_scaling in the model's"),
        ("qwen3", {"tensor_parallel_size": 2}, r"tensor_parallel_size=2: .*options\(segments=8\)"),
        ("qwen3", {"tensor_parallel_size": 4, **_segments(2)}, r"=4: 2 segments of a sum cannot be split"),
        ("qwen3", {"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2: tensor parallelism alone"),
        (
            "qwen3",
            {"quantization": "fp8_per_block", **_segments(8)},
            r"segments=8 in FP8: .*have no segments",
        ),
        ("qwen3", {"enable_lora": True, **_segments(8)}, r"segments=8 with adapters: .*merge the adapter"),
        ("deepseek_v3", _segments(8), r"segments=8 with MLA: its products are not covered"),
        ("mixtral", {"enable_expert_parallel": True}, r"enable_expert_parallel: .*do not set it"),
    ],
)
def test_options(name: str, options: dict[str, Any], said: str, engine: Engine) -> None:
    with pytest.raises(RefusedError, match=said):
        engine(name, **options)


@pytest.fixture
def loaded(engine: Engine) -> tuple[Any, Any]:
    """A model that passed, and its configuration."""
    llm = engine("qwen3")
    core: Any = llm.llm_engine
    return core.model_executor.driver_worker.get_model(), core.vllm_config


def test_layers(loaded: tuple[Any, Any]) -> None:
    """Each is changed, refused by its name, and changed back."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from samebits.vllm.covered import check_model

    model, config = loaded
    check_model(model, config)
    layer = model.model.layers[1]

    class Own(RMSNorm):
        pass

    class Method:
        pass

    attention = layer.self_attn.attn
    changes: list[tuple[Any, str, Any, str]] = [
        (layer.input_layernorm, "__class__", Own, r"layers.1.input_layernorm of class Own: .*on no list"),
        (layer.mlp.down_proj, "quant_method", Method(), r"layers.1.mlp.down_proj of class Row.*Method"),
        (layer.self_attn.q_norm, "variance_size_override", 16, r"self_attn.q_norm .*a part of the row"),
        (attention, "impl", object.__new__(CPUAttentionBackendImpl), r"attn .*CPUAttentionBackendImpl"),
        (attention.impl, "attn_type", AttentionType.ENCODER_ONLY, r"self_attn.attn .*ENCODER_ONLY attention"),
        (attention.impl, "alibi_slopes", object(), r"self_attn.attn .*ALiBi"),
        (attention.impl, "kv_sharing_target_layer_name", "x", r"shares the keys"),
        (attention.impl, "kv_cache_dtype", "fp8", r"its cache is fp8"),
        (model, "__class__", type("GPT2LMHeadModel", (type(model),), {}), r"architecture GPT2LMHeadModel"),
    ]
    for of, name, value, said in changes:
        before = getattr(of, name)
        setattr(of, name, value)
        with pytest.raises(RefusedError, match=said):
            check_model(model, config)
        setattr(of, name, before)
    check_model(model, config)


def test_layers_of_another_model(loaded: tuple[Any, Any]) -> None:
    """Each is changed, refused with what ``transformers`` has, and changed back."""
    from samebits.engines.trainer import TrainerModel
    from samebits.vllm.covered import check_against

    model, config = loaded
    layer, trainer = model.model.layers[1], TrainerModel(config.model_config.hf_text_config)
    own = layer.self_attn.attn.impl
    changes: list[tuple[Any, str, Any, str]] = [
        (own, "num_heads", 2, r"layers.1.self_attn.attn .*: heads is 2, and in transformers 4"),
        (own, "num_kv_heads", 1, r"layers.1.self_attn.attn .*: kv_heads is 1, and in transformers 2"),
        (own, "head_size", 64, r"layers.1.self_attn.attn .*: size is 64, and in transformers 32"),
        (own, "sliding_window", 8, r"layers.1.self_attn.attn .*: window is 8, and in transformers None"),
        (own, "scale", 0.5, r"layers.1.self_attn.attn .*: scale is 0.5, and in transformers 0.17"),
        (own, "sinks", object(), r"layers.1.self_attn.attn .*: sinks is True, and in transformers False"),
        (layer.self_attn.q_norm, "variance_epsilon", 1e-3, r"layers.1.self_attn.q_norm .*: eps is 0.001"),
        (trainer, "biases", {(1, "down_proj"): {True}}, r"layers.1.mlp.down_proj .*: bias is False, and in"),
        (trainer, "tied", True, r"tie_word_embeddings is False, and in transformers True"),
        (trainer, "attention", {}, r"layers.0.self_attn.attn .*: its attention is there, and in .* nowhere"),
    ]
    for of, name, value, said in changes:
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(of, name, value)
            with pytest.raises(RefusedError, match=said):
                check_against(model, trainer, config)
    check_against(model, trainer, config)


@pytest.mark.parametrize(
    ("name", "options", "implementation"),
    [
        ("llama", {"logit_scale": 0.25}, "auto"),
        ("qwen3", {"logit_scale": 0.25, "final_logit_softcapping": 10.0}, "transformers"),
    ],
)
def test_options_of_the_head_that_a_trainer_does_not_read(
    name: str, options: dict[str, Any], implementation: str, engine: Engine
) -> None:
    """vLLM would scale logits, or cap them."""
    llm: Any = engine(name, hf_overrides=options, model_impl=implementation).llm_engine
    processor = llm.model_executor.driver_worker.get_model().logits_processor
    assert (processor.scale, processor.soft_cap) == (1.0, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle"}, r"method 'eagle': proposals by ngram or draft_model alone"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, r"rejection_sample_method: its tokens"),
        (
            _draft(architecture="Starcoder2ForCausalLM"),
            r"a draft model Starcoder2.*: it would run in a class of vLLM",
        ),
        (_draft(is_hybrid=True), r"a draft model Qwen3.*: its layers with a state"),
        (_draft(quantization="fp8"), r"a draft model Qwen3.* of quantization='fp8': it is not covered"),
        (
            _draft() | {"attention_backend": "other"},
            r"attention_backend=other of a draft model: the model has",
        ),
    ],
)
def test_speculation(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    from samebits.vllm.covered import check_config

    _, config = loaded
    check_config(config)
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace(**options))
    with pytest.raises(RefusedError, match=said):
        check_config(config)


def test_another_batch_invariance(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own replaces what this library replaces."""
    from samebits.vllm.covered import check_config

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(RefusedError, match=r"VLLM_BATCH_INVARIANT: .*unset it"):
        check_config(loaded[1])


def test_several_gpus(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and layers whose sums over ranks have another order."""
    from samebits.vllm.covered import check_config
    from samebits.vllm.parallel import set_contracts

    model, config = loaded
    for of, name, value, said in (
        ("parallel_config", "decode_context_parallel_size", 2, r"decode_context_parallel_size=2: tensor"),
        ("parallel_config", "prefill_context_parallel_size", 2, r"prefill_context_parallel_size=2: tensor"),
        ("parallel_config", "data_parallel_size", 2, r"data_parallel_size=2: tensor parallelism alone"),
        ("parallel_config", "enable_dbo", True, r"enable_dbo: exchanges of two half batches"),
        ("parallel_config", "enable_batch_sharded_sampling", True, r"enable_batch_sharded_sampling: it was"),
        ("parallel_config", "enable_hc_sp", True, r"enable_hc_sp: sequence parallelism is not covered"),
        ("compilation_config.pass_config", "enable_sp", True, r"enable_sp: sequence parallelism"),
        ("compilation_config.pass_config", "fuse_gemm_comms", True, r"fuse_gemm_comms: asynchronous"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(attrgetter(of)(config), name, value, raising=of == "parallel_config")
            with pytest.raises(RefusedError, match=said):
                check_config(config)

    monkeypatch.setattr(config, "additional_config", {"samebits": {"segments": 8}})
    set_contracts(model, config)
    layer, embedding = model.model.layers[1].mlp.down_proj, model.model.embed_tokens
    changes: list[tuple[Any, str, Any, str]] = [
        (layer, "reduce_results", False, r"layers.1.mlp.down_proj .*leaves sums over ranks to another"),
        (layer, "input_is_parallel", False, r"layers.1.mlp.down_proj .*its input is not split"),
        (embedding, "parallel_group", object(), r"model.embed_tokens .*ranks of its own"),
        (embedding, "num_embeddings", 321, r"model.embed_tokens .*added words"),
        (
            layer.weight,
            "data",
            layer.weight.data[:, :189],
            r"down_proj .*: 378 terms of a sum are no multiple",
        ),
    ]
    for of, name, value, said in changes:
        with monkeypatch.context() as changed:
            changed.setattr(layer, "tp_size", 2)
            changed.setattr(embedding, "tp_size", 2)
            changed.setattr(of, name, value)
            with pytest.raises(RefusedError, match=said):
                set_contracts(model, config)


def test_a_model_that_was_not_checked_does_not_run(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    own = model.model.layers[0].self_attn.attn.impl
    assert own.checked
    own.checked = False
    with pytest.raises(RefusedError, match="past the check"):
        own.attend(*[None] * 5)


def test_uncovered_operators_are_errors(loaded: tuple[Any, Any]) -> None:
    """While the model runs, PyTorch's own order of a sum is no option."""
    import torch

    import samebits

    model, _ = loaded
    layer = model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, out: out + torch.prod(out, -1, keepdim=True))
    uncovered = pytest.raises(samebits.UncoveredError, match="prod")
    with torch.inference_mode(), uncovered, samebits.batch_invariant("error"):
        layer.mlp(torch.randn(3, 128).bfloat16())


@pytest.mark.parametrize("version", ["9.9.9", "0.26.0"], ids=["unknown", "tested on GPUs alone"])
def test_an_unknown_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import vllm

    import samebits.vllm

    monkeypatch.setattr(vllm, "__version__", f"{version}+cpu")
    with pytest.raises(RefusedError, match=rf"vLLM {version} on cpu: samebits was tested with .*any_version"):
        samebits.vllm.enable()
    assert not samebits.vllm.is_enabled()
    samebits.vllm.enable(any_version=True)
    assert samebits.vllm.is_enabled()
    samebits.vllm.disable()


def test_log_probs_must_be_asked_for(engine: Engine) -> None:
    from samebits.vllm.check import samples

    with pytest.raises(ValueError, match="expected log-probs"):
        samples(generate(engine("qwen3"), [[1, 2, 3]], logprobs=None, max_tokens=1))
