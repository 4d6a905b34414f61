"""Layers of experts: blocks of ``transformers`` on an engine's weights.

How a token finds its experts differs by family: the softmax or sigmoid and its dtype, groups, ties, what is
renormalised and when. So that is not written again here. Each of an engine's blocks calls one of
``transformers`` that has no weights of its own. Its router is fused where that has the same bits
(:mod:`samebits.engines.routers`). Its products are :func:`samebits.grouped_mm`, or in block FP8
:func:`samebits.scaled_grouped_mm`. Nothing waits for the GPU, and CUDA graphs can take it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from samebits.contract import SCALE_BLOCK, Contract
from samebits.engines.refusals import RefusedError
from samebits.engines.routers import fuse_router
from samebits.nn import convert
from samebits.ops.gated import gated
from samebits.transformers import register

__all__ = [
    "ROUTERS",
    "SHARED",
    "bind_experts",
    "blocks_of_transformers",
    "replace_block",
    "routers_of",
    "without_weights",
]

ROUTERS = "gate", "router"
"""Names of routers in blocks of experts."""

SHARED = "shared_experts", "shared_expert"


def routers_of(block: nn.Module) -> list[str]:
    """The name of a block's router."""
    return [name for name in ROUTERS if hasattr(block, name)]


def without_weights(config: Any) -> Any:
    """The model of ``transformers``, which has what is no weight: structure, and code."""
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        return kind(config).eval()


def blocks_of_transformers(config: Any, in_fp8: list[bool], contract: Contract | None = None) -> list[Any]:
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
        left = {u.name: u.reason for u in convert(model, contract=contract).unconverted}
        for name in names:
            if reason := left.get(f"{name}.experts"):
                raise RefusedError(f"experts of {name} in segments", reason, "run it without segments")
    found = [model.get_submodule(name) for name in names]
    for block in found:
        block.experts.config = config
    return found


def bind_experts(
    what: str, own: Any, weights: Any, chosen: Callable[[Tensor], object], *, in_fp8: bool = False
) -> None:
    """Let experts of ``transformers`` compute with an engine's weights.

    Args:
        what: the layer, for errors.
        weights: has ``w13_weight`` and ``w2_weight``, ``[experts, N, K]``, with ``w13_bias`` or
            ``w13_weight_scale_inv`` where there are biases or scales.
        chosen: is told of the experts of each token, ``[tokens, k]``, before they compute.

    Raises:
        RefusedError: the experts are of another shape, or have no gate.
    """
    if not own.has_gate:
        raise RefusedError(what, "its experts have no gate", "run it without samebits")
    for name, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        parts = {"": "weight"} | ({"_bias": "bias"} if own.has_bias else {})
        parts |= {"_scale_inv": "weight_scale_inv"} if in_fp8 else {}
        for suffix, part in parts.items():
            value = getattr(weights, f"{theirs}_{part}")
            turned = own.is_transposed and part != "bias"
            _set(what, own, f"{name}{suffix}", value.mT if turned else value)
    activation = _activation(own)
    if activation is not None:
        own._apply_gate = activation
    own.forward = _telling(own, chosen)


def _telling(experts: Any, chosen: Callable[[Tensor], object]) -> Callable[..., Tensor]:
    """Its forward, after the engine was told which experts were chosen."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, *rest: Any) -> Tensor:
        chosen(top_k_index)
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


def replace_block(what: str, own: nn.Module, block: Any) -> None:
    """Let an engine's block do what one of ``transformers`` does, whose experts are bound.

    It takes ``[tokens, hidden]``, and looks at nothing else that the engine gives it.

    Raises:
        RefusedError: router or shared experts have no counterpart of the same shapes.
    """
    _bind_rest(what, own, block)

    def forward(hidden_states: Tensor, *unused: Any) -> Tensor:
        found = own(hidden_states[None])
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(hidden_states.shape)

    block.forward = forward
    block.samebits_block = [own]  # in a list, so that it is no module of the model


def _bind_rest(what: str, own: nn.Module, block: nn.Module) -> None:
    """The router and shared experts."""
    for name in ROUTERS:
        if hasattr(own, name):
            router = getattr(own, name)
            theirs = getattr(block, routers_of(block)[0])
            for key, _ in [*router.named_parameters(), *router.named_buffers()]:
                _set(what, router, key, getattr(theirs, key, None))
            fuse_router(router)
    for name in SHARED:
        if hasattr(own, name) and hasattr(block, name):
            shared = getattr(block, name)
            setattr(own, name, _Shared(shared))
            gate = getattr(shared, "expert_gate", None)
            if gate is not None:  # it is the block's here
                _set(what, cast(nn.Module, own.shared_expert_gate), "weight", gate.weight)
                shared.expert_gate = None
    left = [key for key, t in [*own.named_parameters(), *own.named_buffers()] if t.is_meta]
    if left:
        raise RefusedError(
            what, f"the engine has no counterpart of {', '.join(left)}", "run it without samebits"
        )


class _Shared(nn.Module):
    """An engine's dense layer, whose products of gate and factor are one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def _set(what: str, module: nn.Module, name: str, value: Any) -> None:
    """Let a parameter or buffer be in an engine's memory, into which it copies new weights, too.

    Scales that a module does not have yet suit any weight.
    """
    own = getattr(module, name, value)
    if value is None or value.shape != own.shape:
        found = "none" if value is None else f"one of {tuple(value.shape)}"
        raise RefusedError(
            what,
            f"expected {name} of {tuple(own.shape)}, and the engine has {found}",
            "run it without samebits",
        )
    if name in module._buffers:
        module._buffers[name] = value.data
    else:  # an engine's parameters may be of classes of its own, whose functions the mode does not see
        module._parameters[name] = nn.Parameter(value.data, requires_grad=False)
