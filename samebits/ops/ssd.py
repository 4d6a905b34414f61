"""The state space of Mamba 2 (SSD), whose decoding has the bits of a prefill."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends.delta import Steps, layout
from samebits.backends.recurrent import Layout, RecurrentState
from samebits.contract import Contract
from samebits.ops._checks import check_operands
from samebits.ops._fused import check_tensors
from samebits.ops._packed import check_packed, offsets_of
from samebits.ops._recurrent import beginning, recur, spans_of
from samebits.ops._rows import rounded
from samebits.ops._ssd_steps import ssd_steps
from samebits.ops._state_space import bounds_of, check_sizes, dimensions, expect
from samebits.ops.activation import activation

__all__ = ["ssd", "ssd_layout"]

_OP = "ssd"
_MOST = 256
"""The largest P."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | RecurrentState | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    *,
    key_start: Tensor | None = None,
    key_length: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor | tuple[Tensor, RecurrentState]:
    """The state space of Mamba 2, as ``mamba_chunk_scan_combined`` of ``mamba-ssm``. For each head::

        u_t = clamp(softplus(dt_t + dt_bias), *dt_limit)           # without dt_softplus: the sum alone
        S_t[p, n] = exp(u_t A) S_(t-1)[p, n] + u_t x_t[p] B_t[n]
        y_t[p] = sum over n of S_t[p, n] C_t[n] + D x_t[p],    times silu(z_t[p]) where there is a z

    with B and C of the head's group. It is linear attention in chunks of 64 tokens, which count from each
    sequence's first one: ``docs/contract.md``, "Recurrent layers". So a token has the same bits in one
    prefill, in pieces of it, and in decoding, which is a call with the state and one token; alone and in any
    batch, packed or padded. Results are rounded once, after D and z.

    ::

        y, state = samebits.ssd(x, dt, A, B, C, D=D, return_final_states=True)
        y, state = samebits.ssd(..., initial_states=state, return_final_states=True)  # goes on, in place

    Args:
        x: ``[batch, T, heads, P]``; bfloat16, float16 or float32, any strides. P is at most 256.
        dt: ``[batch, T, heads]``.
        A: ``[heads]``.
        B, C: ``[batch, T, groups, N]`` of the dtype of `x`, N <= 256. A group has heads / groups heads, one
            after the other.
        chunk_size: ignored.
        D: ``[heads]`` or ``[heads, P]``.
        z: like `x`.
        dt_bias: ``[heads]``.
        initial_states: ``[batch, heads, P, N]``, with `cu_seqlens` ``[sequences, heads, P, N]``: sequences
            begin there. Or the state after their last tokens, from where they go on. None: zeros.
        seq_idx: int32 or int64 ``[batch, T]``: neighbours of a row with different numbers belong to different
            sequences. Not with states. It waits for a GPU.
        cu_seqlens: offsets of packed sequences, int32 or int64 ``[sequences + 1]``, with a batch of 1.
        dt_softplus, dt_limit: see above.
        return_final_states: return the states after the last tokens, too. A state that was given is updated
            in place and returned.
        key_start, key_length: int32 or int64 ``[batch]``: the tokens of row b are those from ``key_start[b]``
            to ``key_length[b]`` - 1, as with padding on the left or right. The results of others are 0, and
            get gradients of 0, if their `z` and `dt` are finite; the other operands are not read there. Not
            with `seq_idx` or `cu_seqlens`.
        contract: ``TENSOR_CORE`` (default for bfloat16 and float16) or ``FMA`` (default for float32).

    Returns:
        ``[batch, T, heads, P]`` in the dtype of `x`; with `return_final_states` also the state, whose
        ``matrix`` is the plain float32 ``[sequences, heads, P, N]``.

    Raises:
        TypeError: a tensor is not dense, or of another dtype.
        ValueError: shapes or devices do not match.

    Gradients of all tensors are implemented, those of plain states too; second derivatives are not.
    """
    plain = initial_states if isinstance(initial_states, Tensor) else None
    check_tensors(_OP, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=plain)
    (x, B, C), key, _ = check_operands(_OP, contract, {"x": x, "B": B, "C": C}, autocast=False)
    batch, tokens, heads, size = dimensions(_OP, "x", x, "[batch, T, heads, P]")
    groups, states = dimensions(_OP, "B", B, "[batch, T, groups, N]")[2:]
    expect(_OP, "dt", dt, (batch, tokens, heads))
    expect(_OP, "A", A, (heads,))
    expect(_OP, "B", B, (batch, tokens, groups, states))
    expect(_OP, "C", C, (batch, tokens, groups, states))
    expect(_OP, "D", D, (heads,), (heads, size))
    expect(_OP, "z", z, tuple(x.shape))
    expect(_OP, "dt_bias", dt_bias, (heads,))
    check_packed(_OP, x, tokens, seq_idx, cu_seqlens, initial_states is not None or return_final_states)
    check_sizes(_OP, heads, groups, states)
    if not 1 <= size <= _MOST:
        raise ValueError(f"samebits.{_OP}: x: expected P from 1 to {_MOST}, got {size}")
    if seq_idx is None and cu_seqlens is None:
        spans = spans_of(_OP, x, None, key_start, key_length, key, "x")
    elif key_start is not None or key_length is not None:
        packed = "cu_seqlens" if seq_idx is None else "seq_idx"
        raise ValueError(f"samebits.{_OP}: key_start, key_length: expected none with {packed}")
    else:  # which are checked above
        offsets = offsets_of(batch, tokens, seq_idx, cu_seqlens, x)
        spans = torch.stack([offsets[:-1], offsets[1:]], 1)
    expect(_OP, "initial_states", plain, (len(spans), heads, size, states))
    own = ssd_layout(x, B)
    if plain is None:
        begin = beginning(_OP, initial_states, own, len(spans), x, "initial_states", "x")
    else:
        begin = plain.to(torch.float32).mT.contiguous(), None
    limits = bounds_of(_OP, dt_limit)
    given = (dt.flatten(0, 1), dt_bias, A.to(torch.float32).contiguous(), D)
    options: dict[str, Any] = {"wide": z is not None}
    decays = None
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, B, C, *given))
    if begin[1] is None or recorded:
        weights, decays, skip = ssd_steps(*given, size, dt_softplus, *limits)
        options |= {"weights": weights, "skip": None if D is None else skip}
        decays = decays.view(dt.shape)
    else:
        options["steps"] = Steps(*given, dt_softplus, *limits)
    operands = (C, B, x, decays, None)
    y, state = recur(own, operands, begin, spans, 1.0, return_final_states, key, **options)
    if z is not None:
        y = rounded(y * activation(z.to(torch.float32), "silu"), x.dtype)
    return y if state is None else (y, state)


def ssd_layout(x: Tensor, B: Tensor) -> Layout:
    """What the states of calls with such ``x[batch, T, heads, P]`` and ``B[batch, T, groups, N]`` hold."""
    return layout(_OP, x.shape[2], B.shape[3], x.shape[3], x.dtype, weighted=True)
