"""Selective state spaces: the scan of Mamba, that of Mamba 2 (SSD), and a step of either."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends import module_for
from samebits.ops import _rows
from samebits.ops._checks import shape
from samebits.ops._fused import check_tensors, refuse_gradients
from samebits.ops._memory import check_written
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._packed import check_packed, offsets_of
from samebits.ops._rows import rounded
from samebits.ops._state_space import check_sizes, dimensions, expect
from samebits.ops.activation import activation
from samebits.ops.expand import expand

__all__ = ["selective_state_update", "ssd"]


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
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The state space of Mamba 2, as ``mamba_chunk_scan_combined`` of ``mamba-ssm``. For each head::

        u_t = clamp(softplus(dt_t + dt_bias), *dt_limit)           # without dt_softplus: the sum alone
        S_t[p, n] = exp(u_t A) S_(t-1)[p, n] + u_t x_t[p] B_t[n]
        y_t[p] = sum over n of S_t[p, n] C_t[n] + D x_t[p],    times silu(z_t[p]) where there is a z

    with B and C of the head's group. All is in float32, token after token, with one rounding to the dtype of
    `x` at the end: ``docs/contract.md``, "State spaces". So a token has the same bits in a prefill, in pieces
    of it and in decoding (:func:`selective_state_update`), in a batch, in packed sequences and behind padding
    whose `x` is zero; the state is the running one, and `chunk_size` has no meaning.

    Args:
        x: ``[batch, T, heads, P]``; bfloat16, float16 or float32, any strides.
        dt: ``[batch, T, heads]``.
        A: ``[heads]``.
        B, C: ``[batch, T, groups, N]``, N <= 256. A group has heads / groups heads, one after the other.
        chunk_size: ignored.
        D: ``[heads]`` or ``[heads, P]``.
        z: like `x`.
        dt_bias: ``[heads]``.
        initial_states: ``[batch, heads, P, N]``, with `cu_seqlens` ``[sequences, heads, P, N]``. None: zeros.
        seq_idx: int32 or int64 ``[batch, T]``: neighbours of a row with different numbers belong to different
            sequences. Not with states. It waits for a GPU.
        cu_seqlens: offsets of packed sequences, int32 or int64 ``[sequences + 1]``, with a batch of 1.
        dt_softplus, dt_limit: see above.
        return_final_states: return the states after the last tokens, too.

    Returns:
        ``[batch, T, heads, P]`` in the dtype of `x`; with `return_final_states` also the states, float32, in
        the shape of `initial_states`.

    Raises:
        TypeError: a tensor is not dense, or of another dtype.
        ValueError: shapes or devices do not match.

    Gradients of all tensors are implemented, second derivatives are not.
    """
    check_tensors("ssd", x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    batch, tokens, heads, size = dimensions("ssd", "x", x, "[batch, T, heads, P]")
    groups, states = dimensions("ssd", "B", B, "[batch, T, groups, N]")[2:]
    expect("ssd", "dt", dt, (batch, tokens, heads))
    expect("ssd", "A", A, (heads,))
    expect("ssd", "B", B, (batch, tokens, groups, states))
    expect("ssd", "C", C, (batch, tokens, groups, states))
    expect("ssd", "D", D, (heads,), (heads, size))
    expect("ssd", "z", z, tuple(x.shape))
    expect("ssd", "dt_bias", dt_bias, (heads,))
    check_packed("ssd", x, tokens, seq_idx, cu_seqlens, initial_states is not None or return_final_states)
    check_sizes("ssd", heads, groups, states)
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    expect("ssd", "initial_states", initial_states, (rows, heads, size, states))
    skip = None
    if D is not None:
        wide = D.to(torch.float32)
        skip = expand(wide[:, None] if D.ndim == 1 else wide, (heads, size)).reshape(-1)
    y, after = _scanned(
        x.flatten(2).flatten(0, 1),
        _steps(dt, dt_bias, dt_softplus, dt_limit).flatten(0, 1),
        A.to(torch.float32)[:, None],
        B.flatten(0, 1),
        C.flatten(0, 1),
        skip,
        None if initial_states is None else initial_states.to(torch.float32).flatten(1, 2),
        offsets_of(batch, tokens, seq_idx, cu_seqlens, x),
        False,
        None if z is None else z.flatten(2).flatten(0, 1),
    )
    y = y.view(x.shape)
    return (y, after.view(rows, heads, size, states)) if return_final_states else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
) -> Tensor:
    """The next token of :func:`ssd` or :func:`selective_scan`, as that of ``mamba-ssm``.

    Heads have `dt`, `A`, `D` and `dt_bias` for each channel here; those of :func:`ssd` are expanded views.

    Args:
        state: float32 ``[batch, channels, N]`` or ``[batch, heads, P, N]``, written in place.
        x, dt, z: ``[batch, channels]`` or ``[batch, heads, P]``.
        A: ``[channels, N]`` or ``[heads, P, N]``.
        B, C: ``[batch, N]`` or ``[batch, groups, N]``.
        D, dt_bias: ``[channels]`` or ``[heads, P]``.
        dt_softplus: see there.
        dt_limit: as in :func:`ssd`. None: no bounds, as in :func:`selective_scan`.

    Returns:
        The shape and dtype of `x`.

    Raises:
        As :func:`ssd`. NotImplementedError: a gradient is asked for.
    """
    op = "selective_state_update"
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    check_tensors(op, **tensors)
    check_written(op, "state", state, torch.float32, "x", x)
    refuse_gradients(op, **tensors)
    if state.ndim not in (3, 4) or x.shape != state.shape[:-1]:
        raise ValueError(
            f"samebits.{op}: state, x: expected [batch, channels, N] and [batch, channels], or [batch, heads,"
            f" P, N] and [batch, heads, P], got {shape(state)} and {shape(x)}"
        )
    B, C = (t[:, None] if t.ndim == 2 else t for t in (B, C))
    groups = dimensions(op, "B", B, "[batch, N] or [batch, groups, N]")[1]
    of_channels, states = tuple(x.shape[1:]), state.shape[-1]
    expect(op, "dt", dt, tuple(x.shape))
    expect(op, "A", A, (*of_channels, states))
    expect(op, "B", B, (len(x), groups, states))
    expect(op, "C", C, (len(x), groups, states))
    expect(op, "D", D, of_channels)
    expect(op, "z", z, tuple(x.shape))
    expect(op, "dt_bias", dt_bias, of_channels)
    check_sizes(op, of_channels[0], groups, states)
    heads = x.ndim == 3 and not any(A.stride()[1:]) and (dt.stride(2), x.shape[2]) != (1, 0)
    heads = heads and dt.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0)
    if heads:  # one step and one decay for all channels of a head
        dt, A, dt_bias = dt[..., 0], A[:, 0, :1], None if dt_bias is None else dt_bias[:, 0]
    moved = state.flatten(1, 2) if state.ndim == 4 else state
    lowest, highest = (-math.inf, math.inf) if dt_limit is None else map(float, dt_limit)
    y: Tensor = _update(
        x.flatten(1),
        dt.flatten(1),
        A.to(torch.float32) if heads else A.to(torch.float32).reshape(-1, states),
        B,
        C,
        None if D is None else D.to(torch.float32).reshape(-1),
        None if dt_bias is None else dt_bias.to(torch.float32).reshape(-1),
        None if z is None else z.flatten(1),
        *(moved, not heads, dt_softplus, lowest, highest),
    )
    if moved.data_ptr() != state.data_ptr():  # its heads and channels are no one dimension
        state.copy_(moved.view(state.shape))
    return y.view(x.shape)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None) -> Tensor:
    """Step sizes in float32."""
    steps = dt.to(torch.float32)
    if bias is not None:
        steps = steps + expand(bias.to(torch.float32), dt.shape)
    if softplus:
        steps = activation(steps, "softplus")
    return steps if limit is None or (softplus and tuple(limit) == (0.0, math.inf)) else steps.clamp(*limit)


