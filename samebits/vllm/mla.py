"""Latent attention (MLA) in its absorbed form, as vLLM's backend on a CPU.

The layer is vLLM's Transformers backend's: its fuser hands the latent vectors of a token to ``MLAAttention``
unexpanded. Pages hold ``[latent, rotated]`` of each token, as vLLM has them. Prompts and decoding take one
form: that of :func:`samebits.latent.absorb`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from samebits.engines.hooks import Hooks
from samebits.latent import absorbed, expanded
from samebits.vllm.attention import PagedAttention, slots

__all__ = ["SamebitsMLABackend", "install"]


def install(hooks: Hooks) -> None:
    """Put the backend in the place of vLLM's own."""
    layer = mla_attention.MLAAttention
    names = ("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output")
    hooks.replace(layer, "forward_impl", _attend, *names)
    hooks.replace(layer, "process_weights_after_loading", _nothing, "self", "act_dtype")
    for name in ("CPU_MLA", "AMX_MLA"):
        backend = AttentionBackendEnum[name]
        register_backend(backend, f"{__name__}.SamebitsMLABackend")
        hooks.on_undo(backend.clear_override)


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
    by_head = absorbed(q[:tokens].transpose(0, 1), weight, size).transpose(0, 1)
    pages = kv_cache[:, :, None]
    values = pages[..., : self.kv_lora_rank]
    latent = by_head.new_empty(tokens, self.num_heads, self.kv_lora_rank)
    self.impl.attend(by_head, pages, values, attn_metadata, latent)
    heads = expanded(latent.transpose(0, 1), weight, size).transpose(0, 1)
    output[:tokens] = heads.reshape(tokens, -1)
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
        **of_mla: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.sliding_window = num_kv_heads, sliding_window
        self.alibi_slopes, self.sinks = None, None
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0.0
        self.attn_type, self.kv_sharing_target_layer_name = attn_type, kv_sharing_target_layer_name

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("samebits.vllm.mla: forward_impl of the layer computes attention")

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *more: Any
    ) -> None:
        if kv_cache.numel():
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
    _cudagraph_support = AttentionCGSupport.NEVER

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
        return "CPU_MLA"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_impl_cls() -> type[SamebitsMLAImpl]:
        return SamebitsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SamebitsMLABuilder]:
        return SamebitsMLABuilder
