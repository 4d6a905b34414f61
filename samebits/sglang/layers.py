"""SGLang's own layers with the rounding points of ``transformers``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import activation, layernorm, logits_processor
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models import gemma3_causal, utils
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3

from samebits.engines import layers
from samebits.engines.hooks import Hooks
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.linear import linear
from samebits.sglang.proven import NATIVE

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Replace what the layers compute."""
    for method in (unquant.UnquantizedLinearMethod, unquant.UnquantizedEmbeddingMethod):
        hooks.replace(method, "apply", layers.apply, "self", "layer", "x", "bias")
        # On a CPU it would pack weights for kernels that are not called.
        hooks.replace(method, "process_weights_after_loading", layers.keep_weights, "self", "layer")
    norm = "self", "x", "residual", "post_residual_addition"
    turn = "self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"
    for layer, forward, parameters in (
        (layernorm.RMSNorm, _only(layers.rms_norm, 3), norm),
        (layernorm.GemmaRMSNorm, _only(layers.gemma_rms_norm, 3), norm),
        (layernorm.Gemma3RMSNorm, _gemma3_rms_norm, ("self", "x")),
        (activation.SiluAndMul, layers.silu_and_mul, ("self", "x")),
        (activation.GeluAndMul, layers.gelu_and_mul, ("self", "x")),
        (RotaryEmbedding, _only(layers.positions, 4), turn),
    ):
        hooks.expect(layer, "forward_native", *parameters)
        hooks.replace(layer, "forward", forward, "self")  # which would call a form for the platform
    for name in {name for names in NATIVE.values() for name in names}:
        importlib.import_module(f"sglang.srt.models.{name}")
    turned = modeling_gemma3.apply_rotary_pos_emb  # SGLang turns in float32
    hooks.replace(gemma3_causal, "apply_rotary_pos_emb", turned, "q", "k", "cos", "sin")
    _replace_everywhere(hooks, utils.apply_qk_norm, _head_norms, "q", "k", "q_norm", "k_norm", "head_dim")
    _replace_everywhere(hooks, utils.enable_fused_set_kv_buffer, _no_fused_write, "forward_batch")
    head = "self", "hidden_states", "lm_head", "embedding_bias"
    hooks.replace(logits_processor.LogitsProcessor, "_compute_lm_head", _logits, *head)


def _only(method: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`method` of `count` arguments. What a model gives beyond them must be None."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        more = [*args[count:], *(kwargs.pop(k, None) for k in _UNUSED)]
        if any(a is not None for a in more):
            raise TypeError(
                f"samebits.sglang: {type(args[0]).__name__}: expected no more than {count - 1}"
                " arguments: a sum or a cache write within the layer is not covered"
            )
        return method(*args[:count], **kwargs)

    return forward


_UNUSED = "post_residual_addition", "offsets", "fused_set_kv_buffer_arg"


def _gemma3_rms_norm(self: Any, x: Tensor) -> Tensor:
    out = add_rms_norm(x, None, self.weight.data, self.eps, rounding="once", offset=1.0)
    assert isinstance(out, Tensor)
    return out


def _head_norms(
    q: Tensor, k: Tensor, q_norm: Any, k_norm: Any, head_dim: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Norms of the heads of ``[tokens, heads * size]``, which SGLang would fuse on a GPU."""
    return tuple(norm(x.unflatten(-1, (-1, head_dim))).flatten(-2) for norm, x in ((q_norm, q), (k_norm, k)))


def _no_fused_write(forward_batch: Any) -> bool:
    """Attention writes keys and values. SGLang would do so while it turns them, on a GPU."""
    return False


def _logits(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
    """The head, and what ``transformers`` does to logits in their dtype. SGLang does it in float32.

    With ``enable_fp32_lm_head`` that dtype is float32, and the operands stay in 16 bits.
    """
    wide = torch.float32 if self.use_fp32_lm_head else None
    logits = linear(hidden_states, lm_head.weight, out_dtype=wide)
    if self.samebits_divisor is not None:
        logits = logits / self.samebits_divisor
    if self.samebits_soft_cap is not None:
        logits = torch.tanh(logits / self.samebits_soft_cap) * self.samebits_soft_cap
    return logits


def _replace_everywhere(hooks: Hooks, function: Callable[..., Any], new: Any, *parameters: str) -> None:
    """Also in modules that have imported it by name."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("sglang.srt.") and vars(module).get(function.__name__) is function:
            hooks.replace(module, function.__name__, new, *parameters)
