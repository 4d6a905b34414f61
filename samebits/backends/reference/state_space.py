"""Selective state spaces on CPU tensors: threads run `state_space_kernels` on parts of the channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.backends.reference import state_space_kernels as kernels
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import require_subnormals, rounded
from samebits.functions import CHANNEL_BLOCK

_F32 = torch.float32


def scan(
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    states: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs in float32, and the states ``[sequences, channels, size]`` after each sequence."""
    require_subnormals()
    x, steps, decays, b, c = map(_wide, (x, steps, decays, b, c))
    out = torch.zeros_like(x)
    after = _after(states, offsets, x, b).clone()
    along = x.new_empty(0) if skip is None else _wide(skip)
    arrays = (t.numpy() for t in (b, c, after, along, offsets.to(torch.int64), out))
    given = x.numpy(), steps.numpy(), decays.numpy(), *arrays
    _over_units(x, b, after, lambda *span: kernels.scan(*given, *span))
    return out, rounded(after.view(-1, after.shape[2]), _F32).view_as(after)


def scan_backward(
    grad: Tensor,
    grad_states: Tensor | None,
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In float32: dv, dw, and dB, dC in blocks of channels, dA of each sequence, that of states before."""
    require_subnormals()
    grad, x, steps, decays, b, c = map(_wide, (grad, x, steps, decays, b, c))
    before, adjoints = _after(states, offsets, x, b), _after(grad_states, offsets, x, b).clone()
    groups, size = b.shape[1:]
    blocks = -(-x.shape[1] // groups // CHANNEL_BLOCK)
    dv, dw = torch.zeros_like(x), torch.zeros_like(x)
    db, dc = (x.new_zeros(len(x), groups, blocks, size) for _ in range(2))
    da = torch.zeros_like(adjoints)
    given: tuple[Any, ...] = grad.numpy(), x.numpy(), steps.numpy(), decays.numpy(), b.numpy(), c.numpy()
    given += before.numpy(), adjoints.numpy(), offsets.to(torch.int64).numpy()
    given += tuple(t.numpy() for t in (dv, dw, db, dc, da))
    _over_units(x, b, adjoints, lambda *span: kernels.scan_backward(*given, *span))
    return dv, dw, db, dc, da, adjoints


def _over_units(x: Tensor, b: Tensor, states: Tensor, run: Callable[[int, int], None]) -> None:
    groups, size = b.shape[1:]
    units = len(states) * groups * -(-x.shape[1] // groups // CHANNEL_BLOCK)
    over_rows(x.new_empty(1).expand(units, max(1, x.numel() * size // max(1, units))), run)


def _after(states: Tensor | None, offsets: Tensor, x: Tensor, b: Tensor) -> Tensor:
    if states is not None:
        return _wide(states)
    return x.new_zeros(len(offsets) - 1, x.shape[1], b.shape[2])


def _wide(t: Tensor) -> Tensor:
    return t.detach().to(_F32).contiguous()