def _scanned(*args: Any) -> tuple[Tensor, Tensor]:
    """Outputs with their gates, and states."""
    *given, z = args
    y, after = _operator(*given, z is not None)
    if z is not None:
        y = rounded(y * activation(z.to(torch.float32), "silu"), given[0].dtype)
    return y, after


# ---- the operator: x, steps [tokens, channels or heads], decays [channels, N] or [heads, 1], B, C
# ---- [tokens, groups, N], skip [channels], states [sequences, channels, N]


def _backend(t: Tensor) -> Any:
    return module_for("state_space", t)[0]


def _forward(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *rest, wide = given
    found: tuple[Tensor, Tensor] = _backend(x).scan(x, *rest, torch.float32 if wide else x.dtype)
    return found


def _fake(x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    b, offsets, wide = given[2], given[6], given[-1]
    after = x.new_empty((offsets.shape[0] - 1, x.shape[1], b.shape[2]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float32 if wide else x.dtype), after


_TENSORS = "Tensor x, Tensor steps, Tensor decays, Tensor b, Tensor c"
_operator = Operator(
    f"state_space({_TENSORS}, Tensor? skip, Tensor? states, Tensor offsets, bool own, bool wide)"
    " -> (Tensor, Tensor)",
    cpu=_forward,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.own, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, saved: tuple[Any, ...], grad: Tensor | None, grad_states: Tensor | None
) -> tuple[Any, ...]:
    refuse_second_derivatives("ssd, selective_scan")
    grad = torch.zeros_like(saved[0]) if grad is None else grad
    found = _gradients(grad, grad_states, *saved, ctx.own)
    given = (t if of is not None else None for t, of in zip(found, saved[:-1], strict=True))
    return *given, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_gradients(
    grad: Tensor,
    grad_states: Tensor | None,
    x: Tensor,
    steps: Tensor,
    decays: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    states: Tensor | None,
    offsets: Tensor,
    own: bool,
) -> tuple[Tensor, ...]:
    """Of x, steps, decays, B, C, skip and states; those of the last two may have no use."""
    given = (grad, grad_states, x, steps, decays, b, c, states, offsets, own)
    dv, dw, db, dc, da, before = _backend(x).scan_backward(*given)
    wide, g, rows = x.to(torch.float32), grad.to(torch.float32), _rows.backend(x)
    (tokens, channels), heads = x.shape, steps.shape[1]
    of_x = (dv.unflatten(1, (heads, channels // heads)) * steps[..., None]).flatten(1)
    of_skip = x.new_empty(0, dtype=torch.float32)
    if skip is not None:
        of_x = of_x + g * skip
        of_skip = rows.column_sum(g * wide, torch.float32)
    if own:
        of_steps, of_decays = dv * wide + dw, rows.column_sum(da.flatten(1), torch.float32).view(decays.shape)
    else:
        of_v, of_w = (
            rows.row_sum(t.reshape(tokens * heads, channels // heads), False, torch.float32).view(steps.shape)
            for t in (dv * wide, dw)
        )
        of_steps = of_v + decays[:, 0] * of_w
        of_decays = rows.column_sum(steps * of_w, torch.float32)[:, None]
    of_b, of_c = (
        rows.row_sum(t.transpose(2, 3).reshape(to.numel(), t.shape[2]), False, to.dtype).view(to.shape)
        for t, to in ((db, b), (dc, c))
    )
    return rounded(of_x, x.dtype), of_steps, of_decays, of_b, of_c, of_skip, before


def _fake_gradients(grad: Tensor, grad_states: Tensor | None, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *tensors, skip, _, offsets, _ = given
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *tensors)]
    of_skip = x.new_empty(0 if skip is None else x.shape[1], dtype=torch.float32)
    sizes = (offsets.shape[0] - 1, x.shape[1], tensors[2].shape[2])
    return *like, of_skip, x.new_empty(sizes, dtype=torch.float32)


_gradients = Operator(
    f"state_space_backward(Tensor grad, Tensor? grad_states, {_TENSORS}, Tensor? skip, Tensor? states,"
    f" Tensor offsets, bool own) -> ({', '.join(['Tensor'] * 7)})",
    cpu=_run_gradients,
    fake=_fake_gradients,
)


def _move_on(*args: Any) -> Tensor:
    y: Tensor = _backend(args[0]).step(*args)
    return y


_update = Operator(
    "state_space_step(Tensor x, Tensor dt, Tensor decays, Tensor b, Tensor c, Tensor? skip, Tensor? bias,"
    " Tensor? z, Tensor(a!) states, bool own, bool softplus, float lowest, float highest) -> Tensor",
    cpu=_move_on,
    fake=lambda x, *_: x.new_empty(x.shape),
)
