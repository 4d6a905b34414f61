"""Multi-head latent attention (MLA) in its absorbed form, for trainers and engines.

A token has a latent vector and a rotated part of its key, which all heads share. The weight of ``kv_b_proj``
makes of the latent vector each head's key and value. In the absorbed form it is applied to queries and to the
output instead. So attention has one key for all heads, ``[latent, rotated]``, whose first entries are its
value. ``docs/contract.md``, "Latent attention", has the order of sums and where results are rounded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from samebits.ops._products import product_into
from samebits.ops.matmul import matmul

__all__ = ["PROVEN", "Absorbed", "absorb", "absorbed", "expanded", "queries_of_rows", "values_of_rows"]

PROVEN = tuple(
    f"transformers.models.{name}.modeling_{name}"
    for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
)
"""Modules with the layers that :func:`absorb` takes."""


def _of_heads(weight: Tensor, heads: int) -> Tensor:
    """The weight of ``kv_b_proj`` as ``[heads, entries of a key and a value, latent size]``."""
    return weight.view(heads, -1, weight.shape[-1])


def absorbed(q: Tensor, weight: Tensor, size: int) -> Tensor:
    """Queries for latent keys: ``[..., heads, tokens, latent + rotated]``.

    Args:
        q: ``[..., heads, tokens, size + rotated]``.
        weight: of ``kv_b_proj``, ``[heads * (size + value size), latent]``.
        size: of the part of a head's key that is not rotated.
    """
    plain, rotated = q.split([size, q.shape[-1] - size], -1)
    of_keys = _of_heads(weight, q.shape[-3])[:, :size]
    return torch.cat([matmul(plain, of_keys), rotated], -1)


def expanded(out: Tensor, weight: Tensor, size: int) -> Tensor:
    """Values of heads, ``[..., heads, tokens, value size]``, of outputs ``[..., heads, tokens, latent]``."""
    return matmul(out, _of_heads(weight, out.shape[-3])[:, size:].mT)


def queries_of_rows(q: Tensor, weight: Tensor, size: int) -> Tensor:
    """As :func:`absorbed`, of an engine's ``q[tokens, heads, size + rotated]``, without gradients.

    Results are ``[tokens, heads, latent + rotated]``, contiguous.
    """
    latent = weight.shape[1]
    out = q.new_empty(*q.shape[:-1], latent + q.shape[-1] - size)
    product_into(
        out[..., :latent].transpose(0, 1),
        q[..., :size].transpose(0, 1),
        _of_heads(weight, q.shape[1])[:, :size],
    )
    out[..., latent:] = q[..., size:]
    return out


def values_of_rows(latent: Tensor, weight: Tensor, size: int, out: Tensor) -> None:
    """As :func:`expanded`, of ``latent[tokens, heads, latent]`` into ``out[tokens, heads * value size]``."""
    of_values = _of_heads(weight, latent.shape[1])[:, size:]
    to = out.view(*latent.shape[:2], of_values.shape[1]).transpose(0, 1)
    product_into(to, latent.transpose(0, 1), of_values.mT)


class Absorbed(nn.Module):
    """What :func:`absorb` makes a layer's class inherit from."""

    kv_b_proj: nn.Linear
    qk_nope_head_dim: int

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, 1, tokens, size]`` as they are in the cache."""
        _check_function(self)
        _check_weight("samebits.latent", type(self).__name__, self)  # adapters may have come since
        keys = torch.cat([kv_nope, k_rot], -1)
        return keys, keys[..., : kv_nope.shape[-1]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__bases__[1],), self.__dict__


def _check_function(layer: Any) -> None:
    """Raise unless attention is computed by this library, which absorbs the weight into queries."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = layer.config._attn_implementation
    found: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, _check_function)
    found = getattr(found, "func", found)
    if found is _check_function or not found.__module__.startswith("samebits."):
        raise RuntimeError(
            f"samebits.latent: {type(layer).__name__} in its absorbed form: expected to run within"
            f' samebits.batch_invariant, or with attn_implementation="samebits", got {name!r}'
        )


def _check_weight(by: str, name: str, layer: Any) -> None:
    """Raise unless ``kv_b_proj`` is its weight alone, which is all that the absorbed form reads."""
    b = layer.kv_b_proj
    plain = isinstance(b, nn.Linear) and b.bias is None and b.weight.dtype.itemsize > 1
    options = [o for o in ("contract", "fp8", "out_dtype") if getattr(b, o, None) is not None]
    if not plain or hasattr(b, "base_layer") or options:
        said = f" with {', '.join(options)}" if options else ""
        raise ValueError(
            f"{by}: {name}.kv_b_proj: expected a linear layer without bias, adapter, quantization and options"
            f" of samebits.convert, got {type(b).__name__}{said}"
        )


def absorb(model: nn.Module) -> tuple[str, ...]:
    """Let a ``transformers`` model compute its latent attention (MLA) in the absorbed form, in place.

    ::

        model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V2-Lite", dtype=torch.bfloat16)
        samebits.latent.absorb(model)
        with samebits.batch_invariant():
            logits = model(ids).logits

    Engines decode in this form: one latent key is read for all heads. It sums in another order than the
    expanded form of ``transformers``, so its bits are others. A layer stays the same object and only changes
    its class, to a subclass of the same name. Parameters, caches and gradients stay what they were. Doing it
    twice changes nothing.

    Args:
        model: a model of DeepSeek-V2 or V3, Kimi-K2 in the classes of DeepSeek-V3, GLM-4-MoE-lite, or Youtu.

    Returns:
        The names of all layers in the absorbed form.

    Raises:
        ValueError: the model has no layer of latent attention, one that was not proven, or one whose
            ``kv_b_proj`` is no linear layer without a bias: quantized, with an adapter, or converted with
            options. A forward raises it, too, if that came later.
    """
    found: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if not (hasattr(layer, "kv_b_proj") and hasattr(layer, "kv_lora_rank")):
            continue
        found[name] = layer
        if isinstance(layer, Absorbed):
            continue
        kind: Any = type(layer)
        if kind.__module__ not in PROVEN:
            raise ValueError(
                f"samebits.latent.absorb: {name}: expected a layer of one of {', '.join(PROVEN)},"
                f" got one of {kind.__module__}"
            )
        if not hasattr(layer, "expand_kv"):
            raise ValueError(f"samebits.latent.absorb: {name}: expected a newer transformers")
        _check_weight("samebits.latent.absorb", name, layer)
    if not found:
        raise ValueError("samebits.latent.absorb: model: expected layers of latent attention, found none")
    for layer in found.values():
        if not isinstance(layer, Absorbed):
            kind = type(layer)
            layer.__class__ = _absorbed_class(kind)
    return tuple(found)


@functools.cache
def _absorbed_class(kind: Any) -> Any:
    """A subclass of the same name, by which others know layers."""
    given = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (Absorbed, kind), given)


def _new(kind: Any) -> Any:
    made = _absorbed_class(kind)
    return made.__new__(made)
