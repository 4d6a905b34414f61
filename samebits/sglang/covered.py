"""What of SGLang keeps a trainer's bits: lists of what was proven. Anything else is refused by name."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import nn

from samebits.engines.refusals import LATER, RefusedError, ignored
from samebits.engines.trainer import Attention, TrainerModel
from samebits.sglang.experts import replaced
from samebits.sglang.proven import NATIVE

__all__ = ["check_against", "check_arguments", "check_model"]

_LAYERS = {
    "activation": ("GeluAndMul", "SiluAndMul"),
    "layernorm": ("Gemma3RMSNorm", "GemmaRMSNorm", "RMSNorm"),
    "linear": (
        *("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"),
        *("ReplicatedLinear", "RowParallelLinear"),
    ),
    "logits_processor": ("LogitsProcessor",),
    "pooler": ("Pooler",),  # of embeddings, which are refused
    "radix_attention": ("RadixAttention",),
    "vocab_parallel_embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
}
"""Classes of ``sglang.srt.layers``, by module. Rotary layers are told by what they inherit."""

_KNOWN = {f"sglang.srt.layers.{m}.{name}" for m, names in _LAYERS.items() for name in names}

_ONE = "several engines of one GPU each sample as many tokens"
_ORDER = "sums over GPUs have another order"
_UNSET = "do not set it"

_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "quantization": (
        (None,),
        "quantised products have other bits than a 16-bit trainer's",
        "give a checkpoint in bfloat16, float16 or float32",
    ),
    "torchao_config": (("", None), "quantised products have other bits than a 16-bit trainer's", _UNSET),
    "kv_cache_dtype": (("auto",), "a trainer keeps keys and values in its dtype", "give 'auto'"),
    "enable_lora": (
        (None, False),
        "an adapter's products are added in another order than PEFT's",
        "merge the adapter on the trainer's side, and load the merged weights",
    ),
    "lora_paths": ((None, [], {}), "an adapter's products are added in another order than PEFT's", _UNSET),
    "speculative_algorithm": ((None,), "its proposals run in another model", LATER),
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "dcp_size"), ((1,), _ORDER, _ONE)),
    "moe_runner_backend": (("auto", "triton"), "it lays out weights of experts in another way", _UNSET),
    "moe_a2a_backend": (("none",), _ORDER, _UNSET),
    "init_expert_location": (("trivial",), "experts lie in another order then", _UNSET),
    "ep_num_redundant_experts": ((0,), "an expert is there twice then", _UNSET),
    "enable_eplb": ((False,), "experts move while it serves", _UNSET),
    "enable_fused_qk_norm_rope": ((False,), "it rounds elsewhere than transformers", _UNSET),
    "enable_torch_compile": ((False,), "compiled code has kernels of its own", _UNSET),
    "enable_deterministic_inference": ((False,), "samebits replaces the same operators", _UNSET),
    "rl_on_policy_target": ((None,), "it has the bits of another trainer", "give 'samebits'"),
    "disaggregation_mode": (("null",), "prefill and decoding in two engines are not tested", LATER),
    "enable_hierarchical_cache": ((False,), "its cache is not tested", LATER),
    "enable_two_batch_overlap": ((False,), "it cuts batches in two, which is not tested", LATER),
    "cpu_offload_gb": ((0, None), "weights that come and go are not tested", LATER),
    "dllm_algorithm": ((None,), "only causal models are covered", LATER),
    "enable_mis": ((False,), "items that are scored side by side are not covered", LATER),
    "is_embedding": ((False,), "only the log-probs of generated text are covered", LATER),
}
"""Arguments of SGLang: what is covered, why nothing else is, and what to do."""


def check_arguments(args: Any) -> None:
    """Refuse what a ``ServerArgs`` asks for and is not covered.

    Raises:
        RefusedError: it names the argument.
    """
    for name, (covered, reason, remedy) in _ARGUMENTS.items():
        value = getattr(args, name, covered[0])
        if value not in covered:
            raise RefusedError(f"{name}={value!r}", reason, remedy)


def check_model(model: nn.Module, config: Any) -> None:
    """Refuse a model with a layer that is not covered.

    Args:
        config: of the ``transformers`` model.

    Raises:
        RefusedError: it names the layer.
    """
    native = NATIVE.get(type(model).__name__)
    models = tuple(f"sglang.srt.models.{m}" for m in native or ())
    if type(model).__module__ not in models:
        raise RefusedError(
            f"the architecture {type(model).__name__}", f"these are covered: {', '.join(NATIVE)}", LATER
        )
    if getattr(config, "quantization_config", None):
        raise RefusedError("quantization_config", *_ARGUMENTS["quantization"][1:])
    option = ignored(type(model).__name__, config)
    if option is not None:
        raise RefusedError(option, f"SGLang's {type(model).__name__} does not look at it", LATER)
    unused = replaced(model)
    for name, layer in model.named_modules():
        if any(f"{name}.".startswith(f"{other}.") for other in unused):
            continue
        what = f"the layer {name or '(the model)'} of class {type(layer).__name__}"
        _check_class(what, layer, models)
        if isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            method = type(layer.quant_method)
            if method not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                raise RefusedError(
                    what, f"{method.__name__} computes its product", "load unquantised weights"
                )
            if isinstance(layer, VocabParallelEmbedding) and getattr(layer, "bias", None) is not None:
                raise RefusedError(what, "SGLang does not add its bias", LATER)
        if getattr(layer, "variance_size_override", None) is not None:
            raise RefusedError(what, "its norm is of a part of the row", LATER)
        if isinstance(layer, RadixAttention):
            _check_attention(what, layer)


def _check_class(what: str, layer: nn.Module, models: tuple[str, ...]) -> None:
    kind = type(layer)
    if isinstance(layer, RotaryEmbedding):
        forms = "forward", "forward_native", "forward_cuda"
        if any(getattr(kind, form) is not getattr(RotaryEmbedding, form) for form in forms):
            raise RefusedError(what, "it turns queries and keys in a way of its own", LATER)
        return
    own = kind.__module__ in (*models, "torch.nn.modules.container")
    if not own and f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
        raise RefusedError(what, "it is on no list of what was proven", LATER)


def _check_attention(what: str, layer: RadixAttention) -> None:
    kinds = AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL  # which is causal without images
    if layer.attn_type not in kinds or layer.is_cross_attention:
        raise RefusedError(what, "it is not a decoder's attention", LATER)
    if layer.use_irope or layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        raise RefusedError(what, "its scores depend on positions", LATER)
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise RefusedError(what, f"its scores are capped by {layer.logit_capping_method}", LATER)
    if layer.quant_method is not None or layer.k_scale is not None or layer.v_scale is not None:
        raise RefusedError(what, "its keys and values are scaled", "give kv_cache_dtype='auto'")


def check_against(model: nn.Module, trainer: TrainerModel, length: int) -> None:
    """Refuse a model that is another than the trainer's of the same configuration.

    Args:
        length: the longest sequence that the engine allows.

    Raises:
        RefusedError: it names the layer.
    """
    trainer.check(model, _attention, LinearBase, VocabParallelEmbedding, longest=length)


def _attention(layer: Any) -> Attention | None:
    if not isinstance(layer, RadixAttention):
        return None
    return Attention(
        heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        size=layer.head_dim,
        window=layer.sliding_window_size + 1 or None,
        scale=layer.scaling,
        softcap=layer.logit_cap or 0.0,
        sinks=False,
    )
