"""Tiny random models of ``transformers`` whose norms and biases are not trivial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 319,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
MIXED = ["sliding_attention", "full_attention"]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128}
WIDE = {"head_dim": 64, "intermediate_size": 256}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
NO_HEAD: dict[str, Any] = {"head_dim": None}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}}),
    "qwen2": ("Qwen2", "Qwen2", NO_HEAD),
    "qwen3": ("Qwen3", "Qwen3", {}),
    "qwen3_wide": ("Qwen3", "Qwen3", WIDE),
    "mistral": ("Mistral", "Mistral", {"sliding_window": 16}),
    "gemma2": (
        *("Gemma2", "Gemma2"),
        {
            "sliding_window": 16,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        *("Gemma3", "Gemma3Text"),
        {
            "sliding_window": 16,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", "Phi3", NO_HEAD),
    "glm4": ("Glm4", "Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "granite": (
        *("Granite", "Granite"),
        NO_HEAD
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
        },
    ),
    "olmo2": ("Olmo2", "Olmo2", NO_HEAD),
    "starcoder2": ("Starcoder2", "Starcoder2", NO_HEAD),
    "mixtral": ("Mixtral", "Mixtral", MIXTRAL),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", {"norm_topk_prob": True, "mlp_only_layers": [0], **EXPERTS}),
    "qwen3_moe_sparse": ("Qwen3Moe", "Qwen3Moe", {"norm_topk_prob": True, **EXPERTS}),
    "qwen3_moe_wide": (
        *("Qwen3Moe", "Qwen3Moe"),
        {"norm_topk_prob": True, "mlp_only_layers": [0], **WIDE, **EXPERTS, "moe_intermediate_size": 128},
    ),
    "olmoe": (
        "Olmoe",
        "Olmoe",
        NO_HEAD | {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "granite_moe": (
        *("GraniteMoe", "GraniteMoe"),
        NO_HEAD
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.11,
        },
    ),
    "gpt_oss": (
        *("GptOss", "GptOss"),
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": MIXED,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "truncate": False, **YARN},
        },
    ),
    "glm4_moe": (
        *("Glm4Moe", "Glm4Moe"),
        {
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 64,
            **GROUPS,
        },
    ),
    "deepseek_v3": (
        *("DeepseekV3", "DeepseekV3"),
        NO_HEAD
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            **GROUPS,
        },
    ),
}
STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
MODELS["granite_hybrid"] = (
    *("GraniteMoeHybrid", "GraniteMoeHybrid"),
    MODELS["granite"][2] | STATES | {"num_local_experts": 0, "shared_intermediate_size": 192},
)
MODELS["falcon_h1"] = (*("FalconH1", "FalconH1"), {"mamba_d_ssm": 256, **STATES, "layer_types": None})
MODELS["qwen3_next"] = (
    *("Qwen3Next", "Qwen3Next"),
    {
        "head_dim": 64,
        "num_hidden_layers": 3,
        "layer_types": STATES["layer_types"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "partial_rotary_factor": 0.5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
)
MODELS["deepseek_v3_wide"] = (
    *MODELS["deepseek_v3"][:2],
    MODELS["deepseek_v3"][2]
    | {"q_lora_rank": 128, "kv_lora_rank": 128, "moe_intermediate_size": 128, "intermediate_size": 256},
)


def config(name: str) -> Any:
    import transformers

    _, kind, options = MODELS[name]
    given = {k: v for k, v in (SMALL | options).items() if v is not None}
    return getattr(transformers, f"{kind}Config")(**given)


def build(name: str, seed: int = 0) -> Any:
    """A model of ``MODELS``, in bfloat16."""
    import transformers

    torch.manual_seed(seed)
    with torch.random.fork_rng():
        model = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config(name)).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_((torch.randn(buffer.shape, generator=generator) * 0.1).to(buffer.dtype))
    return model


def save(name: str, folder: Path, seed: int = 0) -> Path:
    build(name, seed).save_pretrained(folder)
    return folder


TOKENS = [*sorted(chr(c) for c in range(33, 127)), *(f"<{i}>" for i in range(SMALL["vocab_size"] - 94))]


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, for what needs one."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(TOKENS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TOKENS[-1]).save_pretrained(folder)
