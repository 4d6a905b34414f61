"""The backend on a GPU: FlashAttention's cache, metadata and cache writes, with our attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from samebits.engines.refusals import RefusedError
from samebits.vllm.attention import NAME, PagedAttention

__all__ = ["SamebitsBackend"]


class SamebitsImpl(PagedAttention, FlashAttentionImpl):
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        # The cache has the shape [pages, heads, page, 2 * size], and lies as [pages, page, heads, 2 * size].
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return self.attend(query, k, v, attn_metadata, output)


class SamebitsMetadataBuilder(FlashAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # of FlashAttention's kernel

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """In a larger graph, the last of the sequences that only pad a step has all of its padding.

        Sequences of one query each need no starts: see :meth:`PagedAttention.attend`.
        """
        x = common_attn_metadata
        starts, one_each = x.query_start_loc_cpu, x.max_query_len == 1 and x.num_reqs == x.num_actual_tokens
        if not one_each and starts[-1] < x.num_actual_tokens:
            if starts[-2] < starts[-1]:
                raise RefusedError(
                    f"cudagraph_mode with {x.num_reqs} sequences in a graph of as many",
                    "the last one would have the padding's queries",
                    "give FULL_DECODE_ONLY",
                )
            x.query_start_loc[-1:].fill_(x.num_actual_tokens)
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class SamebitsBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[SamebitsImpl]:
        return SamebitsImpl

    @staticmethod
    def get_builder_cls() -> type[SamebitsMetadataBuilder]:
        return SamebitsMetadataBuilder
