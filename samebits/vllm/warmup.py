"""Makes the kernels ready that a model will need, before vLLM captures graphs and serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from samebits.engines.kernels import grouped, grouped_in_fp8, make_ready, products, row_counts, sorts
from samebits.latent import queries_of_rows, values_of_rows
from samebits.vllm import fp8, recurrent
from samebits.vllm.attention import PagedAttention
from samebits.vllm.experts import experts_of, routers
from samebits.vllm.parallel import contract_of, of_layer, of_rank

__all__ = ["warm_up"]

_PROMPT_ROWS = 1024
"""Rows of a prompt whose log-probs vLLM computes at once."""


_KERNELS_OF_A_STEP = 6
"""Of a recurrent layer, at most: a call stops at the first that is not loaded."""


def warm_up(model: nn.Module, config: Any) -> None:
    """Compile and load the kernels of products and attention, for a model on a GPU.

    The first start compiles for a minute or so. Later ones find the kernels in the on-disk cache.
    """
    scheduler = config.scheduler_config
    tokens, sequences = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    layers: dict[tuple[Any, ...], list[Tensor]] = {}  # by dtypes, as routers may be in float32, and contracts
    in_fp8: dict[tuple[int, int], Callable[[Tensor], object]] = {}
    absorbed_weights = [m.kv_b_proj for m in model.modules() if isinstance(m, MLAAttention)]
    for m in model.modules():
        if isinstance(m, LinearBase) and (m.weight.ndim == 3 or m in absorbed_weights):  # 3: a convolution
            continue
        if isinstance(m, LinearBase) and m.weight.dtype.itemsize > 1:
            layers.setdefault((m.weight.dtype, *of_layer(m)), []).append(m.weight)
        elif isinstance(m, LinearBase):
            in_fp8[(m.weight.shape[0], m.weight.shape[1])] = partial(
                fp8.product, m.weight.data, m.weight_scale_inv.data
            )
    heads = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]  # one may be tied
    dense = [call for key, of in layers.items() for call in products(of, tokens, *key[1:])]
    rows, logits = max(sequences, _PROMPT_ROWS), config.model_config.head_dtype
    contract = of_layer(heads[0])[1] if logits == config.model_config.dtype else None
    make_ready(dense + products([m.weight for m in heads], rows, logits, contract))
    calls: list[Callable[[], object]] = []
    if in_fp8:
        x = torch.zeros(tokens * max(k for _, k in in_fp8), dtype=config.model_config.dtype, device="cuda")
        counts = row_counts(tokens)
        calls += [partial(f, x[: n * k].view(n, k)) for (_, k), f in in_fp8.items() for n in counts]
    experts: dict[tuple[Any, ...], list[Tensor]] = {}
    experts_in_fp8: list[tuple[Tensor, Tensor]] = []
    layers_of_experts = experts_of(model)
    slots = max((layer.moe_config.experts_per_token for layer in layers_of_experts), default=1)
    for layer in layers_of_experts:
        for name, ranks in (("w13_weight", 1), ("w2_weight", config.parallel_config.tensor_parallel_size)):
            weight = getattr(layer, name).data
            if weight.dtype.itemsize > 1:
                experts.setdefault(of_rank(contract_of(config), ranks), []).append(weight.mT)
            else:
                experts_in_fp8.append((weight, getattr(layer, f"{name}_scale_inv").data))
    make_ready([call for key, of in experts.items() for call in grouped(of, tokens, slots, *key)])
    calls += grouped_in_fp8(experts_in_fp8, tokens, slots, config.model_config.dtype)
    calls += sorts({len(layer.w13_weight) for layer in layers_of_experts}, tokens, slots)
    calls += _routers(model, config.model_config.dtype, tokens)
    for _ in range(2):  # a call stops at the first kernel that is not loaded, and has two
        make_ready(calls)
    make_ready([*_attention(model, config, tokens, sequences)])
    make_ready([*_of_heads(model, config.model_config.dtype, tokens)])
    steps = [*recurrent.steps(model, tokens, sequences)]
    for _ in range(_KERNELS_OF_A_STEP if steps else 0):
        make_ready(steps)


def _attention(model: nn.Module, config: Any, tokens: int, sequences: int) -> Iterator[Callable[[], object]]:
    """Calls of each kind of attention, for several numbers of tokens and sequences."""
    page, dtype = config.cache_config.block_size, config.model_config.dtype
    columns = -(-config.model_config.max_model_len // page)
    found = (getattr(m, "impl", None) for m in model.modules())
    layers = [own for own in found if isinstance(own, PagedAttention)]
    sizes = sorted({*(1 << i for i in range(tokens.bit_length())), tokens})
    for own in {layer.kind: layer for layer in layers}.values():
        k, v = own.new_page(page, dtype)
        for n in sizes:
            x = torch.zeros(n, own.num_heads, own.head_size, dtype=dtype, device="cuda")
            out = x.new_empty(n, own.num_heads, v.shape[-1])
            for batch in sorted({min(b, n, sequences) for b in (1, 8, 64, n)}):
                yield partial(own.attend, x, k, v, _step(n, batch, columns), out)


def _routers(model: nn.Module, dtype: torch.dtype, tokens: int) -> list[Callable[[], object]]:
    """Calls of each kind of fused router of ``transformers``, for all :func:`row_counts`."""
    kinds: dict[Any, Any] = {(type(r), r.weight.shape): r for r in routers(model)}
    calls: list[Callable[[], object]] = []
    for router in kinds.values():
        x = torch.zeros(tokens, router.weight.shape[1], dtype=dtype, device="cuda")
        calls += [partial(router, x[:n]) for n in row_counts(tokens)]
    return calls


def _of_heads(model: nn.Module, dtype: torch.dtype, tokens: int) -> Iterator[Callable[[], object]]:
    """Calls of the products around latent attention, by heads, for all :func:`row_counts`."""
    layers = [m for m in model.modules() if isinstance(m, MLAAttention)]
    if not layers:
        return
    own, weight = layers[0], layers[0].kv_b_proj.weight.data  # all layers are alike
    x = torch.zeros(tokens, own.num_heads, own.qk_head_dim, dtype=dtype, device="cuda")
    latent = torch.zeros(tokens, own.num_heads, own.kv_lora_rank, dtype=dtype, device="cuda")
    out = torch.empty(tokens, own.num_heads * own.v_head_dim, dtype=dtype, device="cuda")
    for n in row_counts(tokens):
        yield partial(queries_of_rows, x[:n], weight, own.qk_nope_head_dim)
        yield partial(values_of_rows, latent[:n], weight, own.qk_nope_head_dim, out[:n])


def _step(tokens: int, batch: int, columns: int) -> SimpleNamespace:
    """Metadata of a step in which so many sequences have `tokens` together. All use page 0."""
    starts = [i * tokens // batch for i in range(batch + 1)]
    lengths = [b - a for a, b in itertools.pairwise(starts)]

    def on_gpu(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return SimpleNamespace(
        num_actual_tokens=tokens,
        max_query_len=max(lengths),
        query_start_loc=on_gpu(starts),
        seq_lens=on_gpu(lengths),
        block_table=torch.zeros(batch, columns, dtype=torch.int32, device="cuda"),
    )
