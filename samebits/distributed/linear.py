"""Linear layers whose weights are split over ranks, with the bits of one rank that has the whole weight.

A sum over a split dimension has segments (:meth:`samebits.Contract.segmented`). Each of T ranks owns S / T of
them, a subtree, and computes it in float32; :mod:`samebits.distributed.exchange` adds the rest of the tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key, chosen_backend, contract_of, module_for, pack_key, unpack_key
from samebits.backends.replay import refuse
from samebits.contract import FMA, TENSOR_CORE, Contract, resolve, segmented_key
from samebits.distributed._groups import Group, agree, name_of, ranks
from samebits.distributed._symmetric import space_of
from samebits.distributed.exchange import (
    all_reduce,
    check_divides,
    gather,
    reduce_scatter,
    scatter_over_ranks,
)
from samebits.ops import _products
from samebits.ops._checks import check_operands, check_segments, shape
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._sequences import check_cu_seqlens_form, check_offsets
from samebits.remedies import see

__all__ = ["SEGMENTS", "column_parallel_linear", "row_parallel_linear"]

SEGMENTS = 8
"""Segments of the contract that applies if none is given: up to so many ranks have the same bits."""

NO_DIM = -1
"""In operators: tokens are not split over ranks."""

_MANY = 256
"""Rows of each rank from which on a product writes partial sums where they are added: one product a rank."""


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    sequence_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """A linear layer with input features split over ranks: ``y = sum over ranks of x @ weight.T, + bias``.

    The result and all gradients have the bits of :func:`samebits.linear` on one rank, with the same contract
    and the whole ``x`` and ``weight``, at any number of ranks that divides the contract's segments. Ranks'
    partial sums are exchanged in float32, unrounded.

    Args:
        x: ``[..., in_features / T]``, this rank's part of T; bfloat16, float16 or float32.
        weight: ``[out_features, in_features / T]``, the same part; same dtype and device.
        bias: ``[out_features]``, the same on all ranks.
        group: as in :func:`samebits.distributed.ordered_all_reduce`.
        sequence_dim: None: every rank gets the whole result. Else (sequence parallelism) this dimension of
            tokens is split over ranks, and each gets its part of the result.
        cu_seqlens: packed sequences, as in :func:`samebits.linear`, of all tokens.
        contract: one with segments. By default ``samebits.TENSOR_CORE.segmented(8)``, or
            ``samebits.FMA.segmented(8)`` for float32.

    Raises:
        TypeError: as in :func:`samebits.linear`.
        ValueError: as in :func:`samebits.linear`; or the number of ranks does not divide the segments, or
            segments do not divide what they cut: in_features, and out_features for the gradient of ``x``; or
            the ranks do not agree on the contract, the shapes, the version of samebits or what needs
            gradients. Each of these is compared once, when it is new. Calls must be the same on all ranks.
    """
    op = "row_parallel_linear"
    (x, weight, *biases), key, name = _checked(op, x, weight, bias, group, sequence_dim, cu_seqlens, contract)
    contract, own = contract_of(key), contract_of(of_one_rank(key, ranks(name)[1]))
    check_segments(f"distributed.{op}", own, ("x, weight: in_features", x.shape[-1]), x, ("", 0))
    check_segments(f"distributed.{op}", contract, ("", 0), x, ("weight: out_features", len(weight)))
    dim = NO_DIM
    if sequence_dim is not None:
        dim = sequence_dim % x.ndim
        check_divides(op, f"x: dimension {sequence_dim}", x.shape[dim], ranks(name)[1])
    out: Tensor = _row(x, weight, biases[0] if biases else None, cu_seqlens, dim, name, key)
    return out


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    sequence_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """A linear layer with output features split over ranks: a rank's part of ``y = x @ weight.T + bias``.

    The result and all gradients have the bits of :func:`samebits.linear` on one rank, as those of
    :func:`samebits.distributed.row_parallel_linear`. The gradient of ``x`` is a sum over ranks.

    Args:
        x: ``[..., in_features]``, the same on all ranks; bfloat16, float16 or float32. With `sequence_dim`,
            this rank's part of it.
        weight: ``[out_features / T, in_features]``, this rank's part of T; same dtype and device.
        bias: ``[out_features / T]``, the same part.
        group: as in :func:`samebits.distributed.ordered_all_reduce`.
        sequence_dim: None: every rank has the whole ``x``. Else (sequence parallelism) this dimension of
            tokens is split over ranks, and the result has all of it.
        cu_seqlens, contract: as in :func:`samebits.distributed.row_parallel_linear`.

    Returns:
        ``[..., out_features / T]``

    Raises:
        TypeError, ValueError: as in :func:`samebits.distributed.row_parallel_linear`.
    """
    op = "column_parallel_linear"
    (x, weight, *biases), key, name = _checked(op, x, weight, bias, group, sequence_dim, cu_seqlens, contract)
    contract, own = contract_of(key), contract_of(of_one_rank(key, ranks(name)[1]))
    check_segments(f"distributed.{op}", contract, ("x, weight: in_features", x.shape[-1]), x, ("", 0))
    check_segments(f"distributed.{op}", own, ("", 0), x, ("weight: out_features", len(weight)))
    dim = NO_DIM if sequence_dim is None else sequence_dim % x.ndim
    out: Tensor = _column(x, weight, biases[0] if biases else None, cu_seqlens, dim, name, key)
    return out


def default_contract(dtype: torch.dtype) -> Contract:
    return (FMA if dtype == torch.float32 else TENSOR_CORE).segmented(SEGMENTS)


def operands(
    op: str, contract: Contract | None, group: Group, given: dict[str, Tensor]
) -> tuple[list[Tensor], Key, str]:
    """The operands as :func:`check_operands` gives them, the contract's key, and the group's name."""
    name, called = name_of(op, group), f"distributed.{op}"
    tensors, key, _ = check_operands(called, contract, given)
    if contract is None:
        kind = tensors[0].device.type
        key = pack_key(
            resolve(default_contract(tensors[0].dtype), tensors[0].dtype, kind), chosen_backend(kind)
        )
    size, segments = ranks(name)[1], contract_of(key).segments
    if segments % size:
        raise ValueError(
            f"samebits.{called}: contract: expected at least {size} segments for {size} ranks, as"
            f" samebits.TENSOR_CORE.segmented({max(size, SEGMENTS)}), got {contract_of(key)}"
            + see("segments")
        )
    return tensors, key, name


def of_one_rank(key: Key, size: int) -> Key:
    """The key of what each of `size` ranks computes of a sum that is split over them."""
    contract, backend = unpack_key(key)
    return pack_key(segmented_key(contract, contract_of(key).segments // size), backend)


of_one_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]  # PyTorch 2.11 cannot trace it


def _checked(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence_dim: int | None,
    cu_seqlens: Tensor | None,
    contract: Contract | None,
) -> tuple[list[Tensor], Key, str]:
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    tensors, key, name = operands(op, contract, group, given)
    called = f"distributed.{op}"
    if x.ndim == 0:
        raise ValueError(f"samebits.{called}: x: expected at least 1-D, got a 0-D tensor")
    if weight.ndim != 2:
        raise ValueError(
            f"samebits.{called}: weight: expected [out_features, in_features], got shape {shape(weight)}"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"samebits.{called}: x, weight: in_features must be equal, got"
            f" {x.shape[-1]} and {weight.shape[1]} of shapes {shape(x)} and {shape(weight)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"samebits.{called}: bias: expected shape {(len(weight),)} for weight {shape(weight)},"
            f" got {shape(bias)}"
        )
    if cu_seqlens is not None:
        check_cu_seqlens_form(called, "x", x, cu_seqlens)
    if sequence_dim is not None and sequence_dim not in (*range(x.ndim - 1), *range(-x.ndim, -1)):
        raise ValueError(
            f"samebits.{called}: sequence_dim: expected a dimension of tokens of x {shape(x)},"
            f" got {sequence_dim}"
        )
    needed = tuple(t.requires_grad for t in tensors) if torch.is_grad_enabled() else ()
    agree(
        op,
        name,
        x,
        contract=unpack_key(key)[0],
        dtype=tensors[0].dtype,
        weight=weight.shape,
        bias=bias is not None,
        sequence_dim=sequence_dim,
        gradients=needed,
    )
    return tensors, key, name


def _partial(x: Tensor, weight: Tensor, key: Key, size: int) -> Tensor:
    """``x @ weight`` of this rank's segments, in float32."""
    rows = x if x.ndim > 1 else x.unsqueeze(0)
    out = _products.product(rows, weight, None, torch.float32, of_one_rank(key, size))
    return out.view(*x.shape[:-1], weight.shape[1])  # type: ignore[no-any-return]


