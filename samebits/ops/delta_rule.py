"""Delta rules and linear attention, whose decoding has the bits of a prefill."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from samebits.backends.delta import layout
from samebits.backends.recurrent import Layout, RecurrentState
from samebits.contract import Contract
from samebits.ops._checks import check_operands, shape
from samebits.ops._delta import normalized
from samebits.ops._recurrent import beginning, check_floats, recur, spans_of

_MOST = 256
"""The largest size of a key or value."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | RecurrentState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    contract: Contract | None = None,
) -> tuple[Tensor, RecurrentState | None]:
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid).

    For every head, with a matrix S of K x V that starts from zeros or from `initial_state`:

    ``S = exp(g[t]) * S``, then ``u = beta[t] * (v[t] - S^T k[t])``, ``S = S + k[t] u^T``, and
    ``o[t] = scale * S^T q[t]``

    It is computed in chunks of 64 tokens, which count from each sequence's first one. A token has the same
    bits in one prefill, in a prefill that goes on, and in decoding, alone and in any batch, packed or padded.
    The docs have the order of every sum: "Recurrent layers" of the contract.

    Args:
        q, k: ``[B, T, H, K]``, bfloat16, float16 or float32; any strides. K is at most 256.
        v: ``[B, T, HV, V]``, of the same dtype. HV is a multiple of H: each head of q and k serves HV / H
            consecutive ones of v. V is at most 256.
        g: ``[B, T, HV]``, logarithms of decays, of any floating dtype; they must be finite. None: no decay.
        beta: ``[B, T, HV]``, of any floating dtype.
        scale: of the results; None: ``1 / sqrt(K)``.
        initial_state: float32 ``[N, HV, K, V]``, a matrix for each of the N sequences, which begin there; or
            the state after their last tokens, from where they go on. Gradients go into a matrix only.
        output_final_state: whether to return the state after the last tokens. If `initial_state` is one, it
            is updated in place and returned.
        use_qk_l2norm_in_kernel: divide each q[t] and k[t] by ``sqrt(sum(x ** 2) + 1e-6)`` first, rounded to
            their dtype.
        cu_seqlens: int32 or int64 ``[N + 1]``: offsets of packed sequences. B must be 1.
        key_start, key_length: int32 or int64 ``[B]``: the tokens of row b are those from ``key_start[b]`` to
            ``key_length[b]`` - 1, as with padding on the left or right. The results of others are 0, and
            their operands, which are not read, get gradients of 0. Not with `cu_seqlens`.
        contract: ``TENSOR_CORE`` (default for bfloat16 and float16) or ``FMA`` (default for float32).

    Returns:
        Results ``[B, T, HV, V]`` of the dtype of v, and the state or None. ``state.matrix`` is the plain
        float32 ``[N, HV, K, V]``, into which gradients go, too.

    Raises:
        TypeError: an operand is no dense tensor, or has another dtype.
        ValueError: shapes, devices or options do not fit.
        NotImplementedError: second derivatives are asked for.
    """
    name = "gated_delta_rule"
    given = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _attend(name, False, *given, key_start, key_length, contract)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | RecurrentState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    contract: Contract | None = None,
) -> tuple[Tensor, RecurrentState | None]:
    """Kimi Delta Attention: :func:`gated_delta_rule` with a decay for each channel of a key.

    ``S = exp(g[t])[:, None] * S``, then ``u = beta[t] * (v[t] - S^T k[t])``, ``S = S + k[t] u^T``, and
    ``o[t] = scale * S^T q[t]``

    Args:
        g: ``[B, T, HV, K]``, logarithms of decays.

    All else is as there.
    """
    given = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return _attend("kda", True, *given, key_start, key_length, contract)


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | RecurrentState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    contract: Contract | None = None,
) -> tuple[Tensor, RecurrentState | None]:
    """Linear attention with decays: lightning attention (MiniMax), retention, and without decays plain.

    ``S = exp(g[t]) * S + k[t] v[t]^T``, and ``o[t] = scale * S^T q[t]``

    Args:
        g: ``[B, T, HV]``, a decay's logarithm for each token.
        g_gamma: ``[HV]``, one for each head: lightning attention's negative slopes. Not both; without either
            nothing decays.

    All else is as in :func:`gated_delta_rule`.
    """
    name = "lightning_attention"
    if g_gamma is not None:
        if g is not None:
            raise ValueError(f"samebits.{name}: g_gamma: expected none with g")
        check_floats(name, "g_gamma", g_gamma, v, "v")
        if v.ndim != 4 or g_gamma.shape != v.shape[2:3]:
            raise ValueError(
                f"samebits.{name}: g_gamma: expected a value for each head of v {shape(v)}, got"
                f" {shape(g_gamma)}"
            )
        g = g_gamma.to(torch.float32).expand(v.shape[:3])
    given = (q, k, v, g, None, scale, initial_state, output_final_state, False, cu_seqlens)
    return _attend(name, False, *given, key_start, key_length, contract)


def state_layout(
    q: Tensor, v: Tensor, *, operation: str = "gated_delta_rule", by_channel: bool = False
) -> Layout:
    """What the states of calls with operands as ``q[B, T, H, K]`` and ``v[B, T, HV, V]`` hold."""
    return layout(operation, v.shape[2], q.shape[3], v.shape[3], q.dtype, by_channel)


def _attend(
    op: str,
    by_channel: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | RecurrentState | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    key_start: Tensor | None,
    key_length: Tensor | None,
    contract: Contract | None,
) -> tuple[Tensor, RecurrentState | None]:
    (q, k, v), key, _ = check_operands(op, contract, {"q": q, "k": k, "v": v})
    _check_shapes(op, by_channel, q, k, v, g, beta)
    scale = float(np.float32(1 / math.sqrt(q.shape[-1]) if scale is None else scale))
    if not math.isfinite(scale):
        raise ValueError(f"samebits.{op}: scale: expected a finite number, got {scale}")
    spans = spans_of(op, q, cu_seqlens, key_start, key_length, key)
    own = state_layout(q, v, operation=op, by_channel=by_channel)
    begin = beginning(op, initial_state, own, len(spans), q)
    if normalize:
        if key_start is not None or key_length is not None:
            q, k = _without_padding(spans, q, k)
        q, k = normalized(q), normalized(k)
    g, beta = (None if t is None else t.to(torch.float32) for t in (g, beta))
    return recur(own, (q, k, v, g, beta), begin, spans, scale, output_final_state, key)


def _without_padding(spans: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``[B, T, H, K]`` each, with zeros outside of the rows' spans, where gradients may be asked for.

    Nothing reads what is there. But a norm's gradient is NaN where its operand is not finite.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return tensors
    at = torch.arange(tensors[0].shape[:2].numel(), device=spans.device).view(tensors[0].shape[:2])
    inside = ((at >= spans[:, :1]) & (at < spans[:, 1:]))[..., None, None]
    return tuple(torch.where(inside, x, 0.0) for x in tensors)


def _check_shapes(
    op: str, by_channel: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> None:
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(
            f"samebits.{op}: q, k: expected [B, T, H, K] of one shape, got {shape(q)} and {shape(k)}"
        )
    if v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"samebits.{op}: v: expected {list(q.shape[:2])} + [HV, V], got {shape(v)}")
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"samebits.{op}: v: expected a multiple of the {q.shape[2]} heads of q, got {v.shape[2]}"
        )
    for name, size in (("q", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= size <= _MOST:
            raise ValueError(f"samebits.{op}: {name}: expected a last size from 1 to {_MOST}, got {size}")
    heads = v.shape[:3]
    for name, t, wanted in (("g", g, (*heads, q.shape[3]) if by_channel else heads), ("beta", beta, heads)):
        if t is None and (op == "lightning_attention" or (name == "g" and not by_channel)):
            continue
        check_floats(op, name, t, q)
        assert t is not None
        if t.shape != wanted:
            raise ValueError(f"samebits.{op}: {name}: expected shape {tuple(wanted)}, got {shape(t)}")
