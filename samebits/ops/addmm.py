"""``samebits.addmm_``: accumulate a product into float32."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.contract import Contract
from samebits.ops import _products
from samebits.ops._checks import check_operands, check_segments, shape
from samebits.ops._memory import check_accumulator, has_memory, refuse_overlap, refuse_vmap


def addmm_(acc: Tensor, a: Tensor, b: Tensor, *, contract: Contract | None = None) -> Tensor:
    """Continue the chains in ``acc`` over ``a @ b``, in place.

    ``acc[m, n] = acc[m, n] + sum over k of a[m, k] * b[k, n]``

    Every element is one chain over ascending k that starts from the value in ``acc``. It is never rounded to
    less than float32. So micro-batches that are accumulated one after another give the bits of one large
    batch, if every cut between them starts a new group of 16 tokens (see ``docs/contract.md``, "Sequences").

    Args:
        acc: float32 ``[M, N]``, any strides; may not overlap itself, ``a`` or ``b`` in memory.
        a: ``[M, K]``; bfloat16, float16 or float32.
        b: ``[K, N]``; same dtype and device.
        contract: as in :func:`samebits.matmul`. Segments do not cut this sum: it is one chain.

    Returns:
        ``acc``. With K = 0 it keeps its bits.

    Raises:
        TypeError: ``acc`` is not float32, or ``a`` and ``b`` are not what :func:`samebits.matmul` takes.
        ValueError: shapes or devices do not match, or ``acc`` overlaps. Nothing is written then.
        NotImplementedError: under ``torch.vmap``.
    """
    given = {"a": a, "b": b}
    (a, b), key, bypass = check_operands("addmm_", contract, given)
    if not bypass:
        refuse_vmap("addmm_", "acc")
    check_accumulator("addmm_", "acc", acc, "a", a)
    if acc.is_leaf and acc.requires_grad and torch.is_grad_enabled():
        raise ValueError("samebits.addmm_: acc: expected no leaf that requires grad, it is changed in place")
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"samebits.addmm_: a, b: expected 2-D, got shapes {shape(a)} and {shape(b)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            "samebits.addmm_: a, b: inner dimensions must be equal, got"
            f" {a.shape[1]} and {b.shape[0]} of shapes {shape(a)} and {shape(b)}"
        )
    if acc.ndim != 2 or acc.shape[0] != a.shape[0] or acc.shape[1] != b.shape[1]:
        raise ValueError(
            f"samebits.addmm_: acc: expected shape {(a.shape[0], b.shape[1])}, got {shape(acc)}"
            f" with a {shape(a)} and b {shape(b)}"
        )
    check_segments("addmm_", contract, ("", 0), a, ("b: N", b.shape[1]))
    if has_memory(acc, *given.values()):  # traced code writes to a copy
        refuse_overlap("addmm_", "acc", acc, **given)
    a4, b4 = a[None, None], b[None, None]
    if torch.is_grad_enabled() and (acc.requires_grad or a.requires_grad or b.requires_grad):
        chain = _products.addbmm(acc[None], a4, b4, None, torch.float32, key)
        return acc.copy_(chain[0])
    _products.addbmm_(acc[None], a4, b4, None, key)
    return acc
