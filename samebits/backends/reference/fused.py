"""Layers of several elementwise steps, as in ``docs/contract.md``, "Fused layers", on CPU tensors.

Single sums, products and roundings are PyTorch's, which are those of IEEE 754.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends.reference import activation_kernels, rows
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import require_subnormals, rounded


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """RMS norm in `dtype` of the rows of `x`, or of their sums with `residual`, and these sums."""
    require_subnormals()
    total = x if residual is None else _rounded(_wide(x) + _wide(residual), x.dtype)
    lines = total.reshape(-1, total.shape[-1]) if total.numel() else total.reshape(0, 0)
    y = rows.norm(lines.to(torch.float32) if once else lines, None, None, eps, False)[0].view(x.shape)
    if weight is not None:
        factor = _wide(weight) if offset == 0 else offset + _wide(weight)
        y = _wide(y) * factor
    return _rounded(_wide(y), dtype), total if residual is not None else x.new_empty(0)


def add_rms_norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
) -> None:
    """The same into `out` and `total`, which may be operands."""
    y, found = add_rms_norm(x, residual, weight, eps, offset, once, out.dtype)
    out.copy_(y)
    if total is not None:
        total.copy_(found)


def add_rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    weighted: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of x and residual; and, if `weighted`, what is summed over rows for that of the weight."""
    require_subnormals()
    n = s.shape[-1]
    h, g = (_wide(t).reshape(-1, n) if n else _wide(t).reshape(0, 0) for t in (s, grad))
    scale = rows.norm(h, None, None, eps, False)[2][:, None]
    y = h * scale
    terms = s.new_empty(0)
    if weight is None:
        of_y = g
    elif once:
        of_y = g * (_wide(weight) if offset == 0 else offset + _wide(weight))
        terms = _rounded(g * y, torch.float32) if weighted else terms
    else:
        of_y = _wide(_rounded(g * _wide(weight), s.dtype))
        terms = _rounded(g * _wide(_rounded(y, s.dtype)), grad.dtype) if weighted else terms
    along = rows.row_sum(of_y * h, False, torch.float32)[:, None]
    of_squares = (-0.5 * along) * (scale * scale * scale) * torch.tensor(1 / max(n, 1), dtype=torch.float32)
    first, second = of_y * scale, of_squares * (2 * h)
    if grad_sum is None:
        found = _rounded(first + second, s.dtype)
    elif s.dtype == torch.float32:  # autograd adds all three where s was not widened
        found = _rounded((_wide(grad_sum).reshape(h.shape) + first) + second, s.dtype)
    else:
        found = _rounded(_wide(grad_sum).reshape(h.shape) + _wide(_rounded(first + second, s.dtype)), s.dtype)
    found = found.view(s.shape)
    return found, terms.view(s.shape) if terms.numel() else terms


def l2norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x ** 2) + eps)`` for each row, contiguous."""
    wide, scale = _inverse_norms(x, eps)
    return _rounded(wide * scale, x.dtype)


def l2norm_backward(x: Tensor, grad: Tensor, eps: float) -> Tensor:
    """The gradient of `x` from that of the result."""
    wide, scale = _inverse_norms(x, eps)
    y, g = wide * scale, _wide(grad)
    along = rows.row_sum((g * y).reshape(-1, x.shape[-1]), False, torch.float32).view(scale.shape)
    return _rounded(scale * (g - y * along), x.dtype)


def _inverse_norms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows of `x` in float32, and ``1 / sqrt(sum(x ** 2) + eps)`` of each."""
    require_subnormals()
    wide = _wide(x)
    squares = rows.row_sum((wide * wide).reshape(-1, x.shape[-1]), False, torch.float32)
    return wide, rows.rsqrt(squares + eps).view(*x.shape[:-1], 1)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[..., H, D]``, of which the first ``2 * pairs`` entries of a head are rotated."""
    require_subnormals()
    factors = [_factors(t, positions, pairs, layout) for t in (cos, sin)]
    between = q.dtype if q.dtype == cos.dtype else torch.float32

    def rotated(x: Tensor) -> Tensor:
        part = _wide(x[..., : 2 * pairs])
        both = part.unflatten(-1, (2, pairs) if layout == "halves" else (pairs, 2))
        a, b = both.unbind(-2 if layout == "halves" else -1)
        (cos_a, cos_b), (sin_a, sin_b) = factors
        products = [_rounded(t, between).float() for t in (a * cos_a, b * sin_a, b * cos_b, a * sin_b)]
        first, second = products[0] - products[1], products[2] + products[3]
        joined = torch.stack((first, second), -1 if layout == "pairs" else -2).flatten(-2)
        found = _rounded(_rounded(joined, between).float(), x.dtype)
        return torch.cat((found, x[..., 2 * pairs :].detach()), -1)

    return rotated(q), q.new_empty(0) if k is None else rotated(k)


def rotary_backward(
    of_q: Tensor | None,
    of_k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    pairs: int,
    layout: str,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys from those of what :func:`rotary` gives."""
    require_subnormals()
    (cos_a, cos_b), (sin_a, sin_b) = (_factors(t, positions, pairs, layout) for t in (cos, sin))
    zero = -0.0 if gradients == "split" else 0.0

    def turned_back(g: Tensor) -> Tensor:
        between = torch.promote_types(g.dtype, cos.dtype) if gradients == "wide" else g.dtype
        part = _wide(g[..., : 2 * pairs])
        a, b = part.unflatten(-1, (pairs, 2)).unbind(-1) if layout == "pairs" else part.chunk(2, -1)
        products = [_rounded(t, between).float() for t in (a * cos_a, b * sin_b, b * cos_b, a * sin_a)]
        first, second = products[0] + products[1], products[2] - products[3]
        joined = torch.stack((first, second), -2 if layout == "halves" else -1).flatten(-2)
        found = _rounded(_rounded(joined, between).float() + zero, g.dtype)
        rest = g[..., 2 * pairs :].detach()
        return torch.cat((found, rest if gradients == "split" else _rounded(_wide(rest) + zero, g.dtype)), -1)

    given = [None if g is None else turned_back(g) for g in (of_q, of_k)]
    lead = next(g for g in given if g is not None)
    q, k = (lead.new_empty(0) if g is None else g for g in given)
    return q, k


