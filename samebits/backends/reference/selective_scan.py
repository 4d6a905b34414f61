"""Mamba's scan on CPU tensors: `state_space`, with what happens to steps and outputs around it."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.reference import state_space
from samebits.backends.reference.fused import activated, activation_backward
from samebits.backends.reference.matmul import rounded
from samebits.backends.reference.rows import row_sum
from samebits.backends.selective_scan import laid_out

_F32 = torch.float32


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor | None,
    offsets: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs in the dtype and the layout of `u`, and the states after each sequence."""
    steps, _ = _steps(delta, bias, softplus)
    y, after = _scanned(u, steps, A, B, C, D, states, offsets)
    if z is not None:
        y = y * activated(_rows(z), "silu")
    return _as(u, rounded(y, u.dtype)), after


def step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor,
    softplus: bool,
    lowest: float,
    highest: float,
) -> Tensor:
    """Outputs of one token of each sequence, from raw dt, with their gates; `states` are moved on."""
    steps = _steps(dt[..., None], bias, softplus)[0].clamp(lowest, highest)
    y, after = state_space.scan(x, steps, A, B, C, D, states, torch.arange(len(x) + 1))
    states.copy_(after)
    return rounded(y if z is None else y * activated(z, "silu"), x.dtype)


def scan_backward(
    grad: Tensor,
    grad_states: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor | None,
    offsets: Tensor | None,
    softplus: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of u, delta, z, A (of each sequence), B, C, D, bias, and of the states before.

    Those of D and bias are terms for each token of all rows, ``[tokens, channels]``, in float32.
    """
    steps, raw = _steps(delta, bias, softplus)
    g, x, dz = _rows(grad), _rows(u), None
    if z is not None:
        gate = _rows(z)
        y, _ = _scanned(u, steps, A, B, C, D, states, offsets)
        dz = _as(u, rounded(activation_backward(g * y, gate, "silu"), z.dtype))
        g = g * activated(gate, "silu")
    dv, dw, db, dc, da, before = state_space.scan_backward(
        *(g, grad_states, x, steps, A, _of_tokens(B), _of_tokens(C), states, _offsets(u, offsets))
    )
    du = dv * steps if D is None else dv * steps + g * D
    dr = dv * x + dw
    if softplus:
        dr = dr * activated(raw, "sigmoid")
    return (
        *(_as(u, rounded(du, u.dtype)), _as(u, rounded(dr, delta.dtype)), dz, da),
        *(_over_blocks(t, of) for t, of in ((db, B), (dc, C))),
        *(None if D is None else g * x, None if bias is None else dr, before),
    )


def _over_blocks(terms: Tensor, of: Tensor) -> Tensor:
    """Sums of ``terms[tokens of all rows, groups, blocks, N]``, in the dtype and shape of B or C."""
    batch, groups, size, tokens = of.shape
    each = terms.view(batch, tokens, groups, terms.shape[2], size).permute(0, 2, 4, 1, 3)
    return row_sum(each.reshape(of.numel(), terms.shape[2]), False, of.dtype).view(of.shape)


def _scanned(
    u: Tensor,
    steps: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    states: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs before their gates in float32, ``[tokens, channels]``, and the states after each sequence."""
    given = _rows(u), steps, A, _of_tokens(B), _of_tokens(C), D, states, _offsets(u, offsets)
    return state_space.scan(*given)


def _steps(delta: Tensor, bias: Tensor | None, softplus: bool) -> tuple[Tensor, Tensor]:
    """Steps ``[tokens, channels]``, and what softplus takes."""
    raw = _rows(delta) if bias is None else _rows(delta) + bias
    return activated(raw, "softplus") if softplus else raw, raw


def _offsets(u: Tensor, offsets: Tensor | None) -> Tensor:
    return torch.arange(len(u) + 1) * u.shape[2] if offsets is None else offsets


def _rows(t: Tensor) -> Tensor:
    """``[tokens of all rows, channels]`` of ``[batch, channels, T]``, in float32."""
    return t.detach().to(_F32).transpose(1, 2).flatten(0, 1)


def _of_tokens(t: Tensor) -> Tensor:
    """``[tokens of all rows, groups, N]`` of B or C."""
    return t.permute(0, 3, 1, 2).flatten(0, 1)


def _as(u: Tensor, rows: Tensor) -> Tensor:
    """``[batch, channels, T]`` of rows of channels, in the layout of `u`."""
    return laid_out(u, rows.view(len(u), u.shape[2], u.shape[1]).transpose(1, 2))
