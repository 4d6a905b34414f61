"""``samebits.norm_rotary``: RMS norms of heads and rotary positions in one launch."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from samebits.ops._checks import shape
from samebits.ops._fused import backend, check_tensors, refuse_gradients
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops.add_rms_norm import Rounding, check_rounding
from samebits.ops.expand import sum_over_broadcast
from samebits.ops.rotary import Gradients, Layout, check_heads, check_outs

_OP = "norm_rotary"


@overload
def norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def norm_rotary(
    q: Tensor,
    k: None,
    q_weight: Tensor | None,
    k_weight: None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, None] | None = None,
) -> tuple[Tensor, None]: ...


def norm_rotary(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    layout: Layout = "halves",
    gradients: Gradients = "rounded",
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queries and keys with RMS norms of their heads and then rotary positions, as in Qwen 3 and Gemma 3.

    It has the bits of :func:`samebits.add_rms_norm` of both, without residuals, and then
    :func:`samebits.rotary`::

        q = add_rms_norm(q, None, q_weight, eps, rounding=rounding, offset=offset)
        k = add_rms_norm(k, None, k_weight, eps, rounding=rounding, offset=offset)
        q, k = rotary(q, k, cos, sin, positions=positions, ...)

    One launch on a GPU for aligned heads of up to 256 entries, and their two or three for others. The
    gradients have the bits of autograd's too: one launch for those of `q` and `k`, and one for that of each
    weight, which is a chain over the heads of all tokens in row-major order.

    Args:
        q: ``[..., Hq, D]``: tokens, heads and their entries, in any strides; bfloat16, float16 or float32.
        k: ``[..., Hk, D]`` of the same tokens and dtype, or None.
        q_weight, k_weight: ``[D]``, or None for norms without. With ``rounding="twice"`` of the dtype of `q`,
            else any of the three.
        cos, sin, positions, rotary_dim, layout, gradients: as in :func:`samebits.rotary`.
        eps, rounding, offset: as in :func:`samebits.add_rms_norm`.
        out: where the results are written, as in :func:`samebits.rotary`.

    Returns:
        Queries and keys, or None for no `k`.

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, or `out` overlaps in another way.
        NotImplementedError: a gradient of `cos` or `sin` is asked for, or any with `out`. Second derivatives.
    """
    bypass = check_tensors(_OP, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    pairs = check_heads(_OP, q, k, cos, sin, positions, rotary_dim, layout, gradients)
    once = check_rounding(_OP, rounding, offset)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if name == "k_weight" and k is None:
            raise ValueError(f"samebits.{_OP}: k_weight: expected None without k, got shape {shape(weight)}")
        if weight.shape != q.shape[-1:]:
            raise ValueError(
                f"samebits.{_OP}: {name}: expected shape {tuple(q.shape[-1:])}, got {shape(weight)}"
            )
        if not once and weight.dtype != q.dtype:
            raise TypeError(
                f"samebits.{_OP}: {name}: expected {q.dtype} like q with rounding='twice', got {weight.dtype}"
            )
    refuse_gradients(_OP, cos=cos, sin=sin)
    options = float(eps), float(offset), once, pairs, layout
    tensors = q, k, q_weight, k_weight, cos, sin, positions
    if out is None:
        q_out, k_out = _operator(*tensors, *options, gradients, bypass=bypass)
        return q_out, None if k is None else k_out
    refuse_gradients(_OP, q=q, k=k, q_weight=q_weight, k_weight=k_weight)
    check_outs(_OP, out, layout, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    _into(*tensors, *out, *options, bypass=bypass)
    return out


def _run(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = backend(_OP, q).norm_rotary(q, *args[:-1])
    return found


_TENSORS = (
    "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions"
)
_OPTIONS = "float eps, float offset, bool once, int pairs, str layout"

_operator = Operator(
    f"norm_rotary({_TENSORS}, {_OPTIONS}, str gradients) -> (Tensor, Tensor)",
    cpu=_run,
    fake=lambda q, k, *_: (q.new_empty(q.shape), q.new_empty((0,) if k is None else k.shape)),
)


def _run_backward(of_q: Tensor | None, of_k: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = backend(_OP, q).norm_rotary_backward(of_q, of_k, q, *args)
    return found


def _fake_backward(of_q: Tensor | None, of_k: Tensor | None, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, *weights = args[:3]
    once, asked = args[8], args[-2:]
    dtype = torch.float32 if once else q.dtype
    grads = (q.new_empty((0,) if t is None else t.shape) for t in (of_q, of_k))
    terms = (
        q.new_empty(t.shape if there and t is not None and w is not None else (0,), dtype=dtype)
        for t, w, there in zip((of_q, of_k), weights, asked, strict=True)
    )
    return *grads, *terms


_gradient = Operator(
    f"norm_rotary_backward(Tensor? of_q, Tensor? of_k, {_TENSORS}, {_OPTIONS}, str gradients,"
    " bool of_q_weight, bool of_k_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)
    if inputs[1] is None:
        ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, saved: tuple[Any, ...], of_q: Tensor | None, of_k: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives(_OP)
    needed = ctx.needs_input_grad[:4]
    given = [g if needed[i] or needed[2 + i] else None for i, g in enumerate((of_q, of_k))]
    grads: list[Tensor | None] = [None] * 12
    if any(g is not None for g in given):
        found = _gradient(*given, *saved, *ctx.options, *needed[2:])
        for i, g in enumerate(given):
            weight = saved[2 + i]
            if g is not None and needed[i]:
                grads[i] = found[i]
            if g is not None and needed[2 + i]:
                grads[2 + i] = sum_over_broadcast(found[2 + i], weight.shape, weight.dtype)
    return *grads, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_into(q: Tensor, *args: Any) -> None:
    backend(_OP, q).norm_rotary_into(q, *args)


_into = Operator(
    f"norm_rotary_into({_TENSORS}, Tensor(a!) q_out, Tensor(b!)? k_out, {_OPTIONS}) -> ()",
    cpu=_run_into,
    fake=lambda *_: None,
)
