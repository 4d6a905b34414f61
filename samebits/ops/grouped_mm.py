"""``samebits.grouped_mm``: products of groups of rows, such as the tokens of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends import Key
from samebits.contract import Contract
from samebits.ops import _grouped
from samebits.ops._autograd import without_modes
from samebits.ops._checks import check_device, check_operands, check_out_dtype, check_segments, shape
from samebits.ops._memory import check_accumulator, has_memory, refuse_overlap, refuse_vmap
from samebits.ops._operator import as_no_view
from samebits.ops._products import as_operand
from samebits.ops.bmm import bmm


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    sequences: Tensor | None = None,
    main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contract: Contract | None = None,
) -> Tensor:
    """A matrix product for each of G groups of rows, as :func:`torch.nn.functional.grouped_mm`.

    ``offs[0 ... G - 1]`` are the groups' ends: group ``g`` has the rows ``offs[g - 1] ... offs[g] - 1``, and
    the first group starts at row 0. A group may be empty. Rows from ``offs[G - 1]`` on belong to none: they
    are +0 in the result and in gradients, and add nothing to any sum. (PyTorch leaves them undefined.)

    * ``a[T, K]``, ``b[G, K, N]``: ``out[t] = a[t] @ b[g] + bias[g]`` for the rows t of group g. A row has the
      bits that :func:`samebits.linear` gives it with its group's matrix.
    * ``a[G, M, K]``, ``b[K, T]``: ``out[:, t] = a[g] @ b[:, t]`` for the columns t of group g.
    * ``a[M, T]``, ``b[T, N]``: ``out[g] = sum over the rows t of group g of a[:, t] * b[t]``.
    * ``a[G, M, K]``, ``b[G, K, N]`` without ``offs``: :func:`samebits.bmm`.

    Args:
        a: bfloat16, float16 or float32, any strides.
        b: same dtype and device. For experts with weights ``[G, out_features, in_features]`` it is
            ``weight.mT``.
        offs: int32 ``[G]`` on the same device. Its values stay there: nothing waits for them.
        bias: ``[G, N]``, for ``a[T, K]`` alone; same dtype and device. It is added in float32 with one
            rounding.
        sequences: int32 ``[T]``: the sequence that every row belongs to. Where two neighbours of a group
            have different numbers, a new sequence begins; otherwise the numbers mean nothing. In a layer of
            experts they are ``sequence_of_token[order]``, with the order that sorts the tokens. They decide
            where the sum over a group's rows, in the third product or in a gradient, starts new groups of
            16. With None every group is one sequence.
        main_grad: float32, of the shape of ``b[G, K, N]``, any strides, for ``a[T, K]`` alone. The gradient
            of ``b`` continues the chains in it and is not returned to autograd, so micro-batches that are
            cut between sequences give the bits of one large batch. It shares memory with no other tensor.
            It works in eager mode only, and is not written if ``b`` requires no gradient. Every backward
            adds to it, even one that asks for other gradients only.
        out_dtype: the input dtype (default) or ``torch.float32``.
        contract: as in :func:`samebits.matmul`.

    Gradients: grouped products again, also in second derivatives. That of ``b[G, K, N]``, and of ``bias``, is
    one chain over the group's rows in order, with a float32 accumulator, rounded once at the end. Every
    sequence starts a new group of 16 rows, whose tail is padded with zeros. So these gradients have the same
    bits however a batch is packed, or padded at the end of its sequences, if tokens are sorted by a stable
    sort.

    Raises:
        TypeError: an operand is not a dense bfloat16, float16 or float32 tensor, dtypes differ, ``offs`` or
            ``sequences`` is not int32, ``main_grad`` is not float32, or ``out_dtype`` or ``contract`` do not
            fit them.
        ValueError: shapes or devices do not match, an argument does not go with these operands, or ``offs``
            decreases or leaves the rows. On a GPU the values of ``offs`` are checked by the kernel, without
            waiting. Bad ones end in an error of the device, as a bad index does in PyTorch: an assertion, or
            on Hopper an "unspecified launch failure". Nothing out of bounds is read.
        NotImplementedError: ``main_grad`` under ``torch.compile`` or ``torch.vmap``.
    """
    operands = {"a": a, "b": b} if bias is None else {"a": a, "b": b, "bias": bias}
    (a, b, *biases), key, _ = check_operands("grouped_mm", contract, operands)
    bias = biases[0] if biases else None
    dtype = check_out_dtype("grouped_mm", out_dtype, a.dtype)
    _check_shapes(a, b, offs)
    ranks = a.ndim, b.ndim
    if ranks != (2, 3):
        for name, given in (("bias", bias), ("main_grad", main_grad)):
            if given is not None:
                raise ValueError(
                    f"samebits.grouped_mm: {name}: expected None unless a is 2-D and b is 3-D, got shapes"
                    f" {shape(a)} and {shape(b)} of a and b"
                )
    if offs is None:
        if sequences is not None:
            raise ValueError("samebits.grouped_mm: sequences: expected None without offs, got a Tensor")
        return bmm(a, b, out_dtype=out_dtype, contract=contract)
    if sequences is not None:
        _check_integers("sequences", sequences, a)
        rows = b.shape[-1] if ranks == (3, 2) else a.shape[0 if ranks == (2, 3) else 1]
        if sequences.shape != (rows,):
            raise ValueError(
                f"samebits.grouped_mm: sequences: expected shape {(rows,)}, one for every row, got"
                f" {shape(sequences)}"
            )
    if ranks == (2, 2):
        return _grouped.grouped_terms(a, b, offs, sequences, dtype, key)  # type: ignore[no-any-return]
    x, size, n = (a, "b: N", b.shape[-1]) if ranks == (2, 3) else (b, "a: M", a.shape[-2])
    check_segments("grouped_mm", contract, ("a, b: K", a.shape[-1]), x, (size, n))
    if ranks == (3, 2):
        found: Tensor = _grouped.grouped_rows(b.mT, a.mT, None, offs, sequences, dtype, key)
        return found.mT if torch.is_grad_enabled() else as_no_view(found.mT)
    if bias is not None and bias.shape != (b.shape[0], b.shape[2]):
        raise ValueError(
            f"samebits.grouped_mm: bias: expected shape {(b.shape[0], b.shape[2])} for b {shape(b)}, got"
            f" {shape(bias)}"
        )
    if main_grad is not None:
        _check_main_grad(main_grad, b, a=a)
        if torch.is_grad_enabled() and b.requires_grad:
            return _WithMainGrad.apply(  # type: ignore[no-untyped-call, no-any-return]
                a, b, bias, offs, sequences, main_grad, dtype, key
            )
    return _grouped.grouped_rows(a, b, bias, offs, sequences, dtype, key)  # type: ignore[no-any-return]


def _check_shapes(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    ranks = a.ndim, b.ndim
    if ranks not in ((2, 3), (3, 2), (2, 2), (3, 3)):
        raise ValueError(
            f"samebits.grouped_mm: a, b: expected 2-D or 3-D, got shapes {shape(a)} and {shape(b)}"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            "samebits.grouped_mm: a, b: inner dimensions must be equal, got"
            f" {a.shape[-1]} and {b.shape[-2]} of shapes {shape(a)} and {shape(b)}"
        )
    if ranks == (3, 3):
        if offs is not None:
            raise ValueError("samebits.grouped_mm: offs: expected None for 3-D a and b, got a Tensor")
        if a.shape[0] != b.shape[0]:
            raise ValueError(
                "samebits.grouped_mm: a, b: numbers of groups must be equal, got shapes"
                f" {shape(a)} and {shape(b)}"
            )
        return
    if offs is None:
        raise ValueError(
            f"samebits.grouped_mm: offs: expected the groups' ends for a {shape(a)} and b {shape(b)},"
            " got None"
        )
    _check_integers("offs", offs, a)
    groups = None if ranks == (2, 2) else (b if ranks == (2, 3) else a).shape[0]
    if offs.ndim != 1 or groups not in (None, offs.shape[0]):
        wanted = "1-D" if groups is None else f"shape {(groups,)}, one end for every group"
        raise ValueError(f"samebits.grouped_mm: offs: expected {wanted}, got shape {shape(offs)}")


def _check_integers(name: str, t: Tensor, a: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"samebits.grouped_mm: {name}: expected a Tensor, got {type(t).__name__}")
    if t.dtype != torch.int32 or t.layout is not torch.strided or t.is_nested:
        raise TypeError(
            f"samebits.grouped_mm: {name}: expected dense int32, got {t.dtype} of layout {t.layout}"
        )
    check_device("grouped_mm", name, t, "a", a)


def _check_main_grad(acc: Tensor, b: Tensor, **others: Tensor) -> None:
    """Refuse an unsuitable accumulator. The backward checks again: it may have changed by then."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("samebits.grouped_mm: main_grad: expected eager mode, got torch.compile")
    refuse_vmap("grouped_mm", "main_grad")
    check_accumulator("grouped_mm", "main_grad", acc, "b", b)
    if acc.shape != b.shape:
        raise ValueError(
            f"samebits.grouped_mm: main_grad: expected shape {shape(b)} like b, got {shape(acc)}"
        )
    if acc.requires_grad:
        raise ValueError("samebits.grouped_mm: main_grad: expected a tensor that requires no grad")
    if has_memory(acc, b, *others.values()):
        refuse_overlap("grouped_mm", "main_grad", acc, b=b, **others)


class _WithMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        sequences: Tensor | None,
        main_grad: Tensor,
        out_dtype: torch.dtype,
        key: Key,
    ) -> Tensor:
        ctx.save_for_backward(a, b, offs, sequences)
        ctx.main_grad, ctx.key = main_grad, key
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _grouped.grouped_rows(  # type: ignore[no-any-return]
            a, b, bias, offs, sequences, out_dtype, key
        )

    @staticmethod
    @without_modes
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, sequences = saved
        _check_main_grad(ctx.main_grad, b, a=a, grad=grad)
        of_a, _, of_bias = ctx.needs_input_grad[:3]
        grad_a, _, grad_bias = _grouped.rows_gradients(
            grad,
            None,
            b if of_a else None,
            offs,
            sequences,
            a.dtype,
            ctx.bias_dtype if of_bias else None,
            False,
            ctx.key,
        )
        terms = a.mT, as_operand(grad, a.dtype, ctx.key)
        # All that can fail has run before anything is written.
        _grouped.grouped_terms_later(ctx.main_grad, *terms, offs, sequences, ctx.key)()
        return grad_a, None, grad_bias, None, None, None, None, None
