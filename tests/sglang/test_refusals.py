"""What is not covered is refused by name, before the engine serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samebits.engines.refusals import RefusedError
from tests.sglang.conftest import Start, arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_backend": "torch_native"}, r"attention_backend='torch_native': .*do not set it"),
        ({"cuda_graph_backend_prefill": "full"}, r"cuda_graph_backend_prefill='full': only decoding"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"kv_cache_dtype='fp8_e4m3': .*give 'auto'"),
        ({"tp_size": 2}, r"tp_size=2: sums over GPUs"),
        ({"init_expert_location": "map.json"}, r"init_expert_location='map\.json': experts lie in another"),
        ({"rl_on_policy_target": "fsdp"}, r"rl_on_policy_target='fsdp': it has the bits of another trainer"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_options(
    options: dict[str, Any], said: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_SGLANG", "1")
    with pytest.raises(RefusedError, match=said):
        arguments(folders("qwen3"), **options)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("quantization", "fp8", r"quantization='fp8': .*give a checkpoint in bfloat16"),
        ("enable_lora", True, r"enable_lora=True: .*merge the adapter"),
        ("speculative_algorithm", "EAGLE", r"speculative_algorithm='EAGLE': its proposals"),
        ("enable_torch_compile", True, r"enable_torch_compile=True: compiled code"),
        ("enable_deterministic_inference", True, r"enable_deterministic_inference=True: samebits replaces"),
        ("pp_size", 2, r"pp_size=2"),
        ("moe_runner_backend", "flashinfer_cutlass", r"moe_runner_backend='flashinfer_cutlass': it lays out"),
        ("moe_a2a_backend", "deepep", r"moe_a2a_backend='deepep': sums over GPUs"),
        ("enable_fused_qk_norm_rope", True, r"enable_fused_qk_norm_rope=True: it rounds elsewhere"),
        ("disaggregation_mode", "prefill", r"disaggregation_mode='prefill'"),
    ],
)
def test_arguments(name: str, value: Any, said: str, folders: Callable[[str], Path]) -> None:
    """As SGLang has resolved them."""
    from samebits.sglang.covered import check_arguments

    args = arguments(folders("qwen3"))
    check_arguments(args)
    object.__setattr__(args, name, value)
    with pytest.raises(RefusedError, match=said):
        check_arguments(args)


def test_every_argument_is_one_of_sglangs() -> None:
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    from samebits.sglang.covered import _ARGUMENTS

    assert _ARGUMENTS.keys() - {field.name for field in dataclasses.fields(ServerArgs)} == set()


def test_layers(start: Start) -> None:
    """Each is changed, refused by its name, and changed back."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.radix_attention import AttentionType

    from samebits.sglang.attention import SamebitsBackend
    from samebits.sglang.covered import check_model

    made = start("qwen3")
    runner = made.runner
    model, config = runner.model, runner.model_config.hf_text_config
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
        (attention, "attn_type", AttentionType.ENCODER_ONLY, r"self_attn.attn .*not a decoder's"),
        (attention, "k_scale", object(), r"self_attn.attn .*scaled"),
        (model, "__class__", type("GPT2LMHeadModel", (type(model),), {}), r"architecture GPT2LMHeadModel"),
    ]
    for of, name, value, said in changes:
        before = getattr(of, name)
        setattr(of, name, value)
        with pytest.raises(RefusedError, match=said):
            check_model(model, config)
        setattr(of, name, before)
    check_model(model, config)
    model.samebits_checked = False
    with pytest.raises(RefusedError, match="past the check"):
        SamebitsBackend(runner)
    model.samebits_checked = True
    pool = SimpleNamespace(kv_cache_layout="nhd", is_quantized_kv_cache=False)
    with pytest.raises(RefusedError, match="a cache of class SimpleNamespace"):
        SamebitsBackend(SimpleNamespace(model=model, token_to_kv_pool=pool, page_size=16))


