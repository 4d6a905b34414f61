"""Layers in block FP8: weights of 128 x 128, activations of 1 x 128, as the mode computes them.

Weights are those of a checkpoint, or are quantized while they are loaded (``quantization="fp8_per_block"``),
by :func:`samebits.quantize` as in ``samebits.convert(model, fp8="block")``. Linear layers compute here.
Experts have their weights from here, and compute in ``samebits/engines/experts.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import fp8 as offline
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online import fp8 as online

from samebits.contract import SCALE_BLOCK
from samebits.engines.experts import ROUTERS
from samebits.engines.hooks import Hooks
from samebits.engines.layers import keep_weights
from samebits.engines.refusals import RefusedError
from samebits.ops.fp8_weights import linear_of_values
from samebits.ops.quantize import quantize
from samebits.transformers import are_experts

__all__ = ["EXPERTS", "METHODS", "ONLINE", "check_config", "check_experts", "install", "product"]

ONLINE = "fp8_per_block"
"""The name of weights that are quantized while they are loaded."""

METHODS = offline.Fp8LinearMethod, online.Fp8PerBlockOnlineLinearMethod
"""Methods of linear layers that compute so."""

EXPERTS = offline.Fp8MoEMethod, online.Fp8PerBlockOnlineMoEMethod
"""Methods of experts whose weights have this form."""

_NOT_QUANTIZED = ("GptOssForCausalLM",)
"""Architectures whose experts vLLM does not quantize while it loads them."""


def install(hooks: Hooks) -> None:
    """Replace the products, and the quantization of weights."""
    for method in METHODS:
        hooks.replace(method, "apply", _apply, "self", "layer", "x", "bias")
    for module in (offline, online):  # none of vLLM's kernels is called, so none has to run here
        hooks.replace(module, "init_fp8_linear_kernel", _no_kernel, "activation_quant_key")
        hooks.replace(module, "select_fp8_moe_backend", _no_backend, "config", "weight_key", "activation_key")
    for kinds, quantize_weights in ((METHODS, _quantize_weights), (EXPERTS, _quantize_experts)):
        hooks.replace(kinds[0], "process_weights_after_loading", keep_weights, "self", "layer")
        hooks.replace(kinds[1], "process_weights_after_loading", quantize_weights, "self", "layer")
    for kind in EXPERTS:  # vLLM's warm-up of DeepGEMM asks for it
        hooks.replace(kind, "get_fused_moe_quant_config", _no_kernel, "self", "layer")
    # It would fill experts up to whole blocks, which a trainer's are not.
    sizes = FusedMoEMethodBase.maybe_roundup_sizes
    hooks.replace(EXPERTS[1], "maybe_roundup_sizes", sizes, "self", "hidden_size")
    for config in (offline.Fp8Config, base.OnlineQuantizationConfig):
        method = config.get_quant_method
        hooks.replace(config, "get_quant_method", _routers_apart(method), "self", "layer", "prefix")


def check_config(config: Any) -> None:
    """Refuse quantization of other kinds.

    Raises:
        RefusedError: it names the kind.
    """
    model, quantization = config.model_config, config.quant_config
    if quantization is None and model.quantization is None:
        return
    what = f"quantization={model.quantization!r}"
    block = getattr(quantization, "weight_block_size", None)
    if model.quantization != ONLINE and (
        model.quantization != "fp8" or block is None or [*block] != [SCALE_BLOCK, SCALE_BLOCK]
    ):
        raise RefusedError(
            what,
            "of quantised products, those of block FP8 with weights of 128 x 128 alone have a trainer's bits",
            f"give such a checkpoint, one in 16 or 32 bits, or quantization={ONLINE!r}",
        )
    for name in model.architectures:
        if model.quantization == ONLINE and name in _NOT_QUANTIZED:
            raise RefusedError(f"{what} of {name}", *_LEFT)
    if config.lora_config is not None:
        raise RefusedError(what, "adapters of layers in FP8 are not covered", "merge the adapter")


_LEFT = "vLLM does not quantize its experts, and a trainer would", "run it in 16 bits"


def check_experts(model: nn.Module, config: Any) -> None:
    """Refuse experts that stay those of ``transformers`` where weights are quantized.

    Raises:
        RefusedError: it names the layer.
    """
    for name, module in model.named_modules():
        if config.quantization is not None and are_experts(module):
            raise RefusedError(f"the layer {name} with quantization={config.quantization!r}", *_LEFT)


def product(weight: Tensor, scale: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight times scale).T + bias``."""
    return linear_of_values("vllm", x, weight, scale, bias)


def _apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    # vLLM's parameters are of classes of its own
    return product(layer.weight.data, layer.weight_scale_inv.data, x, bias)


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    pass


class _Nothing:
    @staticmethod
    def is_monolithic() -> bool:
        return False


def _no_backend(*args: Any, **kwargs: Any) -> tuple[None, type]:
    return None, _Nothing


def _routers_apart(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, but for routers of vLLM's own classes: those of ``transformers`` stay in 16 bits."""

    def get_quant_method(self: Any, layer: nn.Module, prefix: str) -> Any:
        is_router = isinstance(layer, LinearBase) and prefix.rpartition(".")[2] in ROUTERS
        if is_router and not get_current_vllm_config().model_config.using_transformers_backend():
            return UnquantizedLinearMethod()
        return own(self, layer, prefix)

    return get_quant_method


def _quantize_weights(self: Any, layer: Any) -> None:
    if layer.weight.dtype.itemsize == 1:
        return
    parts = getattr(layer, "output_partition_sizes", None) or getattr(layer, "logical_widths", [])
    if any(n % SCALE_BLOCK for n in parts[:-1]):
        raise RefusedError(
            f"quantization={ONLINE!r}",
            f"parts of {parts} rows share blocks of 128, and the trainer's own layers do not",
            'give model_impl="transformers"',
        )
    weight, scale = quantize(layer.weight.data, block=(SCALE_BLOCK, SCALE_BLOCK))
    for name, value in (("weight", weight), ("weight_scale_inv", scale)):
        online.replace_parameter(layer, name, value)


def _quantize_experts(self: Any, layer: Any) -> None:
    if layer.w13_weight.dtype.itemsize == 1:
        return
    for name in ("w13_weight", "w2_weight"):
        weight, scale = quantize(getattr(layer, name).data, block=(SCALE_BLOCK, SCALE_BLOCK))
        online.replace_parameter(layer, name, weight)
        online.replace_parameter(layer, f"{name}_scale_inv", scale)
