"""Layers of experts: blocks of ``transformers`` on vLLM's weights.

How a token finds its experts differs by family: the softmax or sigmoid and its dtype, groups, ties, what is
renormalised and when. So that is not written again here. Each of vLLM's blocks calls one of ``transformers``
that has no weights of its own. Its products are :func:`samebits.grouped_mm`, or in block FP8
:func:`samebits.scaled_grouped_mm`. Nothing waits for the GPU, and CUDA graphs can take it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

from samebits.contract import SCALE_BLOCK, Contract
from samebits.engines.hooks import Hooks
from samebits.engines.layers import keep_weights
from samebits.engines.refusals import RefusedError
from samebits.nn import convert
from samebits.ops.gated import gated
from samebits.transformers import register
from samebits.vllm import fp8
from samebits.vllm.parallel import split_experts

__all__ = ["blocks", "experts_of", "install", "replaced", "set_experts", "without_weights"]

_SHARED = "shared_experts", "shared_expert"


def install(hooks: Hooks) -> None:
    """Leave the weights of experts as they were loaded."""
    method = UnquantizedFusedMoEMethod
    hooks.replace(method, "process_weights_after_loading", keep_weights, "self", "layer")


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
            found.update(f"{name}.{router}" for router in fp8.ROUTERS if hasattr(block, router))
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
    own = _blocks_of_transformers(config, [method is fp8.EXPERTS[0] for method in methods], contract)
    for (name, block), by in zip(found, own, strict=True):
        what = f"the layer {name} of class {type(block).__name__}"
        _bind_experts(what, by.experts, block.experts)
        if isinstance(block.experts, TransformersMoERunner):  # all else in the block is of transformers
            block.experts.forward = by.experts.forward
        else:
            _bind_rest(what, by, block)
            block.forward = _in_rows(by)
            block.samebits_block = [by]  # in a list, so that it is no module of the model


def _in_rows(block: nn.Module) -> Callable[[Tensor], Tensor]:
    """A block for ``[tokens, hidden]``."""

    def forward(hidden_states: Tensor) -> Tensor:
        found = block(hidden_states[None])
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(hidden_states.shape)

    return forward


def without_weights(config: Any) -> Any:
    """The model of ``transformers``, which has what is no weight: structure, and code."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        return kind(config).eval()


def _blocks_of_transformers(config: Any, in_fp8: list[bool], contract: Contract | None) -> list[Any]:
    """The blocks of experts of a model without weights, in the order of its layers.

    Args:
        in_fp8: whether a checkpoint has the experts of a block in FP8.
        contract: of products, if a trainer gives one to ``samebits.convert``.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    register()
    config = copy.deepcopy(config)
    config._experts_implementation = "samebits"
    model = without_weights(config)
    names = [n for n, m in model.named_modules() if hasattr(getattr(m, "experts", None), "is_transposed")]
    if len(names) != len(in_fp8):
        raise RefusedError(
            f"{len(in_fp8)} layers of experts",
            f"the model of transformers has {len(names)} whose experts can be given weights",
            "update transformers to a version whose experts are in one tensor",
        )
    if any(in_fp8):
        others = [f"{name}.experts" for name, is_fp8 in zip(names, in_fp8, strict=True) if not is_fp8]
        block = (SCALE_BLOCK, SCALE_BLOCK)
        replace_with_fp8_linear(model, others, FineGrainedFP8Config(weight_block_size=block))
    if contract is not None:
        convert(model, contract=contract)
    found = [model.get_submodule(name) for name in names]
    for block in found:
        block.experts.config = config
    return found


def _bind_experts(what: str, own: Any, runner: MoERunner) -> None:
    weights: Any = _weights(runner)
    method = type(weights.quant_method)
    if method not in (UnquantizedFusedMoEMethod, *fp8.EXPERTS):
        raise RefusedError(what, f"{method.__name__} computes its experts", "load unquantised weights")
    if not own.has_gate or getattr(weights, "expert_map", None) is not None:
        raise RefusedError(what, "its experts have no gate, or are not all here", "run it without samebits")
    ranks = weights.moe_config.moe_parallel_config.tp_size
    if ranks > 1:
        split_experts(what, own, ranks)
    for name, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        parts = {"": "weight"} | ({"_bias": "bias"} if own.has_bias else {})
        parts |= {"_scale_inv": "weight_scale_inv"} if method in fp8.EXPERTS else {}
        for suffix, part in parts.items():
            value = getattr(weights, f"{theirs}_{part}")
            turned = own.is_transposed and part != "bias"
            _set(what, own, f"{name}{suffix}", value.mT if turned else value)
    activation = _activation(own)
    if activation is not None:
        own._apply_gate = activation
    own.forward = _telling(own, runner.router)


def _telling(experts: Any, router: Any) -> Callable[..., Tensor]:
    """Its forward, after vLLM was told which experts were chosen (``enable_return_routed_experts``)."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, *rest: Any) -> Tensor:
        capture = getattr(router, "capture_fn", None)
        if capture is not None:
            capture(top_k_index)
        out: Tensor = type(experts).forward(experts, hidden_states, top_k_index, *rest)
        return out

    return forward


