"""``samebits.gated``: an activation and the product with its factor, in one launch."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import Tensor

from samebits.ops._checks import shape
from samebits.ops._fused import backend, check_out, check_tensors, refuse_gradients
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops.activation import Pointwise
from samebits.ops.add_rms_norm import Rounding, check_rounding

_OP = "gated"
Activation = Literal[Pointwise, "gpt_oss"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def gated(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    rounding: Rounding = "twice",
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(gate) * up``, with the bits of the code of ``transformers``, element by element.

    ======================  ====================================================================
    `activation`            result, where ``round`` rounds to the operands' dtype
    ======================  ====================================================================
    ``"silu"``              ``round(round(gate / (1 + exp(-gate))) * up)``
    ``"gelu"``              the same, of :func:`torch.nn.functional.gelu`
    ``"gelu_tanh"``         the same, of ``gelu(approximate="tanh")``
    ``"sigmoid"``           the same, of :func:`torch.sigmoid`
    ``"relu"``, ``"relu2"`` the same, of :func:`torch.relu`, and of its square
    ``"gpt_oss"``           ``round(round(up + 1) * round(gate * w))``, with
                            ``w = round(sigmoid(round(gate * alpha)))``
    ======================  ====================================================================

    With ``rounding="once"`` it is ``round(activation(gate) * up)``, as where code widens a gate to float32
    first: ``(up * silu(gate.float())).to(dtype)``, in the gated norms of Qwen3-Next.

    Activations are those of ``docs/contract.md``, "Fused layers": those that PyTorch's functions have under
    :class:`samebits.batch_invariant`, in every dtype. One launch on a GPU.

    Args:
        gate: ``[..., N]``, bfloat16, float16 or float32, any strides. Without `up`: ``[..., 2 N]``, the
            gate's half first, as the product with both matrices leaves it.
        up: of the shape, dtype and device of `gate`.
        activation: see above.
        limit: before all else, gates above it become it, and factors are clamped to ``[-limit, limit]``. It
            is rounded to the operands' dtype. GPT-OSS has 7.
        alpha: of ``"gpt_oss"`` alone, as a float32.
        rounding: ``"twice"``: the activation is rounded, and then the product. ``"once"``: the product alone.
            Not of ``"gpt_oss"``.
        interleaved: without `up`, gates and factors are in turns in `gate`, ``gate[..., ::2]`` and
            ``gate[..., 1::2]``, as GPT-OSS has them.
        out: the result is written here. It may be `gate` or `up`.

    Returns:
        ``[..., N]``

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, there is no `up` and an odd size, `interleaved` with `up`
            or `out`, ``"gpt_oss"`` with ``rounding="once"``, or `out` overlaps an operand in another way.
        NotImplementedError: a gradient is asked for with `out`.

    The gradients have the bits that autograd gives the code under the mode, and take one launch for both.
    What a limit has cut has the gradient 0. The activation is computed again for them, so that it need not be
    kept. Second derivatives are not implemented.
    """
    bypass = check_tensors(_OP, gate=gate, up=up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"samebits.{_OP}: activation: expected one of {ACTIVATIONS}, got {activation!r}")
    once = check_rounding(_OP, rounding)
    if once and activation == "gpt_oss":
        raise ValueError(f"samebits.{_OP}: rounding: expected 'twice' with activation='gpt_oss', got 'once'")
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
    if interleaved and (up is not None or out is not None):
        name = "up" if up is not None else "out"
        raise ValueError(f"samebits.{_OP}: {name}: expected None with interleaved=True, got a tensor")
    bound = math.inf if limit is None else float(limit)
    if out is None:
        options = activation, bound, float(alpha), once, bool(interleaved)
        found: Tensor = _operator(gate, up, *options, bypass=bypass)
        return found
    refuse_gradients(_OP, gate=gate, up=up)
    if out is not gate or up is None:
        halves = gate.chunk(2, -1) if up is None else (gate, up)
        check_out(_OP, "out", out, halves[0], gate.dtype, halves, gate=halves[0], up=halves[1])
    _into(gate, up, out, activation, bound, float(alpha), once, bypass=bypass)
    return out


def _run(gate: Tensor, up: Tensor | None, *options: Any) -> Tensor:
    found: Tensor = backend(_OP, gate).gated(gate, up, *options)
    return found


def _fake(gate: Tensor, up: Tensor | None, *_: object) -> Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


_operator = Operator(
    "gated(Tensor gate, Tensor? up, str activation, float limit, float alpha, bool once, bool interleaved)"
    " -> Tensor",
    cpu=_run,
    fake=_fake,
)


def _run_backward(grad: Tensor, gate: Tensor, up: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = backend(_OP, gate).gated_backward(grad, gate, up, *options)
    return found


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    sizes = (True, False) if up is None else options[-2:]
    first, second = (gate.new_empty(gate.shape if there else (0,)) for there in sizes)
    return first, second


_gradient = Operator(
    "gated_backward(Tensor grad, Tensor gate, Tensor? up, str activation, float limit, float alpha,"
    " bool once, bool interleaved, bool of_gate, bool of_up) -> (Tensor, Tensor)",
    cpu=_run_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.options = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, saved: tuple[Tensor, Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives(_OP)
    gate, up = saved
    needed = ctx.needs_input_grad
    of_gate, of_up = _gradient(grad, gate, up, *ctx.options, needed[0], needed[1])
    return of_gate if needed[0] else None, of_up if needed[1] else None, *(None,) * 5


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_into(gate: Tensor, up: Tensor | None, out: Tensor, *options: Any) -> None:
    backend(_OP, gate).gated_into(gate, up, out, *options)


_into = Operator(
    "gated_into(Tensor gate, Tensor? up, Tensor(a!) out, str activation, float limit, float alpha, bool once)"
    " -> ()",
    cpu=_run_into,
    fake=lambda *_: None,
)
