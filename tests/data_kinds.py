"""Operand values that try a product's corners, as data: kind -> tensor."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "wide", "tiny", "cancel", "sparse", "huge", "special")

# The exponents that a dtype holds, subnormals included.
_EXPONENTS = {torch.float32: (-149, 127), torch.bfloat16: (-133, 127), torch.float16: (-24, 15)}


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random values of a kind; the same seed gives the same values in every shape's own order."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    low, high = _EXPONENTS[dtype]

    def scale(lo: int, hi: int) -> Tensor:
        return torch.exp2(torch.randint(lo, hi + 1, shape, generator=g).double())

    if kind == "wide":
        x = x * scale(low // 2, high // 2)
    elif kind == "tiny":
        x = x * scale(low, low + 12)
    elif kind == "cancel":
        x = torch.sign(x) * (1 + torch.randint(0, 4, shape, generator=g) / 64.0)
    elif kind == "sparse":
        x = torch.where(torch.rand(shape, generator=g) < 0.7, torch.copysign(torch.zeros(()).double(), x), x)
    elif kind == "huge":
        x = x * scale(high - 6, high)
    elif kind == "special":
        specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.float64)
        pick = specials[torch.randint(0, 5, shape, generator=g)]
        x = torch.where(torch.rand(shape, generator=g) < 0.06, pick, x)
    return x.to(dtype)
