"""Tiny random models of ``transformers`` whose norms and biases are not trivial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL = {
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
NO_HEAD: dict[str, Any] = {"head_dim": None}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}}),
    "qwen2": ("Qwen2", "Qwen2", NO_HEAD),
    "qwen3": ("Qwen3", "Qwen3", {}),
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
    "mixtral": ("Mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


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
    return model


def save(name: str, folder: Path, seed: int = 0) -> Path:
    build(name, seed).save_pretrained(folder)
    return folder
