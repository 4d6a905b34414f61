"""The backend on a CPU: in place of CPU_ATTN."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from samebits.vllm.attention import PagedAttention, slots

__all__ = ["SamebitsCPUBackend"]


class SamebitsCPUImpl(PagedAttention, CPUAttentionBackendImpl):
    """The reference's attention, over a cache of ``[pages, keys or values, page, heads, size]``."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        for cache, new in zip(_pages(kv_cache), (key, value), strict=True):
            slots(cache, slot_mapping, new)

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
        if attn_metadata is None:  # warming up
            return output
        return self.attend(query, *_pages(kv_cache), attn_metadata, output)


def _pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache whose shape is ``[pages, heads, page, 2 * size]``."""
    pages, heads, page, both = cache.shape
    parts = cache.view(-1).view(pages, 2, page, heads, both // 2)
    return parts[:, 0], parts[:, 1]


class SamebitsCPUBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SamebitsCPUImpl]:
        return SamebitsCPUImpl
