"""Latent attention (MLA) in its absorbed form, as vLLM's backend.

The layer is vLLM's Transformers backend's: its fuser hands the latent vectors of a token to ``MLAAttention``
unexpanded, or :func:`instances` does, before 0.27. Pages hold ``[latent, rotated]`` of each token, as vLLM
has them. Prompts and decoding take one form: that of :func:`samebits.latent.absorb`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.latent import PROVEN, queries_of_rows, values_of_rows
from samebits.vllm.attention import NAME, PagedAttention, slots

__all__ = ["SamebitsMLABackend", "install", "instances"]

_ON_CPU = current_platform.is_cpu()
_FUNCTION = "samebits_mla"
"""The attention function of ``transformers``' layers, before 0.27."""
_PAGE = 64
"""Keys of a page on a GPU, unless the user says otherwise."""
_OTHERWISE = "set VLLM_MLA_DISABLE=1" if _ON_CPU else "run it without samebits; it is not covered yet"
"""What to do where this form is refused."""


def install(hooks: Hooks) -> None:
    """Put the backend in the place of vLLM's own."""
    layer = mla_attention.MLAAttention
    names = ("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output")
    hooks.replace(layer, "forward_impl", _attend, *names)
    hooks.replace(layer, "process_weights_after_loading", _nothing, "self", "act_dtype")
    ALL_ATTENTION_FUNCTIONS[_FUNCTION] = _hand_on
    hooks.on_undo(functools.partial(ALL_ATTENTION_FUNCTIONS.__delitem__, _FUNCTION))
    if _ON_CPU:
        for name in ("CPU_MLA", "AMX_MLA"):
            backend = AttentionBackendEnum[name]
            register_backend(backend, f"{__name__}.SamebitsMLABackend")
            hooks.on_undo(backend.clear_override)
        return
    asked = "head_size", "dtype", "kv_cache_dtype", "use_mla"
    hooks.replace(mla_attention, "get_attn_backend", _backend, *asked)
    hooks.replace(mla_attention, "get_mla_prefill_backend", _no_prefill, "vllm_config")


def _backend(*args: Any, use_sparse: bool = False, **named: Any) -> type[SamebitsMLABackend]:
    if use_sparse:
        raise RefusedError(
            "sparse latent attention", "its choice of keys is not covered", "choose a model without it"
        )
    return SamebitsMLABackend


def _no_prefill(vllm_config: Any) -> Any:
    """Prompts have no backend of their own."""
    return lambda **sizes: None


class _Unexpanded:
    """What :func:`instances` makes a layer's class inherit from."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return kv_nope, k_rot


@functools.cache
def _unexpanded(kind: Any) -> Any:
    """A subclass of the same name, by which others know layers. The trainer's class stays as it is."""
    given = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (_Unexpanded, kind), given)


def instances(backend: Any) -> dict[int, Any]:
    """Attention by layer, for a model of vLLM's Transformers backend, which expands keys before 0.27.

    From now on the layers of ``transformers`` hand their latent vectors on.
    """
    found: dict[int, Any] = {}
    for name, layer in backend.model.named_modules():
        if not (hasattr(layer, "kv_b_proj") and hasattr(layer, "kv_lora_rank")):
            continue
        kind = type(layer)
        if kind.__module__ not in PROVEN or not hasattr(layer, "expand_kv"):
            reason = "its latent attention is on no list of what was proven"
            raise RefusedError(f"the layer {name} of class {kind.__name__}", reason, _OTHERWISE)
        layer.__class__ = _unexpanded(kind)  # type: ignore[arg-type]
        layer.config._attn_implementation = _FUNCTION
        found[layer.layer_idx] = mla_attention.MLAAttention(
            num_heads=backend.model_config.get_num_attention_heads(backend.parallel_config),
            scale=layer.scaling,
            qk_nope_head_dim=layer.qk_nope_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
            q_lora_rank=layer.q_lora_rank,
            kv_lora_rank=layer.kv_lora_rank,
            kv_b_proj=layer.kv_b_proj,
            cache_config=backend.cache_config,
            quant_config=backend.quant_config,
            prefix=f"{layer.layer_idx}.attn",
        )
    if len(found) != backend.text_config.num_hidden_layers:
        reason = f"{len(found)} of {backend.text_config.num_hidden_layers} layers have latent attention"
        raise RefusedError("MLA", reason, _OTHERWISE)
    return found


