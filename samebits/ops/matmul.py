"""``samebits.matmul``: matrix products with ``torch.matmul``'s shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import on_gpu
from samebits.contract import Contract, contract_from_key
from samebits.ops._library import Operator, check_operands, check_out_dtype, reshaped, shape


def matmul(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, contract: Contract | None = None
) -> Tensor:
    """The matrix product of two tensors, every output element one chain over ascending k.

    ``out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n]``

    Shapes follow :func:`torch.matmul`: 1-D operands are vectors, and leading dimensions are batches that
    broadcast. An output row depends on nothing but its own row of ``a`` and on ``b``.

    Args:
        a: ``[..., M, K]`` or ``[K]``; bfloat16, float16 or float32, any strides.
        b: ``[..., K, N]`` or ``[K]``; same dtype and device.
        out_dtype: the input dtype (default) or ``torch.float32``. Results are rounded to it once.
        contract: ``samebits.TENSOR_CORE`` (default for bfloat16 and float16) or ``samebits.FMA`` (default
            for float32).

    Gradients: that of ``a`` is a chain over n. That of ``b`` is a chain over the rows m, in order; every
    matrix of a batch starts a new group of 16, and where ``b`` is broadcast the chain carries on from one
    matrix of the batch to the next. With 2-D ``b`` the rows of ``a[B, ..., K]`` are B sequences, as in
    :func:`samebits.linear`. A broadcast ``a`` likewise. A float32 gradient of 16-bit operands is rounded to
    their dtype first under ``TENSOR_CORE``, and is used as it is under ``FMA``.

    Raises:
        TypeError: an operand is not a dense bfloat16, float16 or float32 tensor, dtypes differ, or
            ``out_dtype`` or ``contract`` do not fit them.
        ValueError: shapes or devices do not match.
    """
    (a, b), key, plain = check_operands("matmul", contract, {"a": a, "b": b})
    dtype = check_out_dtype("matmul", out_dtype, a.dtype)
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        return product(a, b, None, dtype, key, plain=plain)  # type: ignore[no-any-return]
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(
            f"samebits.matmul: a, b: expected at least 1-D, got shapes {shape(a)} and {shape(b)}"
        )
    rows = a if a.ndim > 1 else a.unsqueeze(0)
    columns = b if b.ndim > 1 else b.unsqueeze(1)
    if rows.shape[-1] != columns.shape[-2]:
        raise ValueError(
            "samebits.matmul: a, b: inner dimensions must be equal, got"
            f" {rows.shape[-1]} and {columns.shape[-2]} of shapes {shape(a)} and {shape(b)}"
        )
    for i, j in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
        if i != j and i != 1 and j != 1:
            raise ValueError(
                "samebits.matmul: a, b: batch dimensions must be equal or 1,"
                f" got shapes {shape(a)} and {shape(b)}"
            )
    leading = rows.shape[:-1]
    if columns.ndim == 2 and rows.ndim > 3:
        rows = rows.reshape(leading[0], leading[1:].numel(), rows.shape[-1])
    out: Tensor = product(rows, columns, None, dtype, key, plain=plain)
    wanted = [*(leading if columns.ndim == 2 else out.shape[:-1]), columns.shape[-1]]
    if a.ndim == 1:
        del wanted[-2]
    if b.ndim == 1:
        del wanted[-1]
    return reshaped(out, wanted)


def _cpu(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    from samebits.backends.reference import matmul as reference

    return reference.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=contract)


def _cuda(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    backend, key = on_gpu("matmul", contract, a.get_device())
    out: Tensor = backend.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=key)
    return out


def _fake(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, contract: str) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, _, ctx.contract = inputs
    needed = ctx.needs_input_grad  # each operand is saved for the other's gradient alone
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None)
    ctx.shapes, ctx.dtype = (a.shape, b.shape), a.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    from samebits.ops.addmm import addbmm  # whose gradients are products

    (a, b), (a_shape, b_shape), dtype = saved, ctx.shapes, ctx.dtype
    grad = operand(grad, dtype, ctx.contract)
    grad_a = grad_b = grad_bias = None
    if ctx.needs_input_grad[0]:
        if a_shape[:-2] == grad.shape[:-2]:
            grad_a = product(grad, b.mT, None, dtype, ctx.contract)
        else:
            grad_a = _over_broadcast(grad, b.mT, a_shape, dtype, ctx.contract)
    if ctx.needs_input_grad[1]:
        grad_b = _over_broadcast(a.mT, grad, b_shape, dtype, ctx.contract)
    if ctx.needs_input_grad[2]:
        rows = grad.reshape(1, grad.shape[:-2].numel(), *grad.shape[-2:])
        ones = rows.new_ones(()).expand(*rows.shape[:-1], 1)
        out = addbmm(None, rows.mT, ones, None, ctx.bias_dtype, ctx.contract)
        grad_bias = out[0, :, 0]
    return grad_a, grad_b, grad_bias, None, None


def operand(grad: Tensor, dtype: torch.dtype, contract: str) -> Tensor:
    """`grad` in a dtype that the contract takes beside operands of `dtype`."""
    return grad if contract_from_key(contract).step == "fma" else grad.to(dtype)


def _over_broadcast(a: Tensor, b: Tensor, size: torch.Size, dtype: torch.dtype, contract: str) -> Tensor:
    """``a @ b`` chained over the batch dimensions that broadcasting had given an operand of `size`."""
    from samebits.ops.addmm import addbmm

    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    own = (1,) * (len(batch) + 2 - len(size)) + tuple(size[:-2])
    kept = [d for d in range(len(batch)) if own[d] == batch[d]]
    summed = [d for d in range(len(batch)) if own[d] != batch[d]]
    B = torch.Size([batch[d] for d in kept]).numel()
    S = torch.Size([batch[d] for d in summed]).numel()

    def sequences(t: Tensor) -> Tensor:
        matrix = t.shape[-2:]
        t = t.expand(*batch, *matrix).permute(*kept, *summed, len(batch), len(batch) + 1)
        return t.reshape(B, S, *matrix)

    out = addbmm(None, sequences(a), sequences(b), None, dtype, contract)
    return out.reshape(size)  # type: ignore[no-any-return]


product = Operator(
    "matmul(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype, str contract) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