def _factors(t: Tensor, positions: Tensor | None, pairs: int, layout: str) -> tuple[Tensor, Tensor]:
    """Cosines or sines of first and of second entries, ``[..., 1, pairs]``. NaN for unknown positions."""
    t = _wide(t)
    if positions is not None:
        known = (positions >= 0) & (positions < len(t))
        t = torch.where(known[..., None], t[torch.where(known, positions, 0)], torch.nan)
    t = t.unsqueeze(-2)
    if t.shape[-1] == pairs:
        return t, t
    if layout == "pairs":
        return t[..., ::2], t[..., 1::2]
    return t[..., :pairs], t[..., pairs:]


def rotary_into(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    pairs: int,
    layout: str,
) -> None:
    """The same into `q_out` and `k_out`, which may be `q` and `k`."""
    found = rotary(q, k, cos, sin, positions, pairs, layout)
    q_out.copy_(found[0])
    if k_out is not None:
        k_out.copy_(found[1])


def norm_rotary(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[..., H, D]`` with norms of heads and then positions."""
    normed = [
        None if x is None else add_rms_norm(x, None, w, eps, offset, once, q.dtype)[0]
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    assert normed[0] is not None
    return rotary(normed[0], normed[1], cos, sin, positions, pairs, layout)


def norm_rotary_into(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_out: Tensor,
    k_out: Tensor | None,
    *options: Any,
) -> None:
    """The same into `q_out` and `k_out`, which may be `q` and `k`."""
    found = norm_rotary(q, k, q_weight, k_weight, cos, sin, positions, *options)
    q_out.copy_(found[0])
    if k_out is not None:
        k_out.copy_(found[1])


def norm_rotary_backward(
    of_q: Tensor | None,
    of_k: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
    pairs: int,
    layout: str,
    gradients: str,
    of_q_weight: bool,
    of_k_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `q` and `k`, and what is summed over heads for those of the weights: `q`'s, then `k`'s."""
    back = rotary_backward(of_q, of_k, cos, sin, positions, pairs, layout, gradients)
    grads, terms = ([q.new_empty(0) for _ in range(2)] for _ in range(2))
    given = (of_q, q, q_weight, of_q_weight), (of_k, k, k_weight, of_k_weight)
    for i, (g, x, weight, asked) in enumerate(given):
        if g is not None and x is not None:
            grads[i], terms[i] = add_rms_norm_backward(back[i], None, x, weight, eps, offset, once, asked)
    return grads[0], grads[1], terms[0], terms[1]


def gated(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    once: bool,
    interleaved: bool,
) -> Tensor:
    """``activation(gate) * up``, contiguous. Without `up`, a row of `gate` has both."""
    require_subnormals()
    gate, up = _apart(gate, up, interleaved)
    bound = _bound(limit, gate.dtype)
    g, u = torch.minimum(_wide(gate), bound), torch.maximum(torch.minimum(_wide(up), bound), -bound)
    if activation == "gpt_oss":
        u = _wide(_rounded(u + 1, gate.dtype))
    between = torch.float32 if once else gate.dtype
    return _rounded(_wide(_activated(g, activation, alpha, between)) * u, gate.dtype)


def gated_into(
    gate: Tensor, up: Tensor | None, out: Tensor, activation: str, limit: float, alpha: float, once: bool
) -> None:
    """The same into `out`, which may be an operand."""
    out.copy_(gated(gate, up, activation, limit, alpha, once, False))


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    once: bool,
    interleaved: bool,
    of_gate: bool,
    of_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and factor; without `up` that of what has both, and nothing."""
    require_subnormals()
    a, b = (_wide(t) for t in _apart(gate, up, interleaved))
    dtype, bound, g = gate.dtype, _bound(limit, gate.dtype), _wide(grad)
    factor = torch.maximum(torch.minimum(b, bound), -bound)
    if activation == "gpt_oss":
        factor = _wide(_rounded(factor + 1, dtype))
    capped = torch.minimum(a, bound)
    between = torch.float32 if once else dtype
    of_activation = _wide(_rounded(g * factor, between))
    found = _rounded(_wide(_gradient(of_activation, capped, activation, alpha, between)), dtype)
    of_factor = _rounded(g * _wide(_activated(capped, activation, alpha, between)), dtype)
    if not math.isinf(limit):
        found = torch.where(a <= bound, found, 0.0)
        of_factor = torch.where((b >= -bound) & (b <= bound), of_factor, 0.0)
    if up is not None:
        return found if of_gate else gate.new_empty(0), of_factor if of_up else gate.new_empty(0)
    if interleaved:  # as autograd adds gradients of slices to zeros: -0 becomes +0
        both = torch.stack((found, of_factor), -1).flatten(-2)
        return _rounded(_wide(both) + 0.0, dtype), gate.new_empty(0)
    return torch.cat((found, of_factor), -1), gate.new_empty(0)


def _apart(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    first, second = gate.chunk(2, -1)
    return first, second


def _bound(limit: float, dtype: torch.dtype) -> Tensor:
    return _rounded(torch.tensor([limit], dtype=torch.float64).float(), dtype).float()


def activation(x: Tensor, name: str) -> Tensor:
    """An activation alone, rounded, contiguous."""
    require_subnormals()
    return _activated(_wide(x), name, 0.0, x.dtype)


def activation_backward(grad: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient of :func:`activation`, rounded, contiguous."""
    require_subnormals()
    return _gradient(_wide(grad), _wide(x), name, 0.0, x.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """silu, sigmoid or a form of gelu in float32, contiguous."""
    wide = _wide(x).contiguous().reshape(-1, _length(x))
    out = torch.empty_like(wide)
    which = getattr(activation_kernels, activation.upper())
    over_rows(wide, lambda *span: activation_kernels.activate(wide.numpy(), out.numpy(), which, *span))
    return out.view(x.shape)


def _activated(x: Tensor, activation: str, alpha: float, dtype: torch.dtype) -> Tensor:
    """Any activation of float32 values, rounded to `dtype`."""
    if activation.startswith("relu"):
        x = torch.where(x <= 0, 0.0, x)
        return _rounded(x * x if activation == "relu2" else x, dtype)
    if activation == "gpt_oss":
        return _rounded(x * _wide(_weight(x, alpha, dtype)), dtype)
    return _rounded(activated(x, activation), dtype)


def _weight(x: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    return _rounded(activated(_rounded(x * alpha, dtype), "sigmoid"), dtype)


def _gradient(g: Tensor, x: Tensor, activation: str, alpha: float, dtype: torch.dtype) -> Tensor:
    """The gradient of an activation of x, given that of its result, both in float32, rounded to `dtype`."""
    if activation.startswith("relu"):
        found = g * _wide(_rounded(x + x, dtype)) if activation == "relu2" else g
        return _rounded(torch.where(x <= 0, 0.0, found), dtype)
    if activation == "sigmoid":
        y = _wide(_rounded(activated(x, "sigmoid"), dtype))
        return _rounded((g * (1 - y)) * y, dtype)
    if activation == "gpt_oss":
        weight = _wide(_weight(x, alpha, dtype))
        of_weight = _wide(_rounded(g * x, dtype))
        of_scaled = _wide(_rounded((of_weight * (1 - weight)) * weight, dtype))
        return _rounded(_wide(_rounded(g * weight, dtype)) + _wide(_rounded(of_scaled * alpha, dtype)), dtype)
    grads, lines = (t.contiguous().reshape(-1, _length(x)) for t in (g, x))
    out = torch.empty_like(lines)
    which = getattr(activation_kernels, activation.upper())
    arrays = grads.numpy(), lines.numpy(), out.numpy()
    over_rows(lines, lambda *span: activation_kernels.differentiate(*arrays, which, *span))
    return _rounded(out.view(x.shape), dtype)


def _length(x: Tensor) -> int:
    """Of rows in which functions of one value are computed. Those without entries could be any number."""
    return max(1, x.shape[-1]) if x.ndim else 1


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once to `dtype`, in the shape of `x`. Every NaN becomes the canonical one."""
    return rounded(x.reshape(1, -1), dtype).view(x.shape)
