"""Adapters (LoRA), several in a batch: the products and rounding points of PEFT, unmerged.

``y + B(A(x)) * scaling``, each step rounded to the dtype of the adapter, which is the model's. vLLM would put
the scaling into ``B``. Here it stays apart.

The matrices A of all slots stand behind the weight of their layer, in one tensor. So one product gives the
layer's output, and A's of every slot, in little more than the time of the weight alone.
:func:`samebits.ops.adapters.add_adapters` takes from it what each token needs, by its slot. No token's bits
depend on the adapters beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.lora import lora_weights
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from samebits.engines import kernels
from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.ops.adapters import GROUP, add_adapters
from samebits.ops.linear import linear

__all__ = ["check_config", "install"]

_LAYERS = (
    *("ColumnParallelLinearWithLoRA", "MergedColumnParallelLinearWithLoRA", "QKVParallelLinearWithLoRA"),
    *("MergedQKVParallelLinearWithLoRA", "ReplicatedLinearWithLoRA", "RowParallelLinearWithLoRA"),
)
"""Those that add an adapter's product to a linear layer's."""


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
    if config.offload_config.uva.cpu_offload_gb or config.offload_config.prefetch.offload_group_size:
        raise RefusedError(
            "enable_lora with weights offloaded to the CPU",
            "adapters lie behind the weights of their layers, on the GPU",
            "set neither cpu_offload_gb nor offload_group_size",
        )
    if getattr(envs, "VLLM_LORA_ENABLE_DUAL_STREAM", False):
        raise RefusedError("VLLM_LORA_ENABLE_DUAL_STREAM", "it adds in another place", "do not set it")


def install(hooks: Hooks) -> None:
    """Replace what adapters compute, and keep their scaling apart."""
    layer = BaseLinearLayerWithLoRA
    hooks.replace(layer, "_apply_sync", _apply(layer._apply_sync), "self", "x", "bias")
    hooks.replace(layer, "_apply_lora_to_output", _add, "self", "x", "output")
    hooks.replace(layer, "reset_lora", _reset(layer.reset_lora), "self", "index")
    punica = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    mapping = "self", "mapping", "lora_index_to_id", "max_loras", "vocab_size"
    hooks.replace(punica, "update_metadata", _update_metadata, *mapping)
    hooks.expect(punica, "_update_base_metadata", *mapping)
    # No adapter that has weights of embeddings or heads is active.
    hooks.replace(VocabParallelEmbeddingWithLoRA, "forward", _embed, "self", "x")
    hooks.replace(punica, "add_lora_logits", _leave, "self", "y", "x")
    for weights in (lora_weights.LoRALayerWeights, lora_weights.PackedLoRALayerWeights):
        hooks.replace(weights, "optimize", _unscaled, "self")
    load = LoRAModel.from_lora_tensors.__func__
    hooks.replace(
        LoRAModel, "from_lora_tensors", classmethod(_with_scaling(load)), "lora_model_id", "tensors"
    )
    activate, create = LoRAModelManager.activate_adapter, LoRAModelManager._create_lora_modules
    hooks.replace(LoRAModelManager, "activate_adapter", _activate(activate), "self", "lora_id")
    hooks.replace(LoRAModelManager, "_create_lora_modules", _joined(create), "self")


@dataclass(frozen=True)
class _Adapters:
    """Of a layer.

    Attributes:
        weights: the layer's own ``[N, K]``, and behind it every A, ``[slots * slices * rank, K]``.
        biases: the layer's own, and zeros behind it, if it has one.
        n: rows of the layer's own.
        b: ``[slots, N, rank]``. Ranks are filled up with zeros.
        ends: of the slices.
        scalings: ``[slots, slices]``, in memory that CUDA graphs may keep. NaN: an adapter has no such slice.
        wrapper: vLLM's, which knows the slots of tokens.
    """

    weights: Tensor
    biases: Tensor | None
    n: int
    b: Tensor
    ends: tuple[int, ...]
    scalings: Tensor
    wrapper: Any

    def apply(self, x: Tensor, bias: bool) -> Tensor:
        """What the layer gives with its adapters, with its bias or without."""
        both = linear(x, self.weights, self.biases if bias else None)
        return self._add(both[:, : self.n], both[:, self.n :])

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        """The same from what the layer gives without."""
        return self._add(base, linear(x, self.weights[self.n :]))

    def reset(self, slot: int) -> None:
        """Put zeros in a slot, behind its rank too, as vLLM's sleep does not keep them, and no scaling."""
        self.weights[self.n :].unflatten(0, (len(self.b), -1))[slot] = 0
        self.b[slot] = 0
        self.scalings[slot] = torch.nan
        if self.biases is not None:
            self.biases[self.n :] = 0

    def scale(self, slot: int, a: Tensor | list[Tensor | None], scaling: float) -> None:
        """Scale the slices of a slot that have an A. One A, or those of groups, are of all slices."""
        has = [part is not None for part in a] if isinstance(a, list) else []
        found = has if len(has) == len(self.ends) else [True] * len(self.ends)
        self.scalings[slot] = torch.tensor([scaling if there else torch.nan for there in found])

    def holds(self, layer: Any) -> bool:
        """Whether the layer's weight and bias still are those in `weights` and `biases`."""
        ours = (self.weights, layer.weight), *(() if self.biases is None else ((self.biases, layer.bias),))
        return all(own.data_ptr() == of_layer.data_ptr() for own, of_layer in ours)

    def _add(self, base: Tensor, inner: Tensor) -> Tensor:
        slots = self.wrapper._token_lora_indices[: len(base)]
        return add_adapters(base, inner, self.b, slots, self.scalings, self.ends)


