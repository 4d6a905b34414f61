"""Delta rules and linear attention, whose decoding has the bits of a prefill."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from samebits.backends import Key
from samebits.backends.delta import layout
from samebits.backends.recurrent import Layout, RecurrentState
from samebits.contract import Contract
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._delta import attend_linearly, normalized
from samebits.ops._sequences import assert_cu_seqlens, check_cu_seqlens

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
        _check_floats(name, "g_gamma", g_gamma, v)
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
    spans = _spans(op, q, cu_seqlens, key_start, key_length, key)
    own = state_layout(q, v, operation=op, by_channel=by_channel)
    initial, state = _beginning(op, initial_state, own, len(spans), q)
    if output_final_state and state is None:
        state = RecurrentState(own, sequences=len(spans), device=q.device)
        if initial is not None:
            state.parts["matrix"].copy_(initial.detach())
    elif state is not None and not output_final_state:
        state = state.clone()
    if normalize:
        q, k = normalized(q), normalized(k)
    g, beta = (None if t is None else t.to(torch.float32).flatten(0, 1) for t in (g, beta))
    records = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, g, beta, initial)
    )
    data, closes = None if state is None else state.data, output_final_state and records
    out, closed = attend_linearly(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), g, beta, initial, data, spans, scale, closes, key
    )
    out = out.unflatten(0, v.shape[:2])
    if state is None or not output_final_state:
        return out, None
    return out, state.advanced(closed if closes else None, functools.partial(_closed, key=key))


def _closed(state: RecurrentState, key: Key) -> Tensor:
    """The matrices after the last tokens: of a call without any."""
    p = state.parts
    _, heads, key_size, size = p["matrix"].shape
    dtype, new = p["keys"].dtype, state.data.new_empty
    q, v = new((0, heads, key_size), dtype=dtype), new((0, heads, size), dtype=dtype)
    g = new((0, heads, key_size) if p["decays"].ndim == 4 else (0, heads))
    spans = torch.zeros(len(state), 2, dtype=torch.int32, device=state.data.device)
    with torch.no_grad():
        return attend_linearly(q, q, v, g, None, None, state.data.clone(), spans, 1.0, True, key)[1]


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
        _check_floats(op, name, t, q)
        assert t is not None
        if t.shape != wanted:
            raise ValueError(f"samebits.{op}: {name}: expected shape {tuple(wanted)}, got {shape(t)}")


def _check_floats(op: str, name: str, t: Tensor | None, q: Tensor) -> None:
    """Refuse anything but a dense tensor of floats on the device of `q`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
    check_operands(op, None, {name: t}, autocast=False)
    check_device(op, name, t, "q", q)


def _spans(
    op: str,
    q: Tensor,
    cu_seqlens: Tensor | None,
    key_start: Tensor | None,
    key_length: Tensor | None,
    key: Key,
) -> Tensor:
    """The first token of each sequence and the one after its last, in the tokens of the whole batch.

    Rows of a batch that are sequences need none: see :class:`samebits.backends.delta.Delta`.
    """
    batch, tokens = q.shape[:2]
    if cu_seqlens is not None:
        _check_integers(op, "cu_seqlens", cu_seqlens, None, q)
        if key_start is not None or key_length is not None:
            raise ValueError(f"samebits.{op}: key_start, key_length: expected none with cu_seqlens")
        if batch != 1:
            raise ValueError(f"samebits.{op}: q: expected a batch of 1 with cu_seqlens, got {batch}")
        if not q.is_cuda:
            check_cu_seqlens(op, cu_seqlens, tokens)
        else:
            assert_cu_seqlens(op, cu_seqlens, tokens, key)
        return torch.stack([cu_seqlens[:-1], cu_seqlens[1:]], 1).to(torch.int32)
    if key_start is None and key_length is None:
        return q.new_empty((batch, 0), dtype=torch.int32)  # so a step of decoding is one launch
    rows = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None] * tokens
    start, stop = torch.zeros_like(rows), torch.full_like(rows, tokens)
    for name, t in (("key_start", key_start), ("key_length", key_length)):
        if t is not None:
            _check_integers(op, name, t, batch, q)
            if name == "key_start":
                start = t.to(torch.int32)[:, None].clamp(0, tokens)
            else:
                stop = t.to(torch.int32)[:, None].clamp(0, tokens)
            if not q.is_cuda and bool(((t < 0) | (t > tokens)).any()):
                raise ValueError(f"samebits.{op}: {name}: expected values in [0, {tokens}], got {t.tolist()}")
    return torch.cat([start, torch.maximum(start, stop)], 1) + rows


def _check_integers(op: str, name: str, t: Tensor, size: int | None, q: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.{op}: {name}: expected a Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"samebits.{op}: {name}: expected int32 or int64, got {t.dtype}")
    check_device(op, name, t, "q", q)
    if t.ndim != 1 or (size is not None and len(t) != size):
        raise ValueError(f"samebits.{op}: {name}: expected shape ({size or 'n'},), got {shape(t)}")


def _beginning(
    op: str, given: Tensor | RecurrentState | None, own: Layout, sequences: int, q: Tensor
) -> tuple[Tensor | None, RecurrentState | None]:
    """What sequences start from: matrices, or states."""
    if given is None:
        return None, None
    if isinstance(given, RecurrentState):
        if given.layout.parts != own.parts:
            raise ValueError(
                f"samebits.{op}: initial_state: expected a state of such heads, sizes and dtype, got a"
                f" {given!r}"
            )
        if len(given) != sequences:
            raise ValueError(
                f"samebits.{op}: initial_state: expected {sequences} sequences, got {len(given)}"
            )
        check_device(op, "initial_state", given.data, "q", q)
        return None, given
    _check_floats(op, "initial_state", given, q)
    wanted = (sequences, *own.parts[0].shape)
    if given.dtype != torch.float32:
        raise TypeError(f"samebits.{op}: initial_state: expected float32, got {given.dtype}")
    if given.shape != wanted:
        raise ValueError(f"samebits.{op}: initial_state: expected shape {wanted}, got {shape(given)}")
    return given, None
