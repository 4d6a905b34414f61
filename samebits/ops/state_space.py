"""A token of the state space of Mamba."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from samebits.backends import module_for
from samebits.ops._checks import shape
from samebits.ops._fused import check_tensors, refuse_gradients
from samebits.ops._memory import check_written
from samebits.ops._operator import Operator
from samebits.ops._state_space import bounds_of, check_sizes, dimensions, expect

__all__ = ["selective_state_update"]


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
    """The next token of :func:`selective_scan`, as that of ``mamba-ssm``.

    Heads of Mamba 2 decode by :func:`samebits.ssd` with their state.

    Args:
        state: float32 ``[batch, channels, N]``, written in place.
        x, dt, z: ``[batch, channels]``.
        A: ``[channels, N]``.
        B, C: ``[batch, N]`` or ``[batch, groups, N]``.
        D, dt_bias: ``[channels]``.
        dt_softplus: see there.
        dt_limit: bounds of steps. None: no bounds, as in :func:`selective_scan`.

    Returns:
        The shape and dtype of `x`.

    Raises:
        As :func:`selective_scan`. NotImplementedError: a gradient is asked for.
    """
    op = "selective_state_update"
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    check_tensors(op, **tensors)
    check_written(op, "state", state, torch.float32, "x", x)
    refuse_gradients(op, state=state, **tensors)
    if state.ndim == 4:
        raise ValueError(
            f"samebits.{op}: state: expected [batch, channels, N], got {shape(state)}; heads of Mamba 2"
            " decode by samebits.ssd with initial_states, the state that it returned"
        )
    if state.ndim != 3 or x.shape != state.shape[:-1]:
        raise ValueError(
            f"samebits.{op}: state, x: expected [batch, channels, N] and [batch, channels], got"
            f" {shape(state)} and {shape(x)}"
        )
    B, C = (t[:, None] if t.ndim == 2 else t for t in (B, C))
    groups = dimensions(op, "B", B, "[batch, N] or [batch, groups, N]")[1]
    channels, states = state.shape[1:]
    expect(op, "dt", dt, tuple(x.shape))
    expect(op, "A", A, (channels, states))
    expect(op, "B", B, (len(x), groups, states))
    expect(op, "C", C, (len(x), groups, states))
    expect(op, "D", D, (channels,))
    expect(op, "z", z, tuple(x.shape))
    expect(op, "dt_bias", dt_bias, (channels,))
    check_sizes(op, channels, groups, states)
    limits = bounds_of(op, (-math.inf, math.inf) if dt_limit is None else dt_limit)
    y: Tensor = _update(
        *(x, dt, A.to(torch.float32), B, C, None if D is None else D.to(torch.float32), z),
        None if dt_bias is None else dt_bias.to(torch.float32),
        *(state, dt_softplus, *limits),
    )
    return y


def _move_on(*args: Any) -> Tensor:
    y: Tensor = module_for("selective_scan", args[0])[0].step(*args)
    return y


_update = Operator(
    "selective_state_update(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
    " Tensor? bias, Tensor(a!) states, bool softplus, float lowest, float highest) -> Tensor",
    cpu=_move_on,
    fake=lambda x, *_: x.new_empty(x.shape),
)
