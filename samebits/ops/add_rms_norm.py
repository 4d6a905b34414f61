"""``samebits.add_rms_norm``: a residual sum and an RMS norm in one launch."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from samebits.ops._checks import shape
from samebits.ops._fused import backend, check_out, check_tensors, refuse_gradients, refuse_shared
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops.expand import sum_over_broadcast

_OP = "add_rms_norm"
Rounding = Literal["twice", "once"]


@overload
def add_rms_norm(
    x: Tensor,
    residual: None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    out: Tensor | None = None,
    out_sum: None = None,
) -> Tensor: ...


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    out: Tensor | None = None,
    out_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    rounding: Rounding = "twice",
    offset: float = 0.0,
    out: Tensor | None = None,
    out_sum: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of ``x + residual`` with the bits of the modules of ``transformers``, and that sum.

    ``s = round(x + residual)``, ``y = s * r`` with ``r = 1 / sqrt(mean over i of s[i]**2 + eps)`` in float32.
    The result is one of these, where ``round`` rounds to the dtype of `x`:

    ======================  ==================================  ===========================================
    `rounding`, `offset`    result                              modules
    ======================  ==================================  ===========================================
    ``"twice"``, 0          ``weight * round(y)``               Llama, Qwen 2 and 3, Mistral, Phi-3, Granite
    ``"once"``, 0           ``round(weight * y)``               OLMo 2, GPT-OSS, Helium
    ``"once"``, 1           ``round((1 + weight) * y)``         Gemma 1 to 3, Qwen3-Next
    ======================  ==================================  ===========================================

    The mean is a row's sum of ``docs/contract.md``, "Row reductions", over n; square root and quotients are
    those of IEEE 754. So a row's result depends on that row alone, and has the bits that the modules' code
    has under :class:`samebits.batch_invariant`. (:func:`torch.nn.functional.rms_norm` rounds once.) One
    launch on a GPU.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32, any strides. Heads of a query, ``[tokens, heads, n]``
            within a larger matrix, are read where they are.
        residual: of the shape and dtype of `x`. None: ``s = x``.
        weight: ``[n]``, any of these dtypes. None: ``round(y)``.
        eps: added to the mean, as a float32.
        rounding: ``"twice"``: the normalised row is rounded, and so is its product with `weight`, to the
            dtype that PyTorch gives a product of both (float32, if it is float32 or another 16-bit dtype than
            that of `x`). ``"once"``: the product alone is rounded, to the dtype of `x`.
        offset: added to `weight` in float32. With ``"once"`` alone.
        out: the result is written here. It may be `x`, or `residual` if that is not `out_sum`.
        out_sum: the sum is written here. It may be `residual` or `x`, so that a residual stream is updated in
            place.

    Returns:
        The result; with a `residual` the result and the sum, of the dtype of `x`.

    Raises:
        TypeError: a tensor is not dense, or has another dtype.
        ValueError: shapes or devices do not match, or `out` or `out_sum` overlaps in another way.
        NotImplementedError: a gradient is asked for with `out` or `out_sum`.

    The gradients have the bits that autograd gives the modules under the mode: those of `x` and `residual`,
    which are one, of each row alone, and that of `weight` in the order of the rows. Second derivatives are
    not implemented.
    """
    bypass = check_tensors(_OP, x=x, residual=residual, weight=weight)
    once = check_rounding(_OP, rounding, offset)
    if x.ndim == 0:
        raise ValueError(f"samebits.{_OP}: x: expected [..., n], got shape {shape(x)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        kind = TypeError if residual.shape == x.shape else ValueError
        raise kind(
            f"samebits.{_OP}: residual: expected shape {shape(x)} and {x.dtype} like x, got {shape(residual)}"
            f" and {residual.dtype}"
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"samebits.{_OP}: weight: expected shape {tuple(x.shape[-1:])}, got {shape(weight)}")
    dtype = x.dtype if once or weight is None else torch.promote_types(x.dtype, weight.dtype)
    if out is None and out_sum is None:
        y, total = _operator(x, residual, weight, float(eps), float(offset), once, dtype, bypass=bypass)
        return y if residual is None else (y, total)
    refuse_gradients(_OP, x=x, residual=residual, weight=weight)
    if out_sum is not None and residual is None:
        raise ValueError(f"samebits.{_OP}: out_sum: expected None without a residual, got a tensor")
    if out is None:
        out = x.new_empty(x.shape, dtype=dtype)
    elif out is not x or dtype != x.dtype:
        check_out(_OP, "out", out, x, dtype, (x, residual), x=x, residual=residual, weight=weight)
    if residual is not None:
        if out_sum is None:
            out_sum = x.new_empty(x.shape)
        elif out_sum is not residual:
            check_out(
                _OP, "out_sum", out_sum, x, x.dtype, (x, residual), x=x, residual=residual, weight=weight
            )
        refuse_shared(_OP, out=out, out_sum=out_sum)
    _into(x, residual, weight, out, out_sum, float(eps), float(offset), once, bypass=bypass)
    return out if out_sum is None else (out, out_sum)


def check_rounding(op: str, rounding: str, offset: float = 0.0) -> bool:
    """Whether it is once. Refuse what is no rounding, and an offset that it does not have."""
    if rounding not in ("twice", "once"):
        raise ValueError(f"samebits.{op}: rounding: expected 'twice' or 'once', got {rounding!r}")
    if offset and rounding == "twice":
        raise ValueError(f"samebits.{op}: offset: expected 0 with rounding='twice', got {offset}")
    return rounding == "once"


def _run(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = backend(_OP, x).add_rms_norm(x, *args)
    return found


def _fake(x: Tensor, residual: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    total = x.new_empty(x.shape if residual is not None else (0,))
    return x.new_empty(x.shape, dtype=options[-1]), total


_operator = Operator(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset, bool once,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    cpu=_run,
    fake=_fake,
)


def _run_backward(grad: Tensor, grad_sum: Tensor | None, s: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = backend(_OP, s).add_rms_norm_backward(grad, grad_sum, s, *given)
    return found


def _fake_backward(grad: Tensor, grad_sum: Tensor | None, s: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    weight, *_, once, weighted = given
    if weight is None or not weighted:
        return s.new_empty(s.shape), s.new_empty(0)
    return s.new_empty(s.shape), s.new_empty(s.shape, dtype=torch.float32 if once else grad.dtype)


_gradient = Operator(
    "add_rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor s, Tensor? weight, float eps, float offset,"
    " bool once, bool weighted) -> (Tensor, Tensor)",
    cpu=_run_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, *ctx.options, _ = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.set_materialize_grads(False)
    if residual is None:
        ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, saved: tuple[Tensor, Tensor | None], grad: Tensor | None, grad_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives(_OP)
    s, weight = saved
    needed = ctx.needs_input_grad
    if grad is None:
        return *(grad_sum if needed[i] else None for i in (0, 1)), None, None, None, None, None
    found, terms = _gradient(grad, grad_sum, s, weight, *ctx.options, bool(needed[2]))
    of_weight = None
    if needed[2] and weight is not None:
        of_weight = sum_over_broadcast(terms, weight.shape, weight.dtype)
    return *(found if needed[i] else None for i in (0, 1)), of_weight, None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    out_sum: Tensor | None,
    eps: float,
    offset: float,
    once: bool,
) -> None:
    backend(_OP, x).add_rms_norm_into(x, residual, weight, out, out_sum, eps, offset, once)


_into = Operator(
    "add_rms_norm_into(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!)? out_sum,"
    " float eps, float offset, bool once) -> ()",
    cpu=_run_into,
    fake=lambda *_: None,
)
