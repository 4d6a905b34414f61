"""What single architectures need to be tiny, and which cannot be."""

from __future__ import annotations

from typing import Any

IN_FP8 = "-fp8"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"hidden_sizes": [32, 32, 64, 64], "num_groups": 8},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL],
        "num_hidden_layers": 2,
        "rope_parameters": {key: {"rope_type": "default", "rope_theta": 1e4} for key in (SLIDING, FULL)},
    },
    "cvt": {"embed_dim": [16, 32, 48], "depth": [1, 2, 3], "num_heads": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "convnextv2": {"image_size": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "esmc": {"num_key_value_heads": 4, "vocab_size": 128},
    "focalnet": {"embed_dim": 16},
    "funnel": {"block_sizes": [1, 1, 1], "d_head": 16, "d_inner": 96},
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "intermediate_size": 96,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 48},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", FULL], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mobilevitv2": {"image_size": 64},
    "musicgen": {".decoder": {"num_codebooks": 1}},
    "musicgen_melody": {".decoder": {"num_codebooks": 1}},
    "perceiver": {
        "num_latents": 32,
        "d_latents": 64,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "regnet": {"groups_width": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 4},
    "swiftformer": {"embed_dims": [16, 32, 48, 64]},
    "whisper": {"max_source_positions": 64},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "is_decoder": False},
    "swinv2": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 4},
    "deepseek_v3-fp8": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 160,
        "kv_lora_rank": 96,
        "q_lora_rank": 144,
        "initializer_range": 0.05,
    },
    "qwen3-fp8": {"hidden_size": 256, "intermediate_size": 416, "head_dim": 64, "initializer_range": 0.05},
    "zamba": {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4},
}
"""Fields of configurations. A name with a dot has those of a part."""

_TEXT = "its language model is {}_text"
_READS = "reads the caches of another model"
_TIMM = "needs the package timm"
UNBUILT: dict[str, str] = {
    "dinat": "needs the package natten",
    "dots3_note": _TEXT.format("dots3_note"),
    "encoder-decoder": "any two models",
    "gemma3n": _TIMM,
    "gemma4_assistant": _READS,
    "gemma4_unified_assistant": _READS,
    "llama4": _TEXT.format("llama4"),
    "qwen3_5": _TEXT.format("qwen3_5"),
    "qwen3_5_moe": _TEXT.format("qwen3_5_moe"),
    "qwen4_exp": _TEXT.format("qwen4_exp"),
    "shieldgemma2": "its language model is gemma3",
    "siglip2": "takes patches of pictures of several sizes",
    "voxtral_realtime": "takes audio with every token",
    "timm_wrapper": _TIMM,
    "blt": "sizes of its parts depend on each other",
    "nemo_speechlm": "sizes of its parts depend on each other",
    "vibevoice_asr": "its codecs of speech stay large",
}

NOT_APPLICABLE: dict[tuple[str, str], str] = {}

LORA = set("llama qwen3 gemma2 mistral gpt2 phi3 olmo2 gpt_oss mixtral bert t5 vit".split())  # noqa: SIM905
"""Architectures that are checked with adapters, too."""