def _of(module: Any) -> _Adapters | None:
    found: _Adapters | None = vars(module).get("samebits_adapters")
    return found


def _joined(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def _create_lora_modules(self: Any) -> None:
        own(self)
        for module in self.modules.values():
            if type(module).__name__ in _LAYERS:
                module.samebits_adapters = _join(module)

    return _create_lora_modules


def _join(module: Any) -> _Adapters | None:
    """Put all A of a layer behind its weight, and all B into one tensor. vLLM's own become views of them.

    None: its weight is no matrix of the adapters' dtype.
    """
    stacked_a, stacked_b = module.lora_a_stacked, module.lora_b_stacked
    weight, bias, biases = module.base_layer.weight, getattr(module.base_layer, "bias", None), None
    (slots, _, rank, k), slices = stacked_a[0].shape, len(stacked_a)
    ends = tuple(itertools.accumulate(b.shape[2] for b in stacked_b))
    n, padded = ends[-1], -(-rank // GROUP) * GROUP
    if weight.shape != (n, k) or weight.dtype != stacked_a[0].dtype:
        return None
    weights = torch.zeros(n + slots * slices * padded, k, dtype=weight.dtype, device=weight.device)
    weights[:n] = weight.data
    weight.data = weights[:n]
    if bias is not None:
        biases = bias.data.new_zeros(len(weights))
        biases[:n] = bias.data
        bias.data = biases[:n]
    a, b = weights[n:].view(slots, slices, padded, k), stacked_b[0].new_zeros(slots, n, padded)
    scalings = torch.full((slots, slices), torch.nan, dtype=torch.float32, device=weight.device)
    module.lora_a_stacked = tuple(a[:, i : i + 1, :rank] for i in range(slices))
    spans = itertools.pairwise((0, *ends))
    module.lora_b_stacked = tuple(b[:, None, begin:end, :rank] for begin, end in spans)
    return _Adapters(weights, biases, n, b, ends, scalings, module.punica_wrapper)


def _apply(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, or by one product."""

    def _apply_sync(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        adapters = _of(self)
        if adapters is None or not adapters.holds(self.base_layer):  # others have been put into the layer
            return own(self, x, bias)
        rows = x.flatten(0, -2)  # vLLM's Transformers backend gives a batch of one
        out = adapters.apply(rows, bias is not None)
        return out.view(*x.shape[:-1], out.shape[1])

    return _apply_sync


def _reset(own: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    def reset_lora(self: Any, index: int) -> None:
        adapters = _of(self)
        if adapters is None:
            own(self, index)
        else:
            adapters.reset(index)

    return reset_lora


def _add(self: Any, x: Tensor, output: Tensor) -> Tensor:
    adapters = _of(self)
    if adapters is None:  # no adapter that has weights for it is active
        return output
    return adapters.add(output.flatten(0, -2), x.flatten(0, -2)).view(output.shape)


def _update_metadata(
    self: Any, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: Any
) -> None:
    """The slots of tokens alone. vLLM's kernels would take them sorted, too, and wait for the GPU."""
    self.is_prefill = mapping.is_prefill
    self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)


def _embed(self: Any, x: Tensor) -> Tensor:
    return self.base_layer(x)  # type: ignore[no-any-return]


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
        scaling = float(peft_helper.vllm_lora_scaling_factor)
        if math.isnan(scaling):
            raise RefusedError(what, "its scaling is NaN", "give it a lora_alpha that is a number")
        model = own(cls, lora_model_id, tensors, peft_helper, *args, **kwargs)
        model.samebits_scaling = scaling
        return model

    return from_lora_tensors


def _activate(own: Callable[..., bool]) -> Callable[..., bool]:
    def activate_adapter(self: Any, lora_id: int) -> bool:
        model = self._registered_adapters[lora_id]
        for name, module in self.modules.items():
            if _of(module) is None and self._get_lora_layer_weights(model, name):
                if not hasattr(model, "samebits_scaling"):  # of zeros, for a warm-up
                    continue
                raise RefusedError(
                    f"the adapter {lora_id} for {name} of class {type(module).__name__}",
                    "adapters of linear layers in the model's dtype alone are covered",
                    "merge it on the trainer's side, and load the merged weights",
                )
        if current_platform.is_cuda() and not hasattr(self, "samebits_ready"):  # vLLM's warm-up is the first
            self.samebits_ready = True
            _make_ready([*self.modules.values()], self.max_num_batched_tokens)
        activated = own(self, lora_id)
        slot = self.lora_index_to_id.index(lora_id)
        for name, module in self.modules.items() if activated else ():
            adapters, weights = _of(module), self._get_lora_layer_weights(model, name)
            if adapters is not None and weights:
                adapters.scale(slot, weights.lora_a, getattr(model, "samebits_scaling", 1.0))
        return activated

    return activate_adapter


def _make_ready(modules: list[Any], most: int) -> None:
    """Compile and load what adapters of these layers need, of up to `most` tokens."""
    found = [(of, type(m).__name__ == "ReplicatedLinearWithLoRA") for m in modules if (of := _of(m))]
    weights = [of.weights for of, _ in found] + [of.weights[of.n :] for of, apart in found if apart]
    if not found:
        return
    kernels.make_ready(kernels.products(weights, most))
    kinds = {(of.b.shape, of.ends): of for of, _ in found}.values()
    kernels.make_ready([partial(of.apply, of.weights[:1], False) for of in kinds])
