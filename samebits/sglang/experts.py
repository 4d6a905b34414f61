"""SGLang's layers of experts: they compute what ``samebits/engines/experts.py`` binds to their weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.state_capturer import routed_experts
from torch import Tensor, nn

from samebits.engines.experts import bind_experts, blocks_of_transformers, replace_block, routers_of
from samebits.engines.hooks import Hooks
from samebits.engines.layers import keep_weights
from samebits.engines.refusals import RefusedError

__all__ = ["blocks", "install", "replaced", "set_experts"]


def install(hooks: Hooks) -> None:
    """Leave the weights of experts as they were loaded."""
    method = UnquantizedFusedMoEMethod
    hooks.replace(method, "process_weights_after_loading", keep_weights, "self", "layer")
    hooks.expect(routed_experts, "get_global_experts_capturer")


def blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Blocks of experts, by name. Their ``experts`` have ``w13_weight`` and ``w2_weight[experts, N, K]``."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), FusedMoE):
            yield name, module


def replaced(model: nn.Module) -> set[str]:
    """Names of modules that do not run, as others do their work."""
    return {f"{name}.{part}" for name, b in blocks(model) for part in ("experts", "topk", *routers_of(b))}


def set_experts(model: nn.Module, config: Any) -> None:
    """Let all blocks of experts compute what those of ``transformers`` do.

    Args:
        config: of ``transformers``, for the text model.

    Raises:
        RefusedError: a block has no counterpart whose weights have the same shapes.
    """
    found = [*blocks(model)]
    if not found:
        return
    own = blocks_of_transformers(config, [False] * len(found))
    for (name, block), by in zip(found, own, strict=True):
        what = f"the layer {name} of class {type(block).__name__}"
        method = type(block.experts.quant_method)
        if method is not UnquantizedFusedMoEMethod:
            raise RefusedError(what, f"{method.__name__} computes its experts", "load unquantised weights")
        bind_experts(what, by.experts, block.experts, partial(_tell, block.experts.layer_id))
        replace_block(what, by, block)


def _tell(layer: int, ids: Tensor) -> None:
    """Let SGLang know of chosen experts, if it was asked for them (``enable_return_routed_experts``)."""
    capturer = routed_experts.get_global_experts_capturer()
    if capturer is not None:
        capturer.capture(layer_id=layer, topk_indices=ids)
