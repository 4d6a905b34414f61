"""Tiny random models of the architectures of `transformers`: which there are, and their configurations.

A configuration is the default one with fewer and smaller layers. Fields are known by their names
(:data:`SIZES`). Of lists with an entry for each layer, such as ``layer_types``, the first entry of each kind
is kept. :data:`OVERRIDES` has the fields of those that need other numbers. A name that ends in :data:`IN_FP8`
is that of a model in block FP8.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
import zlib
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from benchmarks.zoo.fp8 import in_fp8
from benchmarks.zoo.overrides import IN_FP8, OVERRIDES, UNBUILT

VOCABULARY, POSITIONS, WINDOW, PICTURE = 128, 512, 48, 32
WORDS = (8, 96)  # tokens of inputs; the others are special ones
TAIL = 100  # special tokens of models that have more than padding, begin and end
MOST_LAYERS = 6

KINDS: dict[str, dict[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    | {"whisper": "WhisperForConditionalGeneration"},
    "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
"""The classes of each kind of model. An architecture counts once, as the first kind that has it."""

# Architectures whose causal class is an encoder's or an encoder-decoder's by the way.
ENCODERS = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
PAIRS = set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) | {"whisper"}

SIZES: dict[str, int] = {
    name: size
    for size, names in {
        64: """
            hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim dim text_embed_dim
            input_embedding_size output_embedding_size encoder_hidden_size decoder_hidden_size emb_dim
            lru_width lm_head_hidden_size pooler_hidden_size linear_hidden_size
        """,
        96: """
            intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff moe_intermediate_size
            shared_expert_intermediate_size shared_intermediate_size mlp_dim ffn_hidden_size feed_forward_size
            dense_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size block_ff_dim
            intermediate_size_mlp hidden_dim moe_shared_intermediate_size
        """,
        4: """
            num_attention_heads n_head encoder_attention_heads decoder_attention_heads num_heads n_heads
            num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads
            num_swa_attention_heads swa_num_attention_heads
            num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num
        """,
        2: """
            num_key_value_heads num_kv_heads num_swa_key_value_heads swa_num_key_value_heads
            linear_num_key_heads num_experts_per_tok top_k moe_topk moe_k moe_top_k experts_per_token
            num_selected_experts num_experts_per_token
        """,
        16: """
            head_dim d_kv qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank o_lora_rank attention_head_size
            linear_key_head_dim linear_value_head_dim state_size mamba_d_state ssm_state_size kv_channels
            swa_head_dim swa_v_head_dim global_head_dim index_head_dim hidden_size_per_layer_input
        """,
        8: "qk_rope_head_dim rotary_dim",
        POSITIONS: """
            max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_seq_length
            max_source_positions max_target_positions max_encoder_position_embeddings
            max_decoder_position_embeddings original_max_position_embeddings
        """,
        WINDOW: """
            sliding_window attention_window_size attention_chunk_size local_attention sliding_window_size
            swa_window_size
        """,
        1: """
            n_group topk_group num_expert_group num_expert_groups n_shared_experts num_shared_experts
            moe_num_shared_experts first_k_dense_replace
        """,
        PICTURE: "image_size chunk_size mamba_chunk_size",
    }.items()
    for name in names.split()
}
"""The size of a field with this name, at most."""
LAYERS = """num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers
    num_encoder_layers num_hidden_layers_per_block num_blocks""".split()  # noqa: SIM905
NEVER_NONE = {"num_key_value_heads": 2, "head_dim": 16}
_DROPPED = re.compile(r"dropout|drop_path|drop_rate|layerdrop|_pdrop|jitter")


def names(fp8: bool = False) -> list[tuple[str, str]]:
    """All architectures, with their kinds; or the models in FP8."""
    if fp8:
        return [(name, "causal") for name in OVERRIDES if name.endswith(IN_FP8)]
    found: dict[str, str] = {}
    for k, classes in KINDS.items():
        for name in classes:
            found.setdefault(name, k)
    for name in found:
        if found[name] == "causal" and name in ENCODERS | PAIRS:
            found[name] = "encoder-decoder" if name in PAIRS else "encoder"
    kinds = list(KINDS)
    return sorted(found.items(), key=lambda pair: (kinds.index(pair[1]), pair[0]))


def configuration(name: str) -> PretrainedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = CONFIG_MAPPING[name.removesuffix(IN_FP8)]
        return _tiny(cls, OVERRIDES.get(name, {}))


def _tiny(
    cls: type[PretrainedConfig], overrides: dict[str, Any], config: PretrainedConfig | None = None
) -> PretrainedConfig:
    try:
        config = config or cls()
    except Exception:  # a default that needs a part of it
        return cls(**overrides)
    parts = {
        key: part
        for key, part in vars(config).items()
        if isinstance(part, PretrainedConfig) and key not in overrides
    }
    fields: dict[str, Any] = {
        key: _tiny(type(part), overrides.get("." + key, {}), part).to_dict() for key, part in parts.items()
    }
    data = {k: v for k, v in config.to_dict().items() if k not in parts}
    special = 0
    for key, value in data.items():
        if key in NEVER_NONE and value is None:
            fields[key] = NEVER_NONE[key]
        if isinstance(value, bool) or value is None or key in ("num_labels", "return_dict"):
            continue
        if _DROPPED.search(key) and isinstance(value, float):
            fields[key] = 0.0
        elif "vocab_size" in key and isinstance(value, int) and value > VOCABULARY:
            fields[key] = VOCABULARY
        elif key == "num_labels":
            fields[key] = 16
        elif key in ("initializer_range", "init_std") and isinstance(value, float):
            fields[key] = 0.1
        elif key == "depths" and isinstance(value, list):
            fields[key] = [1] * len(value)
        elif key == "hidden_sizes" and isinstance(value, list) and len(value) < 6:
            fields[key] = [16 * (i + 1) for i in range(len(value))]
        elif key in SIZES and isinstance(value, int) and value > SIZES[key]:
            fields[key] = SIZES[key]
        elif re.search(r"_(token_id|token_index|id)$", key) and _beyond(value):
            plain = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            special += key not in plain
            fields[key] = plain.get(key, TAIL + special)
    if "qk_rope_head_dim" in data:
        # Rotary positions are of a part of each head. Heads share one latent key, and have their own.
        fields["head_dim"] = SIZES["qk_rope_head_dim"]
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    fields |= _layers(data)
    fields |= {k: v for k, v in overrides.items() if not k.startswith(".")}
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", ()))
    return cls(**{k: v for k, v in fields.items() if k in known or k in parts or k in overrides})


def _beyond(value: Any) -> bool:
    return any(isinstance(v, int) and v >= TAIL for v in (value if isinstance(value, list) else [value]))


def _layers(data: dict[str, Any]) -> dict[str, Any]:
    """Fewer layers: one of each kind, at least two."""
    fields: dict[str, Any] = {}
    counts = {key: data[key] for key in LAYERS if isinstance(data.get(key), int)}
    for key, count in counts.items():
        lists = {
            k: v
            for k, v in data.items()
            if isinstance(v, list) and len(v) == count > 1 and not k.endswith("_id")
        }
        kinds: dict[str, int] = {}
        for i in range(count):
            kinds.setdefault(repr([v[i] for v in lists.values()]), i)
        kept = sorted(kinds.values())[:MOST_LAYERS] if lists else list(range(min(count, 4)))
        if len(kept) < 2:
            kept = list(range(min(2, count)))
        if not lists:
            kept = kept[:2]
        fields[key] = len(kept)
        fields |= {k: [v[i] for i in kept] for k, v in lists.items()}
    return fields


def model_class(name: str, kind: str) -> type[nn.Module]:
    name = name.removesuffix(IN_FP8)
    for classes in (KINDS[kind], *KINDS.values()):
        if name in classes:
            found = classes[name]
            return getattr(transformers, found if isinstance(found, str) else found[0])  # type: ignore[no-any-return]
    raise KeyError(name)


def build(name: str, kind: str, dtype: torch.dtype, device: str, fp8: bool) -> Any:
    """A model with random weights, loaded as by default: no two layers alike, none zero.

    Models in FP8 stay in `dtype` without `fp8`: PyTorch has no such products on a CPU.
    """
    if name in UNBUILT:
        raise ValueError(UNBUILT[name])
    config = configuration(name)
    cls: Any = model_class(name, kind)
    if not isinstance(config, cls.config_class):  # the class is that of a part
        config = config.get_text_config(decoder=True)
    torch.manual_seed(zlib.crc32(name.encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = cls._from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            if p.ndim < 2:
                p.add_(noise.to(p.dtype) * 0.05)
            else:
                p.add_(noise.to(p.dtype) * 0.5 / math.sqrt(p[0].numel()))
    model = model.to(dtype)
    if fp8 and name.endswith(IN_FP8):
        model = in_fp8(model)
    return model.to(device).eval()
