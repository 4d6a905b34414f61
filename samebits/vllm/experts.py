"""vLLM's layers of experts: they compute what ``samebits/engines/experts.py`` binds to their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

from samebits.contract import Contract
from samebits.engines.experts import SHARED, bind_experts, blocks_of_transformers, replace_block, routers_of
from samebits.engines.hooks import Hooks
from samebits.engines.layers import keep_weights
from samebits.engines.refusals import RefusedError
from samebits.engines.routers import fuse_router
from samebits.vllm import fp8
from samebits.vllm.parallel import split_experts

__all__ = ["blocks", "experts_of", "install", "replaced", "routers", "set_experts"]


def install(hooks: Hooks) -> None:
    """Leave the weights of experts as they were loaded: no kernel of vLLM's is made of them."""
    method = UnquantizedFusedMoEMethod
    hooks.replace(method, "process_weights_after_loading", keep_weights, "self", "layer")
    if hasattr(MoERunner, "maybe_init_modular_kernel"):  # up to vLLM 0.26, on several GPUs
        hooks.replace(MoERunner, "maybe_init_modular_kernel", lambda self: None, "self")


def blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Blocks of experts, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), MoERunner):
            yield name, module


def experts_of(model: nn.Module) -> list[RoutedExperts]:
    """What holds the weights ``w13_weight`` and ``w2_weight``, ``[experts, N, K]``, of all blocks."""
    return [_weights(block.experts) for _, block in blocks(model)]


def _weights(runner: MoERunner) -> RoutedExperts:
    (found,) = (m for m in runner.modules() if isinstance(m, RoutedExperts))
    return found


def replaced(model: nn.Module) -> set[str]:
    """Names of modules that do not run, as others do their work."""
    found = set()
    for name, block in blocks(model):
        found.add(f"{name}.experts")
        if not isinstance(block.experts, TransformersMoERunner):
            found.update(f"{name}.{router}" for router in routers_of(block))
    return found


def set_experts(model: nn.Module, config: Any, contract: Contract | None) -> None:
    """Let all blocks of experts compute what those of ``transformers`` do.

    Args:
        config: of ``transformers``, for the text model.
        contract: of products, if it has segments.

    Raises:
        RefusedError: a block has no counterpart whose weights have the same shapes.
    """
    found = [*blocks(model)]
    if not found:
        return
    methods = [type(_weights(block.experts).quant_method) for _, block in found]
    own = blocks_of_transformers(config, [method is fp8.EXPERTS[0] for method in methods], contract)
    for (name, block), by in zip(found, own, strict=True):
        what = f"the layer {name} of class {type(block).__name__}"
        _bind(what, by.experts, block.experts)
        if isinstance(block.experts, TransformersMoERunner):  # all else in the block is of transformers
            block.experts.forward = by.experts.forward
            for router in _own_routers(block):
                fuse_router(router)
        else:
            replace_block(what, by, block)
            _sum_shared(block)


def _own_routers(block: nn.Module) -> list[nn.Module]:
    """The router of a block, if it is that of ``transformers``."""
    found: list[nn.Module] = [getattr(block, name) for name in routers_of(block)]
    return [router for router in found if type(router).__module__.startswith("transformers.")]


def routers(model: nn.Module) -> list[nn.Module]:
    """Those of ``transformers`` in all blocks that are fused."""
    found = [router for _, block in blocks(model) for router in _own_routers(block)]
    return [router for router in found if "forward" in vars(router)]


def _bind(what: str, own: Any, runner: MoERunner) -> None:
    weights: Any = _weights(runner)
    method = type(weights.quant_method)
    if method not in (UnquantizedFusedMoEMethod, *fp8.EXPERTS):
        raise RefusedError(what, f"{method.__name__} computes its experts", "load unquantised weights")
    if getattr(weights, "expert_map", None) is not None:
        raise RefusedError(what, "its experts are not all here", "run it without samebits")

    ranks = weights.moe_config.moe_parallel_config.tp_size
    if ranks > 1:
        split_experts(what, own, ranks)

    def chosen(ids: Tensor) -> None:  # asked for by `enable_return_routed_experts`
        capture = getattr(runner.router, "capture_fn", None)
        if capture is not None:
            capture(ids)

    bind_experts(what, own, weights, chosen, in_fp8=method in fp8.EXPERTS)


def _sum_shared(block: nn.Module) -> None:
    """Let shared experts be summed over ranks by themselves, and not with the sum of experts."""
    for name in SHARED:
        for layer in getattr(block, name).modules() if getattr(block, name, None) is not None else ():
            if isinstance(layer, RowParallelLinear):
                layer.reduce_results = True
