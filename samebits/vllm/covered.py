"""What of vLLM keeps a trainer's bits: lists of what was proven. Anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from samebits.engines.refusals import LATER, RefusedError, ignored
from samebits.engines.trainer import Attention, TrainerModel
from samebits.vllm import fp8, lora, parallel
from samebits.vllm.attention import PagedAttention
from samebits.vllm.experts import replaced
from samebits.vllm.mla import SamebitsMLAImpl
from samebits.vllm.proven import HYBRIDS, NATIVE
from samebits.vllm.recurrent import LAYERS

__all__ = ["check_against", "check_config", "check_model"]

_LAYERS = {
    "activation": ("GeluAndMul", "SiluAndMul"),
    "attention.attention": ("Attention",),
    "attention.mla_attention": ("MLAAttention",),
    "layernorm": ("GemmaRMSNorm", "RMSNorm", "RMSNormGated"),
    "linear": (
        *("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"),
        *("ReplicatedLinear", "RowParallelLinear"),
    ),
    "logits_processor": ("LogitsProcessor",),
    "mamba.gdn.qwen_gdn_linear_attn": ("ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention"),
    "mamba.mamba_mixer2": ("MambaMixer2", "Mixer2RMSNormGated"),
    "rotary_embedding.common": ("ApplyRotaryEmb",),
    "vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
}
"""Classes of ``vllm.model_executor.layers``, by module. Rotary layers are told by what they inherit."""

_KNOWN = {f"vllm.model_executor.layers.{m}.{name}" for m, names in _LAYERS.items() for name in names}

_OTHERWISE = 'give model_impl="transformers"'

_PROPOSERS = "ngram", "draft_model"
"""Of speculative decoding. What they propose is judged by the model's own log-probs."""

