"""Models in block FP8, as ``transformers`` loads them from checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

import samebits

BLOCK = (128, 128)


def in_fp8(model: Any) -> Any:
    """The model, with linear layers and experts in FP8, but for its head. Their weights are quantized."""
    weights = dict(model.named_parameters())
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(weight_block_size=BLOCK))
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            _fill(layer, {"weight": weights[f"{name}.weight"]}, weights.get(f"{name}.bias"))
        elif isinstance(layer, FP8Experts):
            up = "gate_up_proj" if layer.has_gate else "up_proj"
            _fill(layer, {n: weights[f"{name}.{n}"] for n in (up, "down_proj")})
    return model


def _fill(layer: nn.Module, weights: dict[str, Tensor], bias: Tensor | None = None) -> None:
    for name, weight in weights.items():
        of_each = [samebits.quantize(w, block=BLOCK) for w in weight.detach().reshape(-1, *weight.shape[-2:])]
        for suffix, parts in zip(("", "_scale_inv"), zip(*of_each, strict=True), strict=True):
            value = torch.stack(parts).reshape(*weight.shape[:-2], *parts[0].shape)
            layer.register_parameter(name + suffix, nn.Parameter(value, requires_grad=False))
    if bias is not None:
        layer.register_parameter("bias", nn.Parameter(bias.detach()))