@torch.no_grad()
def _summed(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, out_dtype: torch.dtype, key: Key
) -> Tensor:
    """``x @ weight`` of all ranks' segments, plus a bias."""
    size, n = ranks(group)[1], weight.shape[1]
    rows = x.reshape(-1, x.shape[-1])
    many = size > 1 and len(rows) >= _MANY * size and n % 8 == 0
    space = space_of(group, x) if many else None
    if space is None:
        return all_reduce(_partial(x, weight, key, size), bias, group, out_dtype)
    refuse("an exchange between ranks is no launch")
    backend, contract = module_for("matmul", x, of_one_rank(key, size))
    out = torch.empty(len(rows), n, dtype=out_dtype, device=x.device)

    def product(some: slice, to: Tensor) -> None:
        backend.matmul_later(to, rows[some], weight, contract=contract)()

    space.sum_of_products(product, bias, out)
    return out.view(*x.shape[:-1], n)


_summed_product = Operator(
    "summed_product(Tensor x, Tensor weight, Tensor? bias, str group, ScalarType out_dtype, str contract)"
    " -> Tensor",
    cpu=_summed,
    fake=lambda x, weight, bias, group, out_dtype, key: x.new_empty(
        *x.shape[:-1], weight.shape[1], dtype=out_dtype
    ),
)
"""``x @ weight`` of all ranks' segments, plus a bias, without a gradient."""


