"""``samebits.attention`` as SGLang's attention backend, over the pages of its cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt import server_args
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from samebits.engines.attention import paged
from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError

__all__ = ["NAME", "SamebitsBackend", "install"]

NAME = "samebits"


def install(hooks: Hooks) -> None:
    """Make SGLang know the backend by its name."""
    for name, parameters in (
        ("forward_decode", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
        ("forward_extend", ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
        ("init_forward_metadata", ("self", "forward_batch")),
        ("init_forward_metadata_out_graph", ("self", "forward_batch", "in_capture")),
        ("init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
        ("get_cuda_graph_seq_len_fill_value", ("self",)),
    ):
        hooks.expect(AttentionBackend, name, *parameters)
    hooks.expect(MHATokenToKVPool, "set_kv_buffer", "self", "layer", "loc_info", "cache_k", "cache_v")
    hooks.expect(attention_registry, "ATTENTION_BACKENDS")
    attention_registry.register_attention_backend(NAME)(SamebitsBackend)
    hooks.on_undo(lambda: attention_registry.ATTENTION_BACKENDS.pop(NAME))
    server_args.add_attention_backend_choices([NAME])
    hooks.on_undo(lambda: server_args.ATTENTION_BACKEND_CHOICES.remove(NAME))


@dataclass(frozen=True)
class _Step:
    """What the layers of one forward share.

    Attributes:
        starts: of the queries of each sequence; None while decoding.
        lengths: keys of each sequence.
        table: its pages.
    """

    starts: Tensor | None
    lengths: Tensor
    table: Tensor


class SamebitsBackend(AttentionBackend):
    """Extend and decode, eager and in CUDA graphs. No step waits for the GPU.

    Args:
        runner: SGLang's ``ModelRunner``.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not getattr(runner.model, "samebits_checked", False):
            raise RefusedError(
                "a model", "it was loaded past the check of its layers", "load it after enable()"
            )
        if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            raise RefusedError(
                f"a cache of class {type(pool).__name__}",
                "only one of whole tokens in the model's dtype is covered",
                "leave options of the cache at their defaults",
            )
        self.pool, self.page = pool, runner.page_size
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.step: _Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        b = forward_batch
        starts = None
        if not b.forward_mode.is_decode_or_idle():
            starts = torch.nn.functional.pad(torch.cumsum(b.extend_seq_lens, 0, dtype=torch.int32), (1, 0))
        self.step = _Step(starts, b.seq_lens.to(torch.int32), self._table(b))

    def _table(self, batch: Any) -> Tensor:
        """The pages of each sequence. What lies beyond its length is not read."""
        first = self.req_to_token[:, :: self.page].index_select(0, batch.req_pool_indices)
        return torch.div(first, self.page, rounding_mode="floor")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        columns = -(-self.req_to_token.shape[1] // self.page)
        new = self.req_to_token.new_zeros
        self.graphs = _Step(None, new(max_bs, dtype=torch.int32), new(max_bs, columns))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors that a graph of this size reads."""
        b = forward_batch
        if not b.forward_mode.is_decode_or_idle():
            raise RefusedError(
                f"a CUDA graph of {b.forward_mode.name}", "only decoding is covered", "disable it"
            )
        n = b.batch_size
        self.step = _Step(None, self.graphs.lengths[:n], self.graphs.table[:n])
        self.step.lengths.copy_(b.seq_lens[:n])
        self.step.table.copy_(self._table(b)[:n])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert self.step is not None
        if save_kv_cache:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        paged(
            *(query, self._pages(self.pool.get_key_buffer(layer.layer_id))),
            *(self._pages(self.pool.get_value_buffer(layer.layer_id)), out),
            starts=self.step.starts,
            lengths=self.step.lengths,
            table=self.step.table,
            left=layer.sliding_window_size,
            scale=layer.scaling,
            softcap=layer.logit_cap or 0.0,
            sinks=sinks,
        )
        return out.flatten(1)

    def _pages(self, buffer: Tensor) -> Tensor:
        """``[pages, page, heads, size]`` of ``[slots, heads, size]``."""
        whole = len(buffer) // self.page * self.page
        return buffer[:whole].view(-1, self.page, *buffer.shape[1:])
