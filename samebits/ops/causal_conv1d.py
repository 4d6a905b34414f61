"""Short causal convolutions, each channel by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import on_gpu
from samebits.ops import _rows
from samebits.ops._checks import shape
from samebits.ops._fused import check_tensors, refuse_gradients
from samebits.ops._memory import check_written
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._packed import check_packed, places
from samebits.ops._rows import rounded
from samebits.ops.activation import activation as activated
from samebits.ops.activation import gradient_of

__all__ = ["causal_conv1d", "causal_conv1d_update"]

_OP, _UPDATE = "causal_conv1d", "causal_conv1d_update"


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``out[b, d, t] = f(bias[d] + sum over k of weight[d, k] * x[b, d, t - (W - 1) + k])``.

    As ``causal_conv1d_fn`` of the package ``causal-conv1d``. A token sees the W - 1 before it: zeros, or
    `initial_states`, before the first one. ``docs/contract.md``, "Convolutions", has the order of the sums,
    which is that of :func:`torch.nn.functional.conv1d` under :class:`samebits.batch_invariant`: float32, taps
    in order, then the bias. The result is rounded to the dtype of `x`, and once more after the activation.
    So a token has the same bits in a prefill, in pieces of it, in decoding, and in packed sequences.

    Args:
        x: ``[B, D, T]``, bfloat16, float16 or float32, any strides.
        weight: ``[D, W]``, same dtype.
        bias: ``[D]``, same dtype.
        seq_idx: int32 or int64 ``[B, T]``: neighbours of a row with different numbers belong to different
            sequences. Not with states.
        initial_states: ``[B, D, W - 1]``, the inputs before `x`.
        return_final_states: return the last W - 1 inputs, too.
        activation: None, or ``"silu"`` (also called ``"swish"``).
        cu_seqlens: offsets of packed sequences, int32 or int64 ``[sequences + 1]``, with B = 1. Not with
            `seq_idx` or states.

    Returns:
        ``[B, D, T]``, with the strides of `x` if that is dense; with `return_final_states` also
        ``[B, D, W - 1]``.

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, or there are states of packed sequences.

    Gradients of all tensors are implemented, second derivatives are not.
    """
    bypass = _check(_OP, activation, x=x, weight=weight, bias=bias, initial_states=initial_states)
    width = weight.shape[1]
    if initial_states is not None and initial_states.shape != (*x.shape[:2], width - 1):
        raise ValueError(
            f"samebits.{_OP}: initial_states: expected shape {(*x.shape[:2], width - 1)}, got"
            f" {shape(initial_states)}"
        )
    check_packed(_OP, x, x.shape[2], seq_idx, cu_seqlens, initial_states is not None or return_final_states)
    at = places(x.shape[2], seq_idx, cu_seqlens)
    out: Tensor = _operator(x, weight, bias, initial_states, at, activation is not None, bypass=bypass)
    if not return_final_states:
        return out
    return out, _last_inputs(x, initial_states, width - 1)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The next tokens of :func:`causal_conv1d`, whose state is moved on in place. No gradients.

    Args:
        x: ``[B, D]`` or ``[B, D, T]``.
        conv_state: ``[B, D, S]`` with S >= W - 1: the last inputs. The first S - W + 1 are not read.
        weight, bias, activation: as there.

    Returns:
        The shape of `x`.

    Raises:
        As :func:`causal_conv1d`. NotImplementedError: a gradient is asked for.
    """
    tokens = x[..., None] if isinstance(x, Tensor) and x.ndim == 2 else x
    _check(_UPDATE, activation, x=tokens, weight=weight, bias=bias)
    check_written(_UPDATE, "conv_state", conv_state, x.dtype, "x", x)
    refuse_gradients(_UPDATE, x=x, conv_state=conv_state, weight=weight, bias=bias)
    least = weight.shape[1] - 1
    if conv_state.shape[:-1] != tokens.shape[:2] or conv_state.shape[-1] < least:
        raise ValueError(
            f"samebits.{_UPDATE}: conv_state: expected shape {(*tokens.shape[:2], least)} or a longer one,"
            f" got {shape(conv_state)}"
        )
    out: Tensor = _update(tokens, conv_state, weight, bias, activation is not None)
    return out[..., 0] if x.ndim == 2 else out


def _check(op: str, activation: str | None, **tensors: Any) -> bool:
    bypass = check_tensors(op, **tensors)
    x, weight, bias = tensors["x"], tensors["weight"], tensors["bias"]
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"samebits.{op}: x, weight: expected [B, D, T] and [D, W], got {shape(x)} and {shape(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"samebits.{op}: bias: expected shape {(weight.shape[0],)}, got {shape(bias)}")
    for name, t in tensors.items():
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"samebits.{op}: {name}: expected {x.dtype} like x, got {t.dtype}")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"samebits.{op}: activation: expected None, 'silu' or 'swish', got {activation!r}")
    return bypass


def _last_inputs(x: Tensor, before: Tensor | None, count: int) -> Tensor:
    """The last `count` of both, contiguous."""
    missing = count - x.shape[2]
    if missing <= 0:
        return x[..., -missing:].clone(memory_format=torch.contiguous_format)
    lead = x.new_zeros(*x.shape[:2], missing) if before is None else before[..., -missing:]
    return torch.cat((lead, x), 2).contiguous()


def _taps(x: Tensor, before: Tensor | None, at: Tensor | None, width: int) -> list[Tensor]:
    """What each tap sees, as float32 ``[B, D, T]``: nothing of another sequence."""
    lead = x.new_zeros(*x.shape[:2], width - 1) if before is None else before
    seen, tokens = torch.cat((lead, x), 2).to(torch.float32), x.shape[2]
    taps = [seen[..., k : k + tokens] for k in range(width)]
    return taps if at is None else [torch.where(_within(at, width - 1 - k), t, 0) for k, t in enumerate(taps)]


def _within(at: Tensor, lag: int) -> Tensor:
    """Whether a token has so many before it in its sequence, ``[B, 1, T]``."""
    return (at >= lag)[:, None]


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, at: Tensor | None
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    w = weight.to(torch.float32)
    for k, tap in enumerate(_taps(x, before, at, weight.shape[1])):
        total = total + tap * w[:, k, None]
    return rounded(total if bias is None else total + bias.to(torch.float32)[:, None], x.dtype)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, at: Tensor | None, silu: bool
) -> Tensor:
    out = _convolved(x, weight, bias, before, at)
    return _like(activated(out, "silu") if silu and out.numel() else out, x)


def _like(out: Tensor, x: Tensor) -> Tensor:
    """With the strides of `x`, if that is dense."""
    to = torch.empty_like(x)
    return out.contiguous() if to.is_contiguous() else to.copy_(out)


def _on_gpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, at: Tensor | None, silu: bool
) -> Tensor:
    out: Tensor = on_gpu("causal_conv1d", "", x.get_device())[0].convolved(x, weight, bias, before, at, silu)
    return out


_operator = Operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? at, bool silu) -> Tensor",
    cpu=_forward,
    cuda=_on_gpu,
    fake=lambda x, *_: torch.empty_like(x),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives(_OP)
    needed = [ctx.needs_input_grad[i] for i in range(4)]
    found = _gradients(grad, *saved, ctx.silu, needed)
    return *(t if of else None for t, of in zip(found, needed, strict=True)), None, None


def _run_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    at: Tensor | None,
    silu: bool,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    """Of x, weight, bias and states before; none where they are not needed."""
    if silu and grad.numel():
        grad = gradient_of(grad, _operator(x, weight, bias, before, at, False), "silu")
    of_x = of_before = of_weight = of_bias = x.new_empty(0)
    if needed[0] or needed[3]:
        found = _gradients_of_inputs(grad, weight, at)
        of_x = torch.empty_like(x).copy_(found[..., weight.shape[1] - 1 :]) if needed[0] else of_x
        of_before = found[..., : weight.shape[1] - 1].contiguous() if needed[3] else of_before
    if needed[1]:
        wide, taps = grad.to(torch.float32), _taps(x, before, at, weight.shape[1])
        of_weight = torch.stack([_over_tokens(tap * wide, weight.dtype) for tap in taps], 1)
    if needed[2]:
        of_bias = _over_tokens(grad, grad.dtype)
    return of_x, of_weight, of_bias, of_before


def _gradients_of_inputs(grad: Tensor, weight: Tensor, at: Tensor | None) -> Tensor:
    """Those of the W - 1 inputs before the first token, and of all tokens."""
    width, (*of, tokens) = weight.shape[1], grad.shape
    wide, w = grad.to(torch.float32), weight.to(torch.float32)
    seen = torch.zeros(*of, tokens + width - 1, dtype=torch.float32, device=grad.device)
    for k in range(width):
        term = wide * w[:, k, None]
        seen[..., k : k + tokens] += term if at is None else torch.where(_within(at, width - 1 - k), term, 0)
    return rounded(seen, grad.dtype)


def _run_gradients_on_gpu(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    at: Tensor | None,
    silu: bool,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    kernels, _ = on_gpu("causal_conv1d", "", x.get_device())
    grad, *found = kernels.gradients(grad, x, weight, bias, before, at, silu, *needed[:3])
    if not needed[3]:
        return *found, x.new_empty(0)
    count = weight.shape[1] - 1  # the first tokens, which alone see states
    of_inputs = _gradients_of_inputs(grad[..., :count], weight, None)
    return *found, of_inputs[..., :count].contiguous()


def _fake_gradients(grad: Tensor, x: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, ...]:
    of_x, of_weight, of_bias, of_before = given[-1]
    none = x.new_empty(0)
    return (
        torch.empty_like(x) if of_x else none,
        x.new_empty(weight.shape) if of_weight else none,
        x.new_empty(weight.shape[0]) if of_bias else none,
        x.new_empty(*x.shape[:2], weight.shape[1] - 1) if of_before else none,
    )


_gradients = Operator(
    "causal_conv1d_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? at,"
    " bool silu, bool[] needed) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_run_gradients,
    cuda=_run_gradients_on_gpu,
    fake=_fake_gradients,
)


def _over_tokens(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Chains over the tokens of all rows, in order, of ``terms[B, D, T]``."""
    rows = terms.transpose(1, 2).reshape(-1, terms.shape[1])
    return _rows.backend(terms).column_sum(rows, dtype)  # type: ignore[no-any-return]


_operator.register_autograd(_backward, setup_context=_setup_context)


def _move_on(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    width = weight.shape[1]
    out = _forward(x, weight, bias, state[..., state.shape[2] - width + 1 :], None, silu)
    state.copy_(torch.cat((state, x), 2)[..., x.shape[2] :])
    return out


def _move_on_gpu(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    out: Tensor = on_gpu("causal_conv1d", "", x.get_device())[0].move_on(x, state, weight, bias, silu)
    return out


_update = Operator(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    cpu=_move_on,
    cuda=_move_on_gpu,
    fake=lambda x, *_: torch.empty_like(x),
)
