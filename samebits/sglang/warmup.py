"""Makes the kernels ready that a model will need, before SGLang captures graphs and serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from samebits.engines.attention import paged
from samebits.engines.experts import routers_of
from samebits.engines.kernels import grouped, make_ready, products, sorts
from samebits.sglang.experts import blocks

__all__ = ["warm_up"]

_PROMPT_ROWS = 2048
"""Rows of prompts whose log-probs SGLang computes at once."""


def warm_up(model: nn.Module, runner: Any) -> None:
    """Compile and load the kernels of products and attention, for a model on a GPU.

    The first start compiles for a minute or so. Later ones find the kernels in the on-disk cache.

    Args:
        runner: SGLang's ``ModelRunner``.
    """
    args = runner.server_args
    chunk = args.chunked_prefill_size or 0
    tokens = chunk if chunk > 0 else args.max_prefill_tokens
    sequences = args.max_running_requests or 256
    layers = [m.weight for m in model.modules() if isinstance(m, LinearBase)]
    heads = [m.weight for m in model.modules() if isinstance(m, VocabParallelEmbedding)]  # one may be tied
    wide = torch.float32 if args.enable_fp32_lm_head else None
    make_ready(products(layers, tokens) + products(heads, max(sequences, _PROMPT_ROWS), wide))
    make_ready(_experts(model, tokens, runner.model_config.hf_text_config))
    make_ready([*_attention(model, runner, tokens, sequences)])


def _experts(model: nn.Module, tokens: int, config: Any) -> list[Callable[[], object]]:
    """Calls of all layers of experts."""
    found = [block for _, block in blocks(model)]
    if not found:
        return []
    weights = [getattr(b.experts, name).data.mT for b in found for name in ("w13_weight", "w2_weight")]
    routers = [getattr(b, name) for b in found for name in routers_of(b)]
    wide = [r.weight.data.float() for r in routers if not isinstance(r, LinearBase)]  # GLM's
    slots = config.num_experts_per_tok
    calls = sorts({len(w) for w in weights}, tokens, slots) + grouped(weights, tokens, slots)
    return calls + (products(wide, tokens) if wide else [])


def _attention(model: nn.Module, runner: Any, tokens: int, sequences: int) -> Iterator[Callable[[], object]]:
    """Calls of each kind of attention, for several numbers of tokens and sequences."""
    page, dtype = runner.server_args.page_size, runner.model_config.dtype
    columns = -(-runner.model_config.context_len // page)
    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    sizes = sorted({*(1 << i for i in range(tokens.bit_length())), tokens})
    for own in {_kind(layer): layer for layer in layers}.values():
        k, v = (
            torch.zeros(1, page, own.tp_k_head_num, size, dtype=dtype, device="cuda")
            for size in (own.qk_head_dim, own.v_head_dim)
        )
        for n in sizes:
            q, out = (
                torch.zeros(n, own.tp_q_head_num, size, dtype=dtype, device="cuda")
                for size in (own.qk_head_dim, own.v_head_dim)
            )
            for batch in sorted({min(b, n, sequences) for b in (1, 8, 64, n)}):
                step = _step(n, batch, columns)
                options = {"left": own.sliding_window_size, "scale": own.scaling}
                options["softcap"] = own.logit_cap or 0.0
                yield partial(paged, q, k, v, out, **step, **options)


def _kind(layer: RadixAttention) -> tuple[Any, ...]:
    """What its kernels depend on."""
    heads = layer.tp_q_head_num, layer.tp_k_head_num
    return *heads, layer.qk_head_dim, layer.v_head_dim, layer.sliding_window_size, bool(layer.logit_cap)


def _step(tokens: int, batch: int, columns: int) -> dict[str, Any]:
    """Metadata of a step in which so many sequences have `tokens` together. All use page 0."""
    starts = [i * tokens // batch for i in range(batch + 1)]

    def on_gpu(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return {
        "starts": None if batch == tokens else on_gpu(starts),
        "lengths": on_gpu([b - a for a, b in itertools.pairwise(starts)]),
        "table": torch.zeros(batch, columns, dtype=torch.int32, device="cuda"),
    }
