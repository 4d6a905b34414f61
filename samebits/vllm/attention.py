"""``samebits.attention`` as vLLM's attention backend.

Metadata, cache and graphs stay those of vLLM's own: FLASH_ATTN on a GPU, CPU_ATTN on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from samebits.engines.attention import paged
from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError

__all__ = ["NAME", "PagedAttention", "install", "slots"]

NAME = "CUSTOM"
"""Of the backend on a GPU. On a CPU vLLM takes no other than CPU_ATTN, whose class is replaced."""


def install(hooks: Hooks) -> None:
    """Make vLLM's registry of attention backends know ours."""
    if current_platform.is_cpu():
        backend, path = AttentionBackendEnum.CPU_ATTN, "samebits.vllm.attention_cpu.SamebitsCPUBackend"
    else:
        backend, path = AttentionBackendEnum.CUSTOM, "samebits.vllm.attention_cuda.SamebitsBackend"
    hooks.expect(selector, "_cached_get_attn_backend", "backend")
    register_backend(backend, path)
    hooks.on_undo(selector._cached_get_attn_backend.cache_clear)
    hooks.on_undo(backend.clear_override)
    selector._cached_get_attn_backend.cache_clear()  # another engine in this process may have filled it


class PagedAttention:
    """What our implementations share: the attention of a step, over the pages of the cache."""

    checked = False  # until loading.py has looked at the whole model
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    alibi_slopes: Tensor | None
    attn_type: str
    kv_cache_dtype: str
    kv_sharing_target_layer_name: str | None
    sinks: Tensor | None
    logits_soft_cap: float
    sliding_window: Any

    @property
    def left(self) -> int:
        """How many keys a query sees before its own; -1 for all."""
        window = self.sliding_window
        if isinstance(window, tuple):
            return int(window[0])
        return window - 1 if window and window > 0 else -1

    @property
    def kind(self) -> tuple[Any, ...]:
        """What its kernels depend on."""
        sizes = self.num_heads, self.num_kv_heads, self.head_size
        return *sizes, self.left, self.logits_soft_cap != 0, self.sinks is None

    def new_page(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of one page, as they lie in a cache on a GPU."""
        both = torch.zeros(1, size, self.num_kv_heads, 2 * self.head_size, dtype=dtype, device="cuda")
        keys, values = both.chunk(2, -1)
        return keys, values

    def attend(self, query: Tensor, k: Tensor, v: Tensor, metadata: Any, output: Tensor) -> Tensor:
        """Attention of ``query[tokens, heads, size]`` into the first rows of `output`.

        Args:
            k, v: pages ``[pages, page, heads, size]``.
            metadata: of FLASH_ATTN or CPU_ATTN.
        """
        if not self.checked:
            raise RefusedError(
                "a model", "it was loaded past the check of its layers", "load it by another load_format"
            )
        m, tokens = metadata, metadata.num_actual_tokens
        paged(
            *(query[:tokens], k, v, output[:tokens].view(tokens, query.shape[1], v.shape[-1])),
            starts=None if m.max_query_len == 1 and m.seq_lens.shape[0] == tokens else m.query_start_loc,
            lengths=m.seq_lens,
            table=m.block_table,
            left=self.left,
            scale=self.scale,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
        )
        return output


def slots(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Write ``new[tokens, heads, size]`` into slots of ``cache[pages, page, heads, size]``.

    A token whose slot is negative is padding.
    """
    used = slot_mapping >= 0
    at = slot_mapping[used]
    page = cache.shape[1]
    cache[torch.div(at, page, rounding_mode="floor"), at % page] = new[: len(used)][used]