def test_layers_of_another_model(start: Start) -> None:
    """Each is changed, refused with what ``transformers`` has, and changed back."""
    from samebits.engines.trainer import TrainerModel
    from samebits.sglang.covered import check_against

    runner = start("qwen3").runner
    model, trainer = runner.model, TrainerModel(runner.model_config.hf_text_config)
    layer = model.model.layers[1]
    own = layer.self_attn.attn
    changes: list[tuple[Any, str, Any, str]] = [
        (own, "tp_q_head_num", 2, r"layers.1.self_attn.attn .*: heads is 2, and in transformers 4"),
        (own, "tp_k_head_num", 1, r"layers.1.self_attn.attn .*: kv_heads is 1, and in transformers 2"),
        (own, "head_dim", 64, r"layers.1.self_attn.attn .*: size is 64, and in transformers 32"),
        (own, "sliding_window_size", 7, r"layers.1.self_attn.attn .*: window is 8, and in transformers None"),
        (own, "scaling", 0.5, r"layers.1.self_attn.attn .*: scale is 0.5, and in transformers 0.17"),
        (own, "logit_cap", 5.0, r"layers.1.self_attn.attn .*: softcap is 5.0, and in transformers 0.0"),
        (layer.self_attn.q_norm, "variance_epsilon", 1e-3, r"layers.1.self_attn.q_norm .*: eps is 0.001"),
        (trainer, "biases", {(1, "down_proj"): {True}}, r"layers.1.mlp.down_proj .*: bias is False, and in"),
        (trainer, "tied", True, r"the head: tie_word_embeddings is False, and in transformers True"),
        (trainer, "attention", {}, r"layers.0.self_attn.attn .*: its attention is there, and in .* nowhere"),
    ]
    for of, name, value, said in changes:
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(of, name, value)
            with pytest.raises(RefusedError, match=said):
                check_against(model, trainer, 128)
    check_against(model, trainer, 128)


def test_a_window_that_sglang_does_not_have(start: Start) -> None:
    """Its Llama, which runs Mistral, knows no window."""
    with pytest.raises(RefusedError, match=r"layers.0.self_attn.attn .*and in transformers 16.*length of 16"):
        start("mistral")


def test_experts(start: Start) -> None:
    import torch

    from samebits.sglang.covered import check_model
    from samebits.sglang.experts import set_experts

    runner = start("olmoe").runner
    model, config = runner.model, runner.model_config.hf_text_config
    experts = model.model.layers[1].mlp.experts
    own, experts.quant_method = experts.quant_method, type("Method", (torch.nn.Module,), {})()
    with pytest.raises(RefusedError, match=r"layers.1.mlp of class OlmoeMoE: Method computes its experts"):
        set_experts(model, config)
    experts.quant_method = own
    experts.w2_weight.data = experts.w2_weight.data[:-1]
    with pytest.raises(RefusedError, match=r"layers.1.mlp .*expected down_proj of \(8, 128, 192\)"):
        set_experts(model, config)
    config.clip_qkv = 8.0
    with pytest.raises(RefusedError, match=r"clip_qkv=8.0: SGLang's OlmoeForCausalLM does not look at it"):
        check_model(model, config)


def test_layers_without_experts_that_sglang_does_not_have(start: Start) -> None:
    """Its Qwen3-MoE has experts in every layer."""
    with pytest.raises(RefusedError, match=r"2 layers of experts: the model of transformers has 1"):
        start("qwen3_moe")


def test_uncovered_operators_are_errors(start: Start) -> None:
    """While the model runs, PyTorch's own order of a sum is no option."""
    import torch

    import samebits

    made = start("qwen3")
    mlp = made.runner.model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, out: out + torch.prod(out, -1, keepdim=True))
    with pytest.raises(samebits.UncoveredError, match="prod"):
        made.generate([[1, 2, 3]], new=1)


def test_log_probs_must_be_asked_for() -> None:
    from samebits.sglang.check import samples

    with pytest.raises(ValueError, match="expected log-probs"):
        samples([[1, 2]], [{"output_ids": [3], "meta_info": {}}])
