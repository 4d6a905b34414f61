"""The operators behind all matrix products, and their gradients, which are products again.

:data:`product` is one product. :data:`linear` is a product with a weight. :data:`addbmm` is the chain over
sequences. The public functions check their arguments and call these.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, Later, broadcast, contract_of, module_for
from samebits.backends.replay import kept, replayed
from samebits.ops._checks import check_operands
from samebits.ops._operator import Operator
from samebits.ops._sequences import check_offsets, sequences


def _run_product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, key: Key) -> Tensor:
    backend, contract = module_for("matmul", a, key)
    out: Tensor = backend.matmul(a, b, bias=bias, out_dtype=out_dtype, contract=contract)
    return out


def _fake_product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, key: Key) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype)


product = Operator(
    "matmul(Tensor a, Tensor b, Tensor? bias, ScalarType out_dtype, str contract) -> Tensor",
    cpu=_run_product,
    fake=_fake_product,
)


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``a[B, M, K] @ b[B, K, N]`` into ``out[B, M, N]`` of any strides, without gradients.

    Shapes are not checked.
    """
    (a, b), key, _ = check_operands("matmul", None, {"a": a, "b": b}, autocast=False)
    backend, contract = module_for("matmul", a, key)
    backend.matmul_later(out, a, b, contract=contract)()


