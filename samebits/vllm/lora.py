"""Adapters (LoRA), several in a batch: the products and rounding points of PEFT, unmerged.

``y + B(A(x)) * scaling``, each step rounded to the dtype of the adapter, which is the model's. vLLM would put
the scaling into ``B``. Here it stays apart. Tokens are sorted by adapter once in a forward, and products are
:func:`samebits.grouped_mm`, so no token's bits depend on the adapters beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.lora import lora_weights
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from samebits.engines import kernels
from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.ops.experts import Routed, combined, routed
from samebits.ops.grouped_mm import grouped_mm

__all__ = ["begin_forward", "check_config", "install"]

_LAYERS = (
    *("ColumnParallelLinearWithLoRA", "MergedColumnParallelLinearWithLoRA", "QKVParallelLinearWithLoRA"),
    *("MergedQKVParallelLinearWithLoRA", "ReplicatedLinearWithLoRA", "RowParallelLinearWithLoRA"),
)
"""Those that add an adapter's product to a linear layer's."""


class _Step:
    """Of one forward.

    Attributes:
        routed: tokens in the order of their adapters, by wrapper and number of tokens.
    """

    routed: dict[tuple[int, int], Routed] = {}  # noqa: RUF012


def begin_forward() -> None:
    """Forget which token has which adapter."""
    _Step.routed = {}


def check_config(config: Any) -> None:
    """Refuse what adapters cannot be combined with.

    Raises:
        RefusedError: it names the option.
    """
    from vllm import envs

    lora, model = config.lora_config, config.model_config
    if lora is None:
        return
    if model.is_moe:
        raise RefusedError(
            "enable_lora with a mixture of experts",
            "adapters of experts and routers are not covered",
            "merge the adapter on the trainer's side, and load the merged weights",
        )
    if lora.lora_dtype != model.dtype:
        raise RefusedError(
            f"lora_dtype={lora.lora_dtype}",
            f"the model is in {model.dtype}",
            "do not set it, and give PEFT autocast_adapter_dtype=False",
        )
    if getattr(envs, "VLLM_LORA_ENABLE_DUAL_STREAM", False):
        raise RefusedError("VLLM_LORA_ENABLE_DUAL_STREAM", "it adds in another place", "do not set it")


def install(hooks: Hooks) -> None:
    """Replace what adapters compute, and keep their scaling apart."""
    punica = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    linear = "self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"
    hooks.replace(punica, "add_lora_linear", _add_linear, *linear)
    for name in ("add_lora_embedding", "add_lora_logits"):  # no adapter that has such weights is active
        hooks.replace(punica, name, _leave, "self", "y", "x")
    for weights in (lora_weights.LoRALayerWeights, lora_weights.PackedLoRALayerWeights):
        hooks.replace(weights, "optimize", _unscaled, "self")
    load = LoRAModel.from_lora_tensors.__func__
    hooks.replace(
        LoRAModel, "from_lora_tensors", classmethod(_with_scaling(load)), "lora_model_id", "tensors"
    )
    activate = LoRAModelManager.activate_adapter
    hooks.replace(LoRAModelManager, "activate_adapter", _activate(activate), "self", "lora_id")
    hooks.on_undo(begin_forward)


def _unscaled(self: Any) -> Any:
    return self


def _leave(self: Any, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return y


def _with_scaling(own: Callable[..., Any]) -> Callable[..., Any]:
    def from_lora_tensors(
        cls: type, lora_model_id: int, tensors: Any, peft_helper: Any, *args: Any, **kwargs: Any
    ) -> Any:
        what = f"the adapter {lora_model_id}"
        for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
            if getattr(peft_helper, name, None):
                raise RefusedError(what, f"it has a {name}", "give all its layers one rank and alpha")
        model = own(cls, lora_model_id, tensors, peft_helper, *args, **kwargs)
        model.samebits_scaling = float(peft_helper.vllm_lora_scaling_factor)
        return model

    return from_lora_tensors


def _activate(own: Callable[..., bool]) -> Callable[..., bool]:
    def activate_adapter(self: Any, lora_id: int) -> bool:
        model = self._registered_adapters[lora_id]
        for name, module in self.modules.items():
            if type(module).__name__ not in _LAYERS and self._get_lora_layer_weights(model, name):
                if not hasattr(model, "samebits_scaling"):  # of zeros, for a warm-up
                    continue
                raise RefusedError(
                    f"the adapter {lora_id} for {name} of class {type(module).__name__}",
                    "adapters of linear layers alone are covered",
                    "merge it on the trainer's side, and load the merged weights",
                )
        if current_platform.is_cuda() and not hasattr(self, "samebits_ready"):  # vLLM's warm-up is the first
            self.samebits_ready = True
            kernels.make_ready(kernels.grouped(_weights(self.modules), self.max_num_batched_tokens, 1))
        activated = own(self, lora_id)
        if activated:
            at = self.lora_index_to_id.index(lora_id)
            for wrapper in self.punica_wrapper_mapping.values():
                _scalings(wrapper, self.lora_slots)[at] = getattr(model, "samebits_scaling", 1.0)
        return activated

    return activate_adapter


def _weights(modules: dict[str, Any]) -> list[Tensor]:
    """``[slots, K, N]``, of all layers."""
    layers = [m for m in modules.values() if type(m).__name__ in _LAYERS]
    return [w[:, 0].mT for m in layers for w in (*m.lora_a_stacked, *m.lora_b_stacked)]


def _scalings(wrapper: Any, slots: int) -> Tensor:
    """By slot, in memory that CUDA graphs may keep. The last is for tokens without an adapter."""
    if not hasattr(wrapper, "samebits_scalings"):
        wrapper.samebits_scalings = torch.zeros(slots + 1, dtype=torch.float32, device=wrapper.device)
    scalings: Tensor = wrapper.samebits_scalings
    return scalings


def _routed(wrapper: Any, tokens: int, slots: int) -> tuple[Routed, Tensor]:
    """Tokens by adapter, and the scalings of tokens."""
    key = id(wrapper), tokens
    if key not in _Step.routed:
        adapters = wrapper._token_lora_indices[:tokens]
        adapters = torch.where(adapters < 0, slots, adapters)  # behind all others
        to = Routed(adapters[:, None], slots, 1)
        to.scalings = _scalings(wrapper, slots)[adapters][:, None]  # type: ignore[attr-defined]
        _Step.routed[key] = to
    to = _Step.routed[key]
    return to, to.scalings  # type: ignore[attr-defined]


def _add_linear(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    buffer: Any = None,
    add_inputs: bool = True,
    **more: Any,
) -> Tensor:
    if buffer is not None or scale != 1.0 or not add_inputs:
        raise RefusedError("an adapter", "it is added by parts", "report it: this version is not covered")
    to, scalings = _routed(self, len(x), len(lora_a_stacked[0]))
    rows, begin = routed(x, to), 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        inner = grouped_mm(rows, a[:, 0].mT, to.ends)
        outer = grouped_mm(inner, b[:, 0].mT, to.ends)
        added = combined(outer, scalings, to).to(y.dtype)  # times the scaling, in float32
        part = y[:, begin : begin + size]
        part.copy_(part + added)
        begin += size
    return y
