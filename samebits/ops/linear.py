"""``samebits.linear``: the product at the heart of a model, whose weight gradients are chains over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import on_gpu
from samebits.contract import Contract
from samebits.ops._library import Operator, check_device, check_operands, shape
from samebits.ops.addmm import addbmm, assert_cu_seqlens, check_cu_seqlens
from samebits.ops.expand import expand
from samebits.ops.matmul import product


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """``y = x @ weight.T + bias``, as :func:`torch.nn.functional.linear`.

    Every output element is one chain over ascending input features; then the bias is added in float32 with
    one rounding, and the sum is rounded once to the dtype of ``x``.

    Args:
        x: ``[..., in_features]``; bfloat16, float16 or float32, any strides.
        weight: ``[out_features, in_features]``; same dtype and device.
        bias: ``[out_features]``, or one number for all of them; same dtype and device.
        cu_seqlens: int32 or int64 ``[sequences + 1]`` on the same device, for sequences packed one after the
            other into ``x`` of ``[tokens, in_features]`` or ``[1, tokens, in_features]``: offsets that start
            at 0, never decrease, and end at ``tokens``. It changes no bit of the output, only where the
            weight gradient's chain starts new groups.
        contract: as in :func:`samebits.matmul`.

    Gradients:
        * of ``x``: a chain over output features, for each token by itself;
        * of ``weight`` and ``bias``: one chain over all tokens, in order, with a float32 accumulator, rounded
          once at the end. Every sequence starts a new group of 16 tokens, its tail padded with zeros. A
          sequence is a row of a batch ``x[B, T, ...]``, or a span of ``cu_seqlens``; a 2-D ``x`` is one
          sequence. So these gradients have the same bits however a batch is padded at the end of its
          sequences (with zero output gradients there) or packed; but not if it is flattened to 2-D first,
          where padding lies between the sequences' tokens and, in 16 bits, moves them to other groups. A bias
          of one number gets the sum of the features' gradients, as :func:`torch.sum` of that row in
          :func:`samebits.batch_invariant`.

    Raises:
        TypeError: a tensor is not dense bfloat16, float16 or float32, dtypes differ, ``cu_seqlens`` is not
            int32 or int64, or the contract does not take the dtype.
        ValueError: shapes or devices do not match, or ``cu_seqlens`` does not cut the tokens into spans. On a
            GPU its values are checked there, without waiting: bad ones end in a device-side assert, as a bad
            index does in PyTorch. They are checked once, and again after a change that PyTorch counts: not
            after one through ``.data`` or by a CUDA graph, where gradients of bad offsets are meaningless,
            but nothing out of bounds is read.
    """
    operands = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    (x, weight, *biases), key, plain = check_operands("linear", contract, operands)
    bias = biases[0] if biases else None
    if x.ndim == 0:
        raise ValueError("samebits.linear: x: expected at least 1-D, got a 0-D tensor")
    if weight.ndim != 2:
        raise ValueError(
            f"samebits.linear: weight: expected [out_features, in_features], got shape {shape(weight)}"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "samebits.linear: x, weight: in_features must be equal, got"
            f" {x.shape[-1]} and {weight.shape[1]} of shapes {shape(x)} and {shape(weight)}"
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        if bias.shape not in ((), (1,)):
            raise ValueError(
                f"samebits.linear: bias: expected shape {(weight.shape[0],)}, (1,) or () for weight"
                f" {shape(weight)}, got {shape(bias)}"
            )
        bias = expand(bias, weight.shape[:1])
    if cu_seqlens is not None:
        check_cu_seqlens_form("linear", "x", x, cu_seqlens)
    plain = plain and cu_seqlens is None
    return _operator(x, weight, bias, cu_seqlens, key, plain=plain)  # type: ignore[no-any-return]


def check_cu_seqlens_form(op: str, name: str, x: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse what cannot be the offsets of sequences in `x`, called `name`. Reads no values."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"samebits.{op}: cu_seqlens: expected a Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.layout is not torch.strided or cu_seqlens.is_nested:
        raise TypeError(f"samebits.{op}: cu_seqlens: expected a dense tensor, got layout {cu_seqlens.layout}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"samebits.{op}: cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"samebits.{op}: cu_seqlens: expected 1-D, got shape {shape(cu_seqlens)}")
    check_device(op, "cu_seqlens", cu_seqlens, name, x)
    if x.ndim != 2 and not (x.ndim == 3 and x.shape[0] == 1):
        raise ValueError(
            f"samebits.{op}: {name}: with cu_seqlens expected [tokens, features] or [1, tokens, features],"
            f" got shape {shape(x)}"
        )


def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, contract: str) -> Tensor:
    from samebits.backends.reference import matmul as reference

    if cu_seqlens is not None:
        check_cu_seqlens("linear", cu_seqlens, x.shape[-2])
    rows = x if x.ndim > 1 else x.unsqueeze(0)
    out = reference.matmul(rows, weight.mT, bias=bias, out_dtype=x.dtype, contract=contract)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, contract: str) -> Tensor:
    backend, key = on_gpu("matmul", contract, x.get_device())
    if cu_seqlens is not None:
        assert_cu_seqlens("linear", cu_seqlens, x.shape[-2], contract)
    rows = x if x.ndim > 1 else x.unsqueeze(0)
    out: Tensor = backend.matmul(rows, weight.mT, bias=bias, out_dtype=x.dtype, contract=key)
    return out if x.ndim > 1 else out[0]


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, contract: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cu_seqlens, ctx.contract = inputs
    needed = ctx.needs_input_grad  # each operand is saved for the other's gradient alone
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None, cu_seqlens)
    ctx.dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens = saved
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        rows = grad if grad.ndim > 1 else grad.unsqueeze(0)
        grad_x = product(rows, weight, None, ctx.dtype, ctx.contract)
        grad_x = grad_x.reshape(*grad.shape[:-1], weight.shape[1])
    if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
        return grad_x, None, None, None, None
    columns = sequences(grad).mT
    if ctx.needs_input_grad[1]:
        out = addbmm(None, columns, sequences(x), cu_seqlens, ctx.dtype, ctx.contract)
        grad_weight = out[0]
    if ctx.needs_input_grad[2]:
        ones = grad.new_ones(()).expand(*columns.shape[:2], columns.shape[3], 1)
        out = addbmm(None, columns, ones, cu_seqlens, ctx.bias_dtype, ctx.contract)
        grad_bias = out[0, :, 0]
    return grad_x, grad_weight, grad_bias, None, None


def sequences(t: Tensor) -> Tensor:
    """``t[B, T, ..., features]`` as ``[1, B, tokens, features]``; 1-D and 2-D tensors are one sequence."""
    leading = t.shape[:-1]
    count = leading[0] if len(leading) > 1 else 1
    tokens = leading[1:].numel() if len(leading) > 1 else leading.numel()
    return t.reshape(1, count, tokens, t.shape[-1])


_operator = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, str contract) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
