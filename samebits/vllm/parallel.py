"""Tensor parallelism: one set of bits at 1, 2, 4 and 8 ranks.

Sums are cut into segments (:meth:`samebits.Contract.segmented`), in the engine and in the trainer, and each
rank owns a subtree of them. Layers that split a sum are :mod:`samebits.distributed`'s. All else that ranks
exchange vLLM moves as it is: columns of outputs, and logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from samebits.contract import FMA, TENSOR_CORE, Contract
from samebits.distributed import ordered_all_reduce, row_parallel_linear, vocab_parallel_embedding
from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.ops.experts import Routed
from samebits.ops.grouped_mm import grouped_mm
from samebits.vllm.asked import segments_of

__all__ = ["check_config", "contract_of", "install", "of_layer", "of_rank", "set_contracts", "split_experts"]

_OTHERS = (
    *("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
    "data_parallel_size",
)
"""Sizes that stay 1. Each has its own order of sums, or was not tested."""

_SWITCHES = {
    "enable_expert_parallel": "ranks would add the results of experts in an order of their own",
    "enable_dbo": "exchanges of two half batches would run side by side",
    "enable_batch_sharded_sampling": "it was not tested",
    "enable_hc_sp": "sequence parallelism is not covered",
}
"""Options of ``ParallelConfig`` that stay off."""

_PASSES = {
    "enable_sp": "sequence parallelism of vLLM's compiler adds in an order of its own",
    "fuse_gemm_comms": "asynchronous tensor parallelism adds in an order of its own",
}
"""Options of ``PassConfig`` that stay off, up to vLLM 0.26."""


def install(hooks: Hooks) -> None:
    """Replace the layers that add over ranks."""
    for layer, forward in ((RowParallelLinear, _row_parallel), (VocabParallelEmbedding, _embedding)):
        hooks.replace(layer, "forward", forward(layer.forward), "self", "input_")


def check_config(config: Any) -> None:
    """Refuse ways to use several GPUs that have other bits.

    Raises:
        RefusedError: it names the option.
    """
    for what, reason, remedy in _found(config):
        raise RefusedError(what, reason, remedy)


def _found(config: Any) -> Iterator[tuple[str, str, str]]:
    parallel, passes, segments = (
        config.parallel_config,
        config.compilation_config.pass_config,
        segments_of(config),
    )
    for name in _OTHERS:
        if getattr(parallel, name, 1) > 1:
            remedy = f"give {name}=1; several engines sample as many tokens"
            yield f"{name}={getattr(parallel, name)}", "tensor parallelism alone is covered", remedy
    for options, named in ((parallel, _SWITCHES), (passes, _PASSES)):
        for name, reason in named.items():
            if getattr(options, name, None):
                yield name, reason, "do not set it"
    size = parallel.tensor_parallel_size
    if segments % size:
        reason = "sums over GPUs have another order"
        if segments > 1:
            reason = f"{segments} segments of a sum cannot be split so"
        remedy = (
            "cut sums into segments on both sides: samebits.vllm.options(segments=8), and"
            " samebits.convert(model, contract=samebits.TENSOR_CORE.segmented(8)) of the trainer's model"
        )
        yield f"tensor_parallel_size={size}", reason, remedy if segments == 1 else "give 1, 2, 4 or 8"
    if segments == 1:
        return
    what = f"segments={segments}"
    if config.quant_config is not None or config.model_config.quantization is not None:
        yield (
            f"{what} in FP8",
            "its sums have no segments",
            "run it in 16 bits, or on one GPU without segments",
        )
    if getattr(config.model_config.hf_text_config, "kv_lora_rank", None):
        yield f"{what} with MLA", "its products are not covered", "run it on one GPU without segments"
    if config.lora_config is not None:
        yield f"{what} with adapters", "their products are not covered", "merge the adapter"


def contract_of(config: Any) -> Contract | None:
    """The contract of a ``VllmConfig``'s products, if it cuts sums into segments."""
    segments, dtype = segments_of(config), config.model_config.dtype
    return None if segments == 1 else (FMA if dtype == torch.float32 else TENSOR_CORE).segmented(segments)


