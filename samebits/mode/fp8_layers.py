"""Layers of ``transformers`` in block FP8 (``FineGrainedFP8Config``), under the mode.

Their products are Triton kernels and others from a hub, which no function of PyTorch's shows. So the layers'
classes are changed, once: under the mode they run this library's products, else their own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from samebits.contract import SCALE_BLOCK
from samebits.mode.exchanged import in_module, under_the_mode
from samebits.ops.experts import Routed, combined, routed
from samebits.ops.fp8_weights import linear_of_groups, linear_of_values
from samebits.remedies import see

__all__ = ["fp8_experts"]

_MODULE = "transformers.integrations.finegrained_fp8"


def _cover() -> None:
    layers: Any = sys.modules[_MODULE]
    for kind, method, ours in (
        (layers.FP8Linear, "forward", _linear),
        (layers.FP8GroupedLinear, "forward", _block_diagonal_linear),
        (layers.FP8Experts, "linear", _linear_of_expert),
    ):
        setattr(kind, method, under_the_mode(getattr(kind, method), ours))
    functions = layers.ALL_FP8_EXPERTS_FUNCTIONS
    for name in [*functions]:
        functions.register(name, under_the_mode(functions[name], fp8_experts))


in_module(_MODULE, _cover)


def _check(layer: Any) -> str:
    """The name of the layer's class, for errors. Refuses forms of FP8 that the contract does not have."""
    name = type(layer).__name__
    if layer.activation_scheme != "dynamic":
        raise ValueError(
            f"samebits.batch_invariant: {name}: activation_scheme: one scale for all activations is not a"
            f' row\'s own; expected "dynamic", scales of 1 x {SCALE_BLOCK}, got {layer.activation_scheme!r}'
            + see("fp8")
        )
    if layer.block_size is None or tuple(layer.block_size) != (SCALE_BLOCK, SCALE_BLOCK):
        raise ValueError(
            f"samebits.batch_invariant: {name}: weight_block_size: expected ({SCALE_BLOCK}, {SCALE_BLOCK}),"
            f" got {layer.block_size}" + see("fp8")
        )
    return f"batch_invariant: {name}"


def _linear(layer: Any, input: Tensor) -> Any:
    if layer.weight.dtype.itemsize > 1:  # it was loaded dequantized
        return NotImplemented
    return linear_of_values(_check(layer), input, layer.weight, layer.weight_scale_inv, layer.bias)


def _block_diagonal_linear(layer: Any, x: Tensor) -> Any:
    """``x[..., groups, K]``; each group has rows of the weight, and of its scales."""
    if layer.weight.dtype.itemsize > 1:
        return NotImplemented
    op, groups = _check(layer), layer.n_groups
    if len(layer.weight) % (groups * SCALE_BLOCK):
        raise ValueError(
            f"samebits.{op}: weight: expected a multiple of {SCALE_BLOCK} rows for each of {groups} groups,"
            f" so that none shares a scale, got {len(layer.weight)} rows in all"
        )
    if x.ndim < 2 or x.shape[-2] != groups:
        raise ValueError(f"samebits.{op}: x: expected shape (..., {groups}, K), got {tuple(x.shape)}")
    weights, scales = (t.chunk(groups) for t in (layer.weight, layer.weight_scale_inv))
    biases = [None] * groups if layer.bias is None else layer.bias.chunk(groups)
    parts = zip(x.unbind(-2), weights, scales, biases, strict=True)
    return torch.stack([linear_of_values(op, *part) for part in parts], -2)


def _linear_of_expert(
    layer: Any,
    input: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor,
    activation_scale: Tensor | None = None,
) -> Any:
    if weight.dtype.itemsize > 1:
        return NotImplemented
    return linear_of_values(_check(layer), input, weight, weight_scale_inv)


def fp8_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """A layer ``FP8Experts``, whatever its ``experts_implementation``. Results are ``[tokens, hidden]``."""
    layer: Any = module
    op, to = _check(layer), Routed(top_k_index, layer.num_experts, 1)
    if getattr(layer, "_is_expert_parallel", False):  # slots of other processes have numbers from there on
        top_k_weights = top_k_weights.masked_fill(top_k_index >= layer.num_experts, 0.0)

    def linear(x: Tensor, name: str) -> Tensor:
        weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        return linear_of_groups(op, x, to.ends, weight, scale)

    inner = linear(routed(hidden_states, to), "gate_up_proj" if layer.has_gate else "up_proj")
    out = linear(layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner), "down_proj")
    return combined(out, top_k_weights.to(out.dtype), to).to(hidden_states.dtype)
