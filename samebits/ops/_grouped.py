"""The operators behind grouped products, and their gradients, which are grouped products again.

:data:`grouped_rows` has a matrix for every group of rows. :data:`grouped_terms` has a sum over every group of
rows. The public function checks its arguments and calls these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, Later, module_for
from samebits.backends.replay import replayed
from samebits.ops._operator import Operator, bypasses_dispatcher
from samebits.ops._products import as_operand, noted, one


def check_offs(op: str, offs: Tensor, rows: int) -> None:
    """Refuse offsets that are not the ends of groups of `rows` rows. Reads the values.

    On a GPU the kernels check them.
    """
    start = 0
    for i, stop in enumerate(offs.tolist()):
        if not start <= stop <= rows:
            raise ValueError(
                f"samebits.{op}: offs: expected ends that never decrease, from 0 to {rows} at most (the"
                f" number of rows), got {stop} after {start} at position {i}"
            )
        start = stop


def _run_rows(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    sequences: Tensor | None,
    out_dtype: torch.dtype,
    key: Key,
) -> Tensor:
    backend, contract = _backend(a, offs, a.shape[0], key)
    out: Tensor = backend.grouped_rows(a, b, offs, bias=bias, out_dtype=out_dtype, contract=contract)
    return out


def _backend(a: Tensor, offs: Tensor, rows: int, key: Key) -> tuple[Any, str]:
    """The module that computes on the device of `a`, and the contract's key. Offsets on a CPU are checked."""
    if not a.is_cuda:
        check_offs("grouped_mm", offs, rows)
    return module_for("grouped", a, key)


# out[t] = a[t, K] @ b[g, K, N] + bias[g, N] for the rows t of group g. `sequences` counts in gradients.
grouped_rows = Operator(
    "grouped_rows(Tensor a, Tensor b, Tensor? bias, Tensor offs, Tensor? sequences, ScalarType out_dtype,"
    " str contract) -> Tensor",
    cpu=_run_rows,
    fake=lambda a, b, bias, offs, sequences, dtype, key: a.new_empty((a.shape[0], b.shape[2]), dtype=dtype),
)


def _rows_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, offs, sequences, _, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None, offs, sequences)
    ctx.dtype, ctx.bias_dtype = a.dtype, None if bias is None else bias.dtype
    ctx.transposed = b.stride(1) < b.stride(2)


def rows_gradients(
    grad: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    offs: Tensor,
    sequences: Tensor | None,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    transposed: bool,
    key: Key,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a, b and bias: of a with `b`, of b with `a`, of bias with its dtype.

    `transposed`: that of b is to be laid out by columns, as a weight's transpose is.
    """
    grad = as_operand(grad, dtype, key)
    grad_a = grad_b = grad_bias = None
    if b is not None:
        grad_a = grouped_rows(grad, b.mT, None, offs, sequences, dtype, key)
    if a is not None and transposed:
        grad_b = grouped_terms(grad.mT, a, offs, sequences, dtype, key).mT
    elif a is not None:
        grad_b = grouped_terms(a.mT, grad, offs, sequences, dtype, key)
    if bias_dtype is not None:
        grad_bias = grad_of_bias(grad, offs, sequences, bias_dtype, key)
    return grad_a, grad_b, grad_bias


def grad_of_bias(
    grad: Tensor, offs: Tensor, sequences: Tensor | None, dtype: torch.dtype, key: Key
) -> Tensor:
    """The gradient of a bias ``[G, N]``: chains over the groups' rows, with 1 in place of a."""
    ones = one(grad).expand(1, grad.shape[0])
    found: Tensor = grouped_terms(ones, grad, offs, sequences, dtype, key)
    return found[:, 0]


_rows_gradients_on_gpu = replayed(rows_gradients)


def _rows_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    bias_dtype = ctx.bias_dtype if ctx.needs_input_grad[2] else None
    given = [t for t in (grad, *saved) if t is not None]
    plain = grad.is_cuda and not torch.is_grad_enabled() and bypasses_dispatcher(given)
    run = _rows_gradients_on_gpu if plain else rows_gradients
    a, b, offs, sequences = saved
    grads = run(grad, a, b, offs, sequences, ctx.dtype, bias_dtype, ctx.transposed, ctx.key)
    return *grads, None, None, None, None


grouped_rows.register_autograd(_rows_backward, setup_context=_rows_setup_context)


def _run_terms(
    a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, out_dtype: torch.dtype, key: Key
) -> Tensor:
    backend, contract = _backend(a, offs, b.shape[0], key)
    out: Tensor = backend.grouped_terms(a, b, offs, sequences, out_dtype=out_dtype, contract=contract)
    return out


def _fake_terms(
    a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, out_dtype: torch.dtype, key: Key
) -> Tensor:
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=out_dtype)


# out[g] = sum of a[M, t] b[t, N] over the rows t of group g: a chain over sequences of rows.
grouped_terms = Operator(
    "grouped_terms(Tensor a, Tensor b, Tensor offs, Tensor? sequences, ScalarType out_dtype, str contract)"
    " -> Tensor",
    cpu=_run_terms,
    fake=_fake_terms,
)


def grouped_terms_later(
    acc: Tensor, a: Tensor, b: Tensor, offs: Tensor, sequences: Tensor | None, key: Key
) -> Later:
    """Prepare to continue the chains in `acc`, of tensors without gradients. The step writes the result."""
    backend, contract = _backend(a, offs, b.shape[0], key)
    return noted(backend.grouped_terms_later(acc, a, b, offs, sequences, contract=contract), acc)


def _terms_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, sequences, _, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(a if needed[1] else None, b if needed[0] else None, offs, sequences)
    ctx.dtype = a.dtype


def _terms_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs, sequences = saved
    grad = as_operand(grad, ctx.dtype, ctx.key)
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = grouped_rows(b, grad.mT, None, offs, sequences, ctx.dtype, ctx.key).mT
    if ctx.needs_input_grad[1]:
        grad_b = grouped_rows(a.mT, grad, None, offs, sequences, ctx.dtype, ctx.key)
    return grad_a, grad_b, None, None, None, None


grouped_terms.register_autograd(_terms_backward, setup_context=_terms_setup_context)
