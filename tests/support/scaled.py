"""Block-scaled products of FP8 matrices, written once more from docs/contract.md, in float64 of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, BLOCK, FRACTION = 32, 128, 13
LOWEST = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
_ZERO = -(2**20)  # the exponent of zero


def _exponents(x: Tensor, lowest: int) -> Tensor:
    return torch.where(x == 0, _ZERO, torch.frexp(x).exponent.sub(1).clamp(min=lowest))


def _times_power(x: Tensor, exponent: Tensor) -> Tensor:
    return x * ((exponent.long() + 1023) << 52).view(torch.float64)


def _truncated(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return _times_power(torch.trunc(mantissa * 2.0**bits), exponent - bits)


def chain(a: Tensor, b: Tensor) -> Tensor:
    """The chain over k of finite FP8 matrices ``a[m, k]`` and ``b[n, k]``, in float64."""
    low_a, low_b = LOWEST[a.dtype], LOWEST[b.dtype]
    a, b = a.double(), b.double()
    acc = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[1], GROUP):
        x, y = a[:, None, k : k + GROUP], b[None, :, k : k + GROUP]
        terms = x * y
        exponents = _exponents(x, low_a) + _exponents(y, low_b)
        largest = torch.maximum(torch.where(terms == 0, _ZERO, exponents).amax(-1), _exponents(acc, -126))
        nothing = largest == _ZERO
        shift = torch.where(nothing, 0, FRACTION - largest)
        whole = torch.trunc(_times_power(terms, shift[..., None])).sum(-1)
        whole = whole + torch.trunc(_times_power(acc, shift))
        acc = _truncated(_times_power(whole, -shift), FRACTION + 1)
    return acc


def _fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z`` rounded once to float32, for an x of few bits: its product with y is exact in float64."""
    product, z = x.double() * y.double(), z.double()
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    bits = total.view(torch.int64)  # to odd, so that rounding again is rounding once
    outward = torch.where((lost > 0) == (total > 0), 1, -1)
    bits = bits + torch.where((lost != 0) & (bits & 1 == 0), outward, 0)
    return bits.view(torch.float64).float()


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a[m, k] @ b[n, k].T`` in float32; scales are ``[m, blocks]`` and ``[n, blocks]``."""
    out = torch.zeros(len(a), len(b), device=a.device)
    for i, k in enumerate(range(0, a.shape[1], BLOCK)):
        sums = chain(a[:, k : k + BLOCK], b[:, k : k + BLOCK]).float()
        out = _fma(sums, scale_a[:, i, None] * scale_b[None, :, i], out)
    return out if bias is None else out + bias.float()
