"""Rotary positions with the frequencies of ``transformers``, by ``transformers``' own modules.

Their frequencies are computed on the CPU, whatever device the model is on: an engine that computes them on a
GPU gets other bits. Angles, cosines and sines are computed on the model's device, as ``transformers`` does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samebits.engines.refusals import RefusedError

__all__ = ["check_length", "on_the_cpu", "rotary_module", "set_tables", "table"]

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the longest sequence of a batch, beyond the trained length."""


def rotary_module(config: Any) -> nn.Module:
    """The rotary module of the ``transformers`` model of a config, built on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM._model_mapping[type(config)]
    names = vars(inspect.getmodule(model))
    own: Any
    (own,) = {
        v
        for name, v in names.items()
        if name.endswith("RotaryEmbedding") and inspect.isclass(v) and v.__module__ == model.__module__
    }
    with torch.device("cpu"):
        module: nn.Module = own(config)
    return module


def check_length(config: Any, longest: int) -> None:
    """Refuse positions at which the frequencies of a token depend on the rest of its batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for kind in kinds:
        trained = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind.get("rope_type") in _BY_LENGTH and longest > trained:
            raise RefusedError(
                "rotary positions",
                f"{kind['rope_type']} frequencies change for a whole batch when one of its sequences is"
                f" longer than {trained}, and this engine allows {longest}",
                f"give a maximum length of {trained}",
            )


@torch.no_grad()
def table(
    module: nn.Module,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    layer_type: str | None = None,
    angles: int | None = None,
) -> Tensor:
    """Cosines, then sines, of positions from 0 on: ``[positions, 2 * angles]``.

    Args:
        module: from :func:`rotary_module`. It is moved to the device.
        layer_type: where the model has frequencies by the type of a layer.
        angles: half of the entries that are turned, where a module may give each angle once, as GPT-OSS's.
            None: it gives each twice.

    Raises:
        RefusedError: the engine turns another part of a head than ``transformers``.
    """
    at = torch.arange(positions, device=device)[None]
    x = torch.empty(1, dtype=dtype, device=device)
    by_type = "layer_type" in inspect.signature(module.forward).parameters
    cos, sin = module.to(device)(x, at, *((layer_type,) if by_type else ()))
    angles = angles or cos.shape[-1] // 2
    if cos.shape[-1] not in (angles, 2 * angles):
        raise RefusedError(
            "rotary positions",
            f"the engine turns {2 * angles} entries of a head, transformers {cos.shape[-1]}",
            "remove partial_rotary_factor from the model's configuration",
        )
    return torch.cat([cos[0, :, :angles], sin[0, :, :angles]], -1)


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def set_tables(
    model: nn.Module,
    config: Any,
    longest: int,
    kind: type[nn.Module],
    about: Callable[[Any], tuple[torch.dtype, torch.device, int | None]],
) -> None:
    """Give an engine's rotary layers the tables of ``transformers``.

    Args:
        longest: positions that the engine allows.
        kind: the class of the layers.
        about: `dtype`, `device` and `angles` of a layer's :func:`table`.
    """
    check_length(config, longest)
    on_the_cpu(model)
    own, tables = None, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, kind):
            continue
        own = own or rotary_module(config)
        layer, types = _LAYER.search(name), getattr(config, "layer_types", None)
        layer_type = types[int(layer[1])] if layer and types else None
        dtype, device, angles = about(module)
        key = longest, dtype, device, layer_type, angles
        if key not in tables:
            tables[key] = table(own, *key)
        module.cos_sin_cache = tables[key]


def on_the_cpu(model: nn.Module) -> None:
    """Give rotary modules of ``transformers`` the frequencies of those that were built on the CPU."""
    for module in model.modules():
        if not type(module).__name__.endswith("RotaryEmbedding") or not hasattr(module, "config"):
            continue
        with torch.device("cpu"):
            own = type(module)(module.config)
        buffers = dict(module.named_buffers())
        for name, buffer in own.named_buffers():
            buffers[name].copy_(buffer)
