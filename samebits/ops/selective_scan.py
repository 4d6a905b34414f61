"""The scan of Mamba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import module_for
from samebits.backends.selective_scan import empty_as
from samebits.ops import _rows
from samebits.ops._checks import shape
from samebits.ops._fused import check_tensors
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._packed import check_packed, offsets_of
from samebits.ops._state_space import check_sizes, dimensions, expect

__all__ = ["selective_scan"]

_F32 = torch.float32


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba, as ``selective_scan_fn`` of ``mamba-ssm``. For each channel d, with its group::

        r_t = softplus(delta_t + delta_bias)                       # without delta_softplus: the sum alone
        S_t[n] = exp(r_t A[n]) S_(t-1)[n] + r_t u_t B_t[n]
        y_t = sum over n of S_t[n] C_t[n] + D u_t,    times silu(z_t) where there is a z

    All is in float32, token after token, with one rounding to the dtype of `u` at the end:
    ``docs/contract.md``, "State spaces". So a token has the same bits in a prefill, in pieces of it and in
    decoding (:func:`selective_state_update`), in a batch, in packed sequences and behind padding whose `u` is
    zero.

    Args:
        u: ``[batch, channels, T]``; bfloat16, float16 or float32, any strides.
        delta: like `u`.
        A: ``[channels, N]``, N <= 256.
        B, C: ``[batch, N, T]`` or ``[batch, groups, N, T]``.
        D, delta_bias: ``[channels]``.
        z: like `u`.
        delta_softplus: see above.
        return_last_state: return the states after the last tokens, too.
        initial_state: ``[batch, channels, N]``, with `cu_seqlens` ``[sequences, channels, N]``. None: zeros.
        seq_idx, cu_seqlens: as of :func:`ssd`.

    Returns:
        ``[batch, channels, T]`` in the dtype of `u`; with `return_last_state` also the states, float32.

    Raises:
        As :func:`ssd`.
    """
    op, tensors = "selective_scan", {"u": u, "delta": delta, "A": A, "B": B, "C": C}
    check_tensors(op, **tensors, D=D, z=z, delta_bias=delta_bias, initial_state=initial_state)
    if u.ndim != 3 or A.ndim != 2:
        raise ValueError(
            f"samebits.{op}: u, A: expected [batch, channels, T] and [channels, N], got {shape(u)} and"
            f" {shape(A)}"
        )
    (batch, channels, tokens), states = u.shape, A.shape[1]
    B, C = (t[:, None] if t.ndim == 3 else t for t in (B, C))
    groups = dimensions(op, "B", B, "[batch, N, T] or [batch, groups, N, T]")[1]
    expect(op, "delta", delta, (batch, channels, tokens))
    expect(op, "A", A, (channels, states))
    expect(op, "B", B, (batch, groups, states, tokens))
    expect(op, "C", C, (batch, groups, states, tokens))
    expect(op, "D", D, (channels,))
    expect(op, "z", z, (batch, channels, tokens))
    expect(op, "delta_bias", delta_bias, (channels,))
    check_packed(op, u, tokens, seq_idx, cu_seqlens, initial_state is not None or return_last_state, "u")
    check_sizes(op, channels, groups, states)
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    expect(op, "initial_state", initial_state, (rows, channels, states))
    packed = seq_idx is not None or cu_seqlens is not None
    y, after = _operator(
        *(u, delta, A.to(_F32), B, C),
        *(_wide(D), z, _wide(delta_bias), _wide(initial_state)),
        offsets_of(batch, tokens, seq_idx, cu_seqlens, u) if packed else None,
        delta_softplus,
    )
    return (y, after) if return_last_state else y


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(_F32)


# ---- the operator


def _backend(t: Tensor) -> Any:
    return module_for("selective_scan", t)[0]


def _forward(u: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _backend(u).scan(u, *given)
    return found


def _fake(u: Tensor, delta: Tensor, A: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    offsets = given[-2]
    sequences = u.shape[0] if offsets is None else offsets.shape[0] - 1
    return empty_as(u, u.dtype), u.new_empty((sequences, *A.shape), dtype=_F32)


_OPERANDS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? bias,"
    " Tensor? states, Tensor? offsets, bool softplus"
)
_operator = Operator(
    f"selective_scan({_OPERANDS}) -> (Tensor, Tensor)",
    cpu=_forward,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softplus = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, saved: tuple[Any, ...], grad: Tensor | None, grad_states: Tensor | None
) -> tuple[Any, ...]:
    refuse_second_derivatives("selective_scan")
    grad = torch.zeros_like(saved[0]) if grad is None else grad
    found = _gradients(grad, grad_states, *saved, ctx.softplus)
    given = (t if of is not None else None for t, of in zip(found, saved[:-1], strict=True))
    return *given, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_gradients(grad: Tensor, grad_states: Tensor | None, u: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Of u, delta, A, B, C, D, z, bias and states; those of what is None are empty."""
    found = _backend(u).scan_backward(grad, grad_states, u, *given)
    du, ddelta, dz, of_sequences, dB, dC, *terms, before = found
    rows, none = _rows.backend(u), u.new_empty(0, dtype=_F32)
    dA = rows.column_sum(of_sequences.flatten(1), _F32).view(given[1].shape)
    dD, dbias = (none.clone() if t is None else rows.column_sum(t, _F32) for t in terms)
    dz = u.new_empty(0) if dz is None else dz
    return du, ddelta, dA, dB, dC, dD, dz, dbias, before


def _fake_gradients(grad: Tensor, grad_states: Tensor | None, u: Tensor, *given: Any) -> tuple[Tensor, ...]:
    delta, A, B, C, D, z, bias, _, offsets, _ = given
    none = u.new_empty(0, dtype=_F32)
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (A, B, C)]
    sequences = u.shape[0] if offsets is None else offsets.shape[0] - 1
    return (
        *(empty_as(u, u.dtype), empty_as(u, delta.dtype), *like),
        none if D is None else torch.empty_like(D, memory_format=torch.contiguous_format),
        u.new_empty(0) if z is None else empty_as(u, z.dtype),
        none.clone() if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format),
        u.new_empty((sequences, *A.shape), dtype=_F32),
    )


_gradients = Operator(
    f"selective_scan_backward(Tensor grad, Tensor? grad_states, {_OPERANDS})"
    f" -> ({', '.join(['Tensor'] * 9)})",
    cpu=_run_gradients,
    fake=_fake_gradients,
)