def _hand_on(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    attention_mask: Any,
    attention_instances: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query[1, heads, tokens, size]`` and ``[1, 1, tokens, ...]`` of each token."""
    layer = attention_instances[module.layer_idx]
    q = query.transpose(1, 2).flatten(0, 1)
    parts = latent.flatten(0, 2), rotated.flatten(0, 2)[:, None]
    return layer(q, *parts, output_shape=torch.Size((len(q), layer.num_heads * layer.v_head_dim))), None


def _nothing(self: Any, act_dtype: torch.dtype) -> None:
    """vLLM would keep transposed copies of the weight, which new weights do not reach."""


def _attend(
    self: Any,
    q: Tensor,
    k_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    *more: Any,
    **named: Any,
) -> Tensor:
    """Attention of ``q[tokens, heads, size]`` over pages ``[pages, page, size]``, into `output`."""
    if attn_metadata is None:  # profiling
        return output.fill_(0)
    tokens, size, weight = attn_metadata.num_actual_tokens, self.qk_nope_head_dim, self.kv_b_proj.weight
    by_head = queries_of_rows(q[:tokens], weight, size)
    keys = kv_cache[:, :, None]
    values = keys[..., : self.kv_lora_rank]
    latent = by_head.new_empty(tokens, self.num_heads, self.kv_lora_rank)
    self.impl.attend(by_head, keys, values, attn_metadata, latent)
    values_of_rows(latent, weight, size, output[:tokens])
    return output


class SamebitsMLAImpl(PagedAttention, MLAAttentionImpl[Any]):
    """What a layer of vLLM's asks of its backend."""

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        kv_lora_rank: int,
        **of_mla: Any,
    ) -> None:
        self.value_size = kv_lora_rank
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.sliding_window = num_kv_heads, sliding_window
        self.alibi_slopes, self.sinks = None, None
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0.0
        self.attn_type, self.kv_sharing_target_layer_name = attn_type, kv_sharing_target_layer_name

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("samebits.vllm.mla: forward_impl of the layer computes attention")

    def new_page(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = torch.zeros(1, size, 1, self.head_size, dtype=dtype, device="cuda")
        return keys, keys[..., : self.value_size]

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *more: Any
    ) -> None:
        if not _ON_CPU:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *more)
        elif kv_cache.numel():
            new = torch.cat([kv_c_normed, k_pe.view(len(k_pe), -1)], -1)
            slots(kv_cache, slot_mapping.flatten(), new)


@dataclass
class Metadata:
    """What a step's attention reads of vLLM's metadata."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @property
    def num_decode_tokens(self) -> int:
        """All tokens take the form that vLLM gives those of decoding."""
        return self.num_actual_tokens


class SamebitsMLABuilder(AttentionMetadataBuilder[Metadata]):
    _cudagraph_support = AttentionCGSupport.NEVER if _ON_CPU else AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # which is abstract

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        m = common_attn_metadata
        return Metadata(
            *(m.num_actual_tokens, m.max_query_len, m.query_start_loc, m.seq_lens, m.block_table_tensor)
        )


class SamebitsMLABackend(mla_attention.MLACommonBackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_MLA" if _ON_CPU else NAME

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if _ON_CPU else _PAGE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_impl_cls() -> type[SamebitsMLAImpl]:
        return SamebitsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SamebitsMLABuilder]:
        return SamebitsMLABuilder