def set_contracts(model: nn.Module, config: Any) -> None:
    """Let linear layers and heads of a model that was loaded sum in segments, if the engine's shall.

    Raises:
        RefusedError: it names a layer that cannot.
    """
    contract = contract_of(config)
    if contract is None:
        return
    segments = contract.segments
    for name, layer in model.named_modules():
        if not isinstance(layer, (LinearBase, VocabParallelEmbedding)):
            continue
        what = f"the layer {name} of class {type(layer).__name__} with segments={segments}"
        split = layer.tp_size > 1
        if split and not getattr(layer, "reduce_results", True):
            raise RefusedError(what, "it leaves sums over ranks to another layer", _ALONE)
        if split and not getattr(layer, "input_is_parallel", True):
            raise RefusedError(what, "its input is not split, as where norms need all heads", _ALONE)
        if split and getattr(layer, "parallel_group", None) is not None:
            raise RefusedError(what, "it is split over ranks of its own", _ALONE)
        if isinstance(layer, VocabParallelEmbedding) and layer.num_embeddings != layer.org_vocab_size:
            raise RefusedError(what, "it has added words", _ALONE)
        terms = layer.weight.shape[1] * (layer.tp_size if isinstance(layer, RowParallelLinear) else 1)
        if terms % segments:
            raise RefusedError(what, f"{terms} terms of a sum are no multiple of them", _ALONE)
        if layer.weight.dtype in contract.input_dtypes:  # a router may be in float32
            layer.samebits_contract = contract


def split_experts(what: str, experts: Any, ranks: int) -> None:
    """Let a layer of experts of ``transformers`` without weights have those of a rank, and add over ranks.

    Raises:
        RefusedError: `what` has biases.
    """
    if experts.has_bias:
        reason = "its experts have biases, which vLLM keeps on one rank"
        raise RefusedError(what, reason, "give tensor_parallel_size=1")
    for name, cut in (("gate_up_proj", -2), ("down_proj", -1)):
        part = experts._parameters[name].chunk(ranks, -3 - cut if experts.is_transposed else cut)[0]
        experts._parameters[name] = nn.Parameter(part, requires_grad=False)
    dtype, contract = of_rank(experts.samebits_contract, ranks)

    def split_down(x: Tensor, to: Routed) -> Tensor:
        weight = experts.down_proj if experts.is_transposed else experts.down_proj.mT
        partial = grouped_mm(x, weight, to.ends, out_dtype=dtype, contract=contract)
        return ordered_all_reduce(partial, get_tp_group().device_group, out_dtype=x.dtype)

    experts.samebits_split_down = split_down


def of_rank(contract: Contract | None, ranks: int) -> tuple[torch.dtype | None, Contract | None]:
    """The dtype and the contract of a rank's part of products. None are those of a product alone."""
    if contract is None or ranks == 1:
        return None, contract
    return torch.float32, contract.segmented(contract.segments // ranks)


def of_layer(layer: Any) -> tuple[torch.dtype | None, Contract | None]:
    """:func:`of_rank` of a layer's product."""
    ranks = layer.tp_size if isinstance(layer, RowParallelLinear) else 1
    return of_rank(vars(layer).get("samebits_contract"), ranks)


_ALONE = "run it on one GPU without segments"


def _row_parallel(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, input_: Tensor) -> Any:
        if self.tp_size == 1:
            return own(self, input_)
        bias = None if self.skip_bias_add else self.bias
        group = get_tp_group().device_group
        out = row_parallel_linear(input_, self.weight, bias, group, contract=self.samebits_contract)
        if not self.return_bias:
            return out
        return out, self.bias if self.skip_bias_add else None

    return forward


def _embedding(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, with rows moved as they are: a sum with zeros makes -0 to +0."""

    @functools.wraps(own)
    def forward(self: Any, input_: Tensor) -> Tensor:
        if self.tp_size == 1:
            return own(self, input_)
        return vocab_parallel_embedding(input_, self.weight, get_tp_group().device_group)

    return forward
