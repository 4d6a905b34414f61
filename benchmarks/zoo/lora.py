"""Low-rank adapters, as small as they can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK = 8


@contextmanager
def add_adapters(net: nn.Module) -> Iterator[None]:
    """Every linear layer adds ``(x aᵀ) bᵀ`` with trained `a` and `b`; all other parameters are frozen."""
    before = {p: p.requires_grad for p in net.parameters()}
    layers = [layer for layer in net.modules() if type(layer) is nn.Linear]
    g = torch.Generator().manual_seed(0)
    for p in before:
        p.requires_grad_(False)
    for layer in layers:
        for name, shape in (("lora_a", (RANK, layer.in_features)), ("lora_b", (layer.out_features, RANK))):
            value = torch.randn(shape, generator=g) / shape[1] ** 0.5
            layer.register_parameter(name, nn.Parameter(value.to(layer.weight.device, layer.weight.dtype)))

    def adapt(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + F.linear(F.linear(given[0], layer.lora_a), layer.lora_b)  # type: ignore[arg-type]

    hooks = [layer.register_forward_hook(adapt) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.lora_a, layer.lora_b
        for p, needed in before.items():
            p.requires_grad_(needed)