@torch.no_grad()
def _row_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    dim: int,
    group: str,
    key: Key,
) -> Tensor:
    size = ranks(group)[1]
    if size == 1:
        return _products.linear(x, weight, bias, cu_seqlens, key)  # type: ignore[no-any-return]
    if cu_seqlens is not None:
        check_offsets("distributed.row_parallel_linear", cu_seqlens, x.shape[-2], key)
    if dim == NO_DIM:
        return _summed(x, weight.mT, bias, group, x.dtype, key)
    return reduce_scatter(_partial(x, weight.mT, key, size), bias, dim, group, x.dtype)


def _row_fake(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    *_, dim, group, _ = given
    tokens = [*x.shape[:-1]]
    if dim != NO_DIM:
        tokens[dim] //= ranks(group)[1]
    return x.new_empty(*tokens, len(weight))


_row = Operator(
    "row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, int dim, str group,"
    " str contract) -> Tensor",
    cpu=_row_forward,
    fake=_row_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, cu_seqlens, ctx.dim, ctx.group, ctx.key = inputs
    needed = ctx.needs_input_grad  # each operand is needed only for the other's gradient
    ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None, cu_seqlens)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _row_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("distributed.row_parallel_linear")
    x, weight, cu_seqlens = saved
    if ctx.dim != NO_DIM:
        grad = gather(grad, ctx.dim, ctx.group, True)
    grads = _products._linear_gradients(
        grad, x, weight, cu_seqlens, ctx.bias_dtype, ctx.needs_input_grad[2], ctx.key
    )
    return *grads, None, None, None, None


_row.register_autograd(_row_backward, setup_context=_setup_context)


@torch.no_grad()
def _column_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    dim: int,
    group: str,
    key: Key,
) -> Tensor:
    if dim != NO_DIM:
        x = gather(x, dim, group, True)
    return _products.linear(x, weight, bias, cu_seqlens, key)  # type: ignore[no-any-return]


def _column_fake(x: Tensor, weight: Tensor, *given: Any) -> Tensor:
    *_, dim, group, _ = given
    tokens = [*x.shape[:-1]]
    if dim != NO_DIM:
        tokens[dim] *= ranks(group)[1]
    return x.new_empty(*tokens, len(weight))


_column = Operator(
    "column_parallel_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, int dim, str group,"
    " str contract) -> Tensor",
    cpu=_column_forward,
    fake=_column_fake,
)


def _column_backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("distributed.column_parallel_linear")
    x, weight, cu_seqlens = saved
    size, grad_x = ranks(ctx.group)[1], None
    if weight is not None:
        if ctx.dim == NO_DIM:
            grad_x = _summed_product(grad, weight, None, ctx.group, weight.dtype, ctx.key)
        else:
            part = _partial(grad, weight, ctx.key, size)
            grad_x = scatter_over_ranks(part, None, ctx.dim, ctx.group, weight.dtype)
    if x is not None and ctx.dim != NO_DIM:
        x = gather(x, ctx.dim, ctx.group, True)
    _, grad_weight, grad_bias = _products._linear_gradients(
        grad, x, None, cu_seqlens, ctx.bias_dtype, ctx.needs_input_grad[2], ctx.key
    )
    return grad_x, grad_weight, grad_bias, None, None, None, None


_column.register_autograd(_column_backward, setup_context=_setup_context)