def _activation(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """The gated activation in one kernel, with the same bits. None: as it is."""
    from transformers.integrations.moe import _default_apply_gate

    of: dict[str, Any] = {"interleaved": not experts.is_concatenated}
    if type(experts)._apply_gate is _default_apply_gate or _is_plain_in_fp8(experts):
        if not isinstance(experts.act_fn, nn.SiLU) and type(experts.act_fn).__name__ != "SiLUActivation":
            return None
        of["activation"] = "silu"
    elif type(experts).__name__ == "GptOssExperts":
        of |= {"activation": "gpt_oss", "limit": experts.limit, "alpha": experts.alpha}
    else:
        return None
    return lambda x: gated(x, **of)


_OPTIONS = {"gate_softcap", "limit", "swiglu_alpha"}
_KNOWN = _OPTIONS | {"act_fn", "chunk", "clamp", "dtype", "float", "sigmoid", "swiglu_limit", "tanh", "to"}
_KNOWN |= {"torch", "up_softcap"}
"""Names in ``FP8Experts._apply_gate``. Without these options it is the product of ``act_fn(gate)`` and up."""


def _is_plain_in_fp8(experts: Any) -> bool:
    names = {*type(experts)._apply_gate.__code__.co_names}
    known = type(experts).__name__ == "FP8Experts" and names <= _KNOWN
    return known and all(getattr(experts, option, None) is None for option in _OPTIONS)


def _bind_rest(what: str, own: nn.Module, block: nn.Module) -> None:
    """The router and shared experts."""
    for name in fp8.ROUTERS:
        if hasattr(own, name):
            router = getattr(own, name)
            theirs = next(getattr(block, n) for n in fp8.ROUTERS if hasattr(block, n))
            for key, _ in [*router.named_parameters(), *router.named_buffers()]:
                _set(what, router, key, getattr(theirs, key, None))
    for name in _SHARED:
        if hasattr(own, name) and hasattr(block, name):
            shared = getattr(block, name)
            setattr(own, name, _Shared(shared))
            for layer in shared.modules():
                if isinstance(layer, RowParallelLinear):
                    layer.reduce_results = True  # and not with the sum of experts
            gate = getattr(shared, "expert_gate", None)
            if gate is not None:  # it is the block's here
                _set(what, cast(nn.Module, own.shared_expert_gate), "weight", gate.weight)
                shared.expert_gate = None
    left = [key for key, t in [*own.named_parameters(), *own.named_buffers()] if t.is_meta]
    if left:
        raise RefusedError(what, f"vLLM has no counterpart of {', '.join(left)}", "run it without samebits")


class _Shared(nn.Module):
    """vLLM's dense layer, whose products of gate and factor are one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def _set(what: str, module: nn.Module, name: str, value: Any) -> None:
    """Let a parameter or buffer be in vLLM's memory, into which it copies new weights, too.

    Scales that a module does not have yet suit any weight.
    """
    own = getattr(module, name, value)
    if value is None or value.shape != own.shape:
        found = "none" if value is None else f"one of {tuple(value.shape)}"
        raise RefusedError(
            what, f"expected {name} of {tuple(own.shape)}, and vLLM has {found}", "run it without samebits"
        )
    if name in module._buffers:
        module._buffers[name] = value.data
    else:  # vLLM's parameters are of classes of its own, whose functions the mode does not see
        module._parameters[name] = nn.Parameter(value.data, requires_grad=False)