_ODDITIES = {
    "ada_rms_norm_t_cond": "norms that depend on a condition",
    "dual_chunk_attention_config": "attention in two chunks",
    "llama_4_scaling": "queries that are scaled by their position",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Options of model configurations that change what a covered architecture computes."""


def check_config(config: Any) -> None:
    """Refuse what a ``VllmConfig`` asks for and is not covered.

    Raises:
        RefusedError: it names the option.
    """
    fp8.check_config(config)
    lora.check_config(config)
    parallel.check_config(config)
    for what, reason, remedy in _found(config):
        raise RefusedError(what, reason, remedy)


def _found(config: Any) -> Iterator[tuple[str, str, str]]:
    model = config.model_config
    speculative = config.speculative_config
    if envs.VLLM_BATCH_INVARIANT:
        yield "VLLM_BATCH_INVARIANT", "it gives the same operators vLLM's own bits", "unset it"
    if speculative is not None and speculative.method not in _PROPOSERS:
        only = f"proposals by {' or '.join(_PROPOSERS)} alone are covered"
        yield f"speculative_config of method {speculative.method!r}", only, "choose one of these"
    if speculative is not None and getattr(speculative, "rejection_sample_method", "standard") != "standard":
        yield "rejection_sample_method", "its tokens are not the target's", "do not set it"
    if speculative is not None and model.logprobs_mode.startswith("processed"):
        what = f"speculative_config with logprobs_mode={model.logprobs_mode!r}"
        yield what, "log-probs of the rejection sampler are not a trainer's", "ask for raw ones"
    if model.runner_type != "generate":
        yield f"runner={model.runner_type!r}", "only the log-probs of generated text are covered", LATER
    if model.is_multimodal_model:
        yield "a multimodal model", "images, audio and their encoders are not covered", LATER
    on_cpu = current_platform.is_cpu()
    if getattr(model.hf_text_config, "kv_lora_rank", None) and not (model.use_mla or on_cpu):
        hint = "set VLLM_MLA_DISABLE=0, and call samebits.latent.absorb(model) in the trainer"
        yield "MLA in its expanded form", "it has not been proven on a GPU", hint
    otherwise = "set VLLM_MLA_DISABLE=1" if on_cpu else LATER
    if model.use_mla and config.quant_config is not None:
        yield "MLA with quantized weights", "kv_b_proj is applied in 16 bits", otherwise
    if model.use_mla and config.lora_config is not None:
        yield "MLA with enable_lora", "adapters of kv_b_proj are not applied", otherwise
    yield from _found_of_states(config)
    if getattr(speculative, "method", None) == "draft_model":
        yield from _found_of_a_draft(speculative, config.attention_config.backend)
    if getattr(config, "watermark_config", None) is not None:
        yield "watermark_config", "it changes what tokens are sampled from", "do not set it"
    dtype = config.cache_config.cache_dtype
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"kv_cache_dtype={dtype!r}", "a trainer keeps keys and values in its dtype", "give 'auto'"
    head = getattr(model, "head_dtype", model.dtype)
    if head not in (model.dtype, torch.float32):
        yield f"head_dtype={head}", f"heads compute in {model.dtype} or torch.float32", "give one of these"
    for name, what in _ODDITIES.items():
        if getattr(model.hf_text_config, name, None):
            yield f"{name} in the model's configuration", f"{what} is not covered", LATER


def _found_of_a_draft(speculative: Any, backend: Any) -> Iterator[tuple[str, str, str]]:
    """Of the model that proposes tokens."""
    draft, otherwise = speculative.draft_model_config, "choose another draft model, or propose by n-grams"
    what = f"a draft model {draft.architecture}"
    if draft.architecture not in NATIVE:
        yield what, "it would run in a class of vLLM's that is not covered", otherwise
    if draft.is_hybrid:
        yield what, "its layers with a state are not covered", otherwise
    if draft.quantization is not None:
        yield f"{what} of quantization={draft.quantization!r}", "it is not covered", otherwise
    if speculative.attention_backend != backend:
        reason = f"the model has {backend}"
        yield f"attention_backend={speculative.attention_backend} of a draft model", reason, "do not set it"


def _found_of_states(config: Any) -> Iterator[tuple[str, str, str]]:
    """Of layers with a recurrent state."""
    model, cache = config.model_config, config.cache_config
    if not (model.is_hybrid or model.is_attention_free):
        return
    what = f"recurrent layers of {model.architecture}"
    if model.architecture not in NATIVE:
        yield what, f"of models with such layers these are covered: {', '.join(HYBRIDS)}", LATER
    if config.parallel_config.tensor_parallel_size > 1 or parallel.contract_of(config) is not None:
        yield f"several GPUs or segments with {what}", "they are not covered", "give one GPU, and no segments"
    if config.speculative_config is not None:
        reason = "a state cannot go back past proposals that are rejected"
        yield f"speculative_config with {what}", reason, "do not set it"
    if config.lora_config is not None:
        yield f"enable_lora with {what}", "their adapters are not covered", "merge the adapter"
    if model.quantization is not None:
        yield f"quantization={model.quantization!r} with {what}", "it is not covered", "do not set it"
    if cache.mamba_cache_mode not in ("none", "align"):
        reason = "states are kept at the ends of blocks alone"
        yield f"mamba_cache_mode={cache.mamba_cache_mode!r} with {what}", reason, "give 'align'"
    if getattr(cache, "use_replayssm", False):
        yield f"use_replayssm with {what}", "it decodes by another order of sums", "do not set it"


def check_model(model: nn.Module, config: Any) -> None:
    """Refuse a model with a layer that is not covered.

    Raises:
        RefusedError: it names the layer.
    """
    architecture = type(model).__name__
    native = NATIVE.get(architecture)
    models = "vllm.model_executor.models"
    if native is not None and type(model).__module__ in {f"{models}.{m}" for m in native}:
        origins = (*(f"{models}.{m}" for m in native), "torch.nn.modules.container")
        if said := ignored(architecture, config.model_config.hf_text_config):
            what, reason = f"{said} in the model's configuration", "vLLM's own class ignores it"
            raise RefusedError(what, reason, _OTHERWISE)
    elif f"{type(model).__module__}.".startswith(f"{models}.transformers."):
        origins = (f"{models}.transformers", "transformers", "torch.nn")
    else:
        raise RefusedError(
            f"the architecture {architecture}",
            f"of vLLM's own classes these are covered: {', '.join(NATIVE)}",
            _OTHERWISE,
        )
    fp8.check_experts(model, config.model_config)
    unused = *replaced(model), *_quantizers(model)
    for name, layer in model.named_modules():
        if any(f"{name}.".startswith(f"{other}.") for other in unused):
            continue
        what = f"the layer {name or '(the model)'} of class {type(layer).__name__}"
        _check_class(what, layer, origins)
        if isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            method = type(layer.quant_method)
            if method not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, *fp8.METHODS):
                reason = f"{method.__name__} computes its product"
                raise RefusedError(what, reason, "load unquantised weights")
        sinks = getattr(layer, "sinks", None)
        if sinks is not None and getattr(getattr(layer, "attn", layer).impl, "sinks", None) is None:
            raise RefusedError(what, "its attention does not know of its sinks", LATER)
        if getattr(layer, "variance_size_override", None) is not None:
            raise RefusedError(what, "its norm is of a part of the row", LATER)
        if hasattr(layer, "impl"):
            _check_attention(what, layer)
        if (hasattr(layer, "A_log") or isinstance(layer, nn.Conv1d)) and type(layer) not in LAYERS:
            raise RefusedError(what, "it has a state of its own, which vLLM does not keep", LATER)


def _quantizers(model: nn.Module) -> Iterator[str]:
    """Layers within those of latent attention that serve caches in FP8 alone."""
    for name, layer in model.named_modules():
        if type(layer).__name__ == "MLAAttention":
            yield from (f"{name}.{own}" for own in ("_decode_concat_quant_fp8_op", "_quant_fp8_op"))


def _check_class(what: str, layer: nn.Module, origins: tuple[str, ...]) -> None:
    kind = type(layer)
    module = kind.__module__
    if f"{module}.{kind.__qualname__}" in _KNOWN or isinstance(layer, RotaryEmbedding):
        if isinstance(layer, RotaryEmbedding) and kind.forward is not RotaryEmbedding.forward:
            raise RefusedError(what, "it turns queries and keys in a way of its own", LATER)
        return
    if not any(module == origin or module.startswith(f"{origin}.") for origin in origins):
        raise RefusedError(what, "it is on no list of what was proven", LATER)


def _check_attention(what: str, layer: Any) -> None:
    own = layer.impl
    if not isinstance(own, PagedAttention):
        raise RefusedError(what, f"{type(own).__name__} computes its attention", "do not choose a backend")
    if own.attn_type != AttentionType.DECODER:
        raise RefusedError(what, f"it is {own.attn_type} attention", LATER)
    if own.alibi_slopes is not None:
        raise RefusedError(what, "ALiBi's slopes are not covered", LATER)
    if own.kv_sharing_target_layer_name is not None:
        raise RefusedError(what, "it shares the keys of another layer", LATER)
    if own.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise RefusedError(what, f"its cache is {own.kv_cache_dtype}", "give kv_cache_dtype='auto'")
    own.checked = True


def check_against(model: nn.Module, trainer: TrainerModel, config: Any) -> None:
    """Refuse a model that is another than the trainer's of the same configuration.

    Args:
        config: a ``VllmConfig``.

    Raises:
        RefusedError: it names the layer.
    """
    trainer.check(
        *(model, _attention, LinearBase, VocabParallelEmbedding),
        longest=config.model_config.max_model_len,
        ranks=config.parallel_config.tensor_parallel_size,
        remedy=_OTHERWISE if type(model).__name__ in NATIVE else LATER,
    )


def _attention(layer: Any) -> Attention | None:
    own = getattr(layer, "impl", None)
    if not isinstance(own, PagedAttention):
        return None
    kv_heads, size = own.num_kv_heads, own.head_size
    if isinstance(own, SamebitsMLAImpl):  # which absorbs what makes keys of all heads
        kv_heads, size = own.num_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim
    return Attention(
        heads=own.num_heads,
        kv_heads=kv_heads,
        size=size,
        window=own.left + 1 or None,
        scale=own.scale,
        softcap=own.logits_soft_cap,
        sinks=own.sinks is not None,
    )
