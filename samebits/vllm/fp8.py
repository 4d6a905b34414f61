"""Linear layers in block FP8: weights of 128 x 128, activations of 1 x 128, as the mode computes them.

Weights are those of a checkpoint, or are quantized while they are loaded (``quantization="fp8_per_block"``),
by :func:`samebits.quantize` as in ``samebits.convert(model, fp8="block")``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.quantization import fp8 as offline
from vllm.model_executor.layers.quantization.online import fp8 as online

from samebits.contract import SCALE_BLOCK
from samebits.engines.hooks import Hooks
from samebits.engines.layers import keep_weights
from samebits.engines.refusals import RefusedError
from samebits.ops.fp8_weights import linear_of_values
from samebits.ops.quantize import quantize

__all__ = ["METHODS", "ONLINE", "check_config", "install", "product"]

ONLINE = "fp8_per_block"
"""The name of weights that are quantized while they are loaded."""

METHODS = offline.Fp8LinearMethod, online.Fp8PerBlockOnlineLinearMethod
"""Methods of linear layers that compute so."""


def install(hooks: Hooks) -> None:
    """Replace the products, and the quantization of weights."""
    for method in METHODS:
        hooks.replace(method, "apply", _apply, "self", "layer", "x", "bias")
    for module in (offline, online):  # none of vLLM's kernels is called, so none has to run here
        hooks.replace(module, "init_fp8_linear_kernel", _no_kernel, "activation_quant_key")
    hooks.replace(METHODS[0], "process_weights_after_loading", keep_weights, "self", "layer")
    hooks.replace(METHODS[1], "process_weights_after_loading", _quantize_weights, "self", "layer")


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
    if model.is_moe:
        raise RefusedError(what, "experts in FP8 wait for the GPU", "give a checkpoint in bfloat16")
    if config.lora_config is not None:
        raise RefusedError(what, "adapters of layers in FP8 are not covered", "merge the adapter")


def product(weight: Tensor, scale: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight times scale).T + bias``."""
    return linear_of_values("vllm", x, weight, scale, bias)


def _apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    # vLLM's parameters are of classes of its own
    return product(layer.weight.data, layer.weight_scale_inv.data, x, bias)


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    pass


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
