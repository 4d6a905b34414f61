"""``samebits.gated``: an activation and the product with its factor, in one launch."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.ops._checks import shape
from samebits.ops._fused import backend, check_out, check_tensors, refuse_gradients
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops.activation import activation as activated
from samebits.ops.activation import gradient

_OP = "gated"
Activation = Literal["silu", "gelu", "gelu_tanh", "gpt_oss"]
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gpt_oss")


def gated(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(gate) * up``, with the bits of the code of ``transformers``, element by element.

    ======================  ====================================================================
    `activation`            result, where ``round`` rounds to the operands' dtype
    ======================  ====================================================================
    ``"silu"``              ``round(round(gate / (1 + exp(-gate))) * up)``
    ``"gelu"``              the same, of :func:`torch.nn.functional.gelu`
    ``"gelu_tanh"``         the same, of ``gelu(approximate="tanh")``
    ``"gpt_oss"``           ``round(round(up + 1) * round(gate * w))``, with
                            ``w = round(sigmoid(round(gate * alpha)))``
    ======================  ====================================================================

    Activations are those of ``docs/contract.md``, "Fused layers". In bfloat16 and float16, silu has the bits
    of PyTorch's, on a CPU and a GPU. PyTorch's gelu differs between the two; under
    :class:`samebits.batch_invariant` it is this one, in every dtype. The sigmoid has PyTorch's bits in
    bfloat16, and in float16 those of a CPU; a GPU has others for 3 values. In float32, silu and sigmoid are
    within some units of the last place of PyTorch's. One launch on a GPU.

    Args:
        gate: ``[..., N]``, bfloat16, float16 or float32, any strides. Without `up`: ``[..., 2 N]``, the
            gate's half first, as the product with both matrices leaves it.
        up: of the shape, dtype and device of `gate`. Gates and factors in turns, as GPT-OSS has them, are
            ``gated(x[..., ::2], x[..., 1::2])``; they are read where they are.
        activation: see above.
        limit: before all else, gates above it become it, and factors are clamped to ``[-limit, limit]``. It
            is rounded to the operands' dtype. GPT-OSS has 7.
        alpha: of ``"gpt_oss"`` alone, as a float32.
        out: the result is written here. It may be `gate` or `up`.

    Returns:
        ``[..., N]``

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, there is no `up` and an odd size, or `out` overlaps an
            operand in another way.
        NotImplementedError: a gradient is asked for with `out`, with a `limit`, or of ``"gpt_oss"``.

    Gradients are those of the product and of PyTorch's ``silu`` and ``gelu``: in bfloat16 and float16 they
    have the bits that autograd gives the code under the mode. The activation is computed again for them, so
    that it need not be kept. Second derivatives are not implemented.
    """
    bypass = check_tensors(_OP, gate=gate, up=up)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"samebits.{_OP}: activation: expected one of {_ACTIVATIONS}, got {activation!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"samebits.{_OP}: limit: expected a number above 0, or None, got {limit}")
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"samebits.{_OP}: gate: expected [..., 2 N] without up, with a half for each, got shape"
                f" {shape(gate)}"
            )
    elif gate.ndim == 0 or gate.shape != up.shape:
        raise ValueError(
            f"samebits.{_OP}: gate, up: expected [..., N] of one shape, got {shape(gate)} and {shape(up)}"
        )
    elif gate.dtype != up.dtype:
        raise TypeError(f"samebits.{_OP}: up: expected {gate.dtype} like gate, got {up.dtype}")
    if out is not None or limit is not None or activation == "gpt_oss":
        refuse_gradients(_OP, gate=gate, up=up)
    bound = math.inf if limit is None else float(limit)
    if out is None:
        found: Tensor = _operator(gate, up, activation, bound, float(alpha), bypass=bypass)
        return found
    if out is not gate or up is None:
        halves = gate.chunk(2, -1) if up is None else (gate, up)
        check_out(_OP, "out", out, halves[0], gate.dtype, halves, gate=halves[0], up=halves[1])
    _into(gate, up, out, activation, bound, float(alpha), bypass=bypass)
    return out


def _run(gate: Tensor, up: Tensor | None, activation: str, limit: float, alpha: float) -> Tensor:
    found: Tensor = backend(_OP, gate).gated(gate, up, activation, limit, alpha)
    return found


def _fake(gate: Tensor, up: Tensor | None, *_: object) -> Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


_operator = Operator(
    "gated(Tensor gate, Tensor? up, str activation, float limit, float alpha) -> Tensor", cpu=_run, fake=_fake
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation, _, _ = inputs
    ctx.save_for_backward(gate, up)


def _backward(
    ctx: Any, saved: tuple[Tensor, Tensor | None], grad: Tensor
) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    refuse_second_derivatives(_OP)
    gate, up = saved
    g, u = gate.chunk(2, -1) if up is None else (gate, up)
    of_gate, of_up = up is None or ctx.needs_input_grad[0], up is None or ctx.needs_input_grad[1]
    dg = gradient(grad * u, g, ctx.activation) if of_gate else None
    du = grad * activated(g, ctx.activation) if of_up else None
    if up is None and dg is not None and du is not None:
        return torch.cat((dg, du), -1), None, None, None, None
    return dg, du, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_into(
    gate: Tensor, up: Tensor | None, out: Tensor, activation: str, limit: float, alpha: float
) -> None:
    backend(_OP, gate).gated_into(gate, up, out, activation, limit, alpha)


_into = Operator(
    "gated_into(Tensor gate, Tensor? up, Tensor(a!) out, str activation, float limit, float alpha) -> ()",
    cpu=_run_into,
    fake=lambda *_: None,
)