def _product_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, _, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None)
    ctx.shapes, ctx.dtype = (a.shape, b.shape), a.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _product_gradients(
    grad: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    a_shape: torch.Size,
    b_shape: torch.Size,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs_bias: bool,
    key: Key,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a, b and bias. Without `a`, or `b`, there is none of the other."""
    grad = as_operand(grad, dtype, key)
    grad_a = grad_b = grad_bias = None
    if b is not None:
        if a_shape[:-2] == grad.shape[:-2]:
            grad_a = product(grad, b.mT, None, dtype, key)
        else:
            grad_a = _summed_over_broadcast(grad, b.mT, a_shape, dtype, key)
    if a is not None:
        grad_b = _summed_over_broadcast(a.mT, grad, b_shape, dtype, key)
    if needs_bias:
        rows = grad.reshape(1, math.prod(grad.shape[:-2]), *grad.shape[-2:])
        ones = one(rows).expand(*rows.shape[:-1], 1)
        out = addbmm(None, rows.mT, ones, None, bias_dtype, key)
        grad_bias = out[0, :, 0]
    return grad_a, grad_b, grad_bias


_product_gradients_on_gpu = replayed(_product_gradients, public=True)


def _product_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    run: Any = _product_gradients if torch.compiler.is_compiling() else _product_gradients_on_gpu
    given = *ctx.shapes, ctx.dtype, ctx.bias_dtype, ctx.needs_input_grad[2], ctx.key
    return *run(grad, *saved, *given), None, None


product.register_autograd(_product_backward, setup_context=_product_setup_context)


def as_operand(grad: Tensor, dtype: torch.dtype, key: Key) -> Tensor:
    """`grad` in a dtype that the contract takes together with operands of `dtype`."""
    return grad if contract_of(key).step == "fma" else grad.to(dtype)


def _summed_over_broadcast(a: Tensor, b: Tensor, size: torch.Size, dtype: torch.dtype, key: Key) -> Tensor:
    """``a @ b``, chained over the batch dimensions in which an operand of shape `size` was broadcast."""
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    sizes = (1,) * (len(batch) + 2 - len(size)) + tuple(size[:-2])
    kept = [d for d in range(len(batch)) if sizes[d] == batch[d]]
    summed = [d for d in range(len(batch)) if sizes[d] != batch[d]]
    B = math.prod(batch[d] for d in kept)
    S = math.prod(batch[d] for d in summed)

    def as_sequences(t: Tensor) -> Tensor:
        matrix = t.shape[-2:]
        t = t.expand(*batch, *matrix).permute(*kept, *summed, len(batch), len(batch) + 1)
        return t.reshape(B, S, *matrix)

    out = addbmm(None, as_sequences(a), as_sequences(b), None, dtype, key)
    return out.reshape(size)  # type: ignore[no-any-return]


def _run_addbmm(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    backend, contract = module_for("matmul", a, key)
    check_offsets("addbmm", cu_seqlens, a.shape[-1], key)
    out: Tensor = backend.addbmm(acc, a, b, cu_seqlens, out_dtype=out_dtype, contract=contract)
    return out


def _addbmm_inplace(acc: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, key: Key) -> None:
    addbmm_later(acc, a, b, cu_seqlens, key)()


def addbmm_later(acc: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, key: Key) -> Later:
    """Prepare :func:`addbmm_` of tensors without gradients. The returned step writes the result."""
    backend, contract = module_for("matmul", a, key)
    check_offsets("addbmm_", cu_seqlens, a.shape[-1], key)
    return noted(backend.addbmm_later(acc, a, b, cu_seqlens, accumulate=True, contract=contract), acc)


def noted(write: Later, acc: Tensor) -> Later:
    """`write`, which writes `acc`, and then tells autograd, which does not see what a kernel writes."""

    def step() -> None:
        write()
        torch.autograd.graph.increment_version(acc)

    return step


# The chain over sequences: out[B, M, N] = acc[B, M, N] + a[B, S, M, K] @ b[B, S, K, N] over s, then k. Every
# s is a sequence. With cu_seqlens, S is 1 and the sequences are consecutive parts of K.
addbmm = Operator(
    "addbmm(Tensor? acc, Tensor a, Tensor b, Tensor? cu_seqlens, ScalarType out_dtype, str contract)"
    " -> Tensor",
    cpu=_run_addbmm,
    fake=lambda acc, a, b, *given: a.new_empty((a.shape[0], a.shape[2], b.shape[3]), dtype=given[-2]),
)


addbmm_ = Operator(
    "addbmm_(Tensor(a!) acc, Tensor a, Tensor b, Tensor? cu_seqlens, str contract) -> ()",
    cpu=_addbmm_inplace,
    fake=lambda *_: None,
)


def _addbmm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, a, b, _, _, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(a if needed[2] else None, b if needed[1] else None)
    ctx.dtype = a.dtype


def _addbmm_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = saved
    grad_acc = grad.to(torch.float32) if ctx.needs_input_grad[0] else None
    grad = as_operand(grad, ctx.dtype, ctx.key).unsqueeze(1)
    grad_a = grad_b = None
    if ctx.needs_input_grad[1]:
        grad_a = product(grad, b.mT, None, ctx.dtype, ctx.key)
    if ctx.needs_input_grad[2]:
        B, S, M, K = a.shape
        rows = grad.expand(B, S, *grad.shape[2:]).reshape(B * S, 1, *grad.shape[2:])
        columns = a.mT.reshape(B * S, 1, K, M)
        out = addbmm(None, columns, rows, None, ctx.dtype, ctx.key)
        grad_b = out.reshape(B, S, K, grad.shape[-1])
    return grad_acc, grad_a, grad_b, None, None, None


addbmm.register_autograd(_addbmm_backward, setup_context=_addbmm_setup_context)


def _run_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    key: Key,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    backend, contract = module_for("matmul", x, key)
    if cu_seqlens is not None:
        check_offsets("linear", cu_seqlens, x.shape[-2], key)
    rows = x if x.ndim > 1 else x.unsqueeze(0)
    out: Tensor = backend.matmul(
        rows, weight.mT, bias=bias, out_dtype=out_dtype or x.dtype, contract=contract
    )
    return out if x.ndim > 1 else out[0]


linear = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, str contract) -> Tensor",
    cpu=_run_linear,
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


def _linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cu_seqlens, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None, cu_seqlens)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_gradients(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    cu_seqlens: Tensor | None,
    bias_dtype: torch.dtype | None,
    needs_bias: bool,
    key: Key,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias. Without `weight`, or `x`, there is none of the other."""
    grad_x = grad_weight = grad_bias = None
    if weight is not None:
        rows = grad if grad.ndim > 1 else grad.unsqueeze(0)
        grad_x = product(rows, weight, None, weight.dtype, key)
        grad_x = grad_x.reshape(*grad.shape[:-1], weight.shape[1])
    if x is None and not needs_bias:
        return grad_x, None, None
    columns = sequences(grad).mT
    if x is not None:
        grad_weight = addbmm(None, columns, sequences(x), cu_seqlens, x.dtype, key)[0]
    if needs_bias:
        ones = one(grad).expand(*columns.shape[:2], columns.shape[3], 1)
        grad_bias = addbmm(None, columns, ones, cu_seqlens, bias_dtype, key)[0, :, 0]
    return grad_x, grad_weight, grad_bias


_linear_gradients_on_gpu = replayed(_linear_gradients, public=True)
_ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def one(like: Tensor) -> Tensor:
    """A 1 without dimensions."""
    return kept(_ones, (like.dtype, like.device), partial(like.new_ones, ()))


def _linear_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens = saved
    given = grad, x, weight, cu_seqlens, ctx.bias_dtype, ctx.needs_input_grad[2], ctx.key
    run = _linear_gradients if torch.compiler.is_compiling() else _linear_gradients_on_gpu
    return *run(*given), None, None


linear.register_autograd(_linear_backward, setup_context=_linear_setup_context)


# The same with float32 results of 16-bit operands. It is an operator of its own, so that calls of the other
# stay short.
wide_linear = Operator(
    "wide_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, str contract) -> Tensor",
    cpu=partial(_run_linear, out_dtype=torch.float32),
    fake=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
)


def _wide_linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _linear_setup_context(ctx, inputs, output)
    ctx.dtype = inputs[0].dtype


def _wide_linear_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    return _linear_backward(ctx, saved, as_operand(grad, ctx.dtype, ctx.key))


wide_linear.register_autograd(_wide_linear_backward, setup_context=_wide_linear_setup_context)
