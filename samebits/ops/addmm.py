"""``samebits.addmm_``: accumulate a product into float32, and the chain over sequences under it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.utils.weak import WeakIdKeyDictionary

from samebits.backends import Step, on_gpu
from samebits.contract import Contract
from samebits.ops._library import (
    Operator,
    capturing,
    check_device,
    check_operands,
    has_memory,
    shape,
    transform,
)
from samebits.ops.matmul import operand, product


def addmm_(acc: Tensor, a: Tensor, b: Tensor, *, contract: Contract | None = None) -> Tensor:
    """Carry the chains that ``acc`` holds on over ``a @ b``, in place.

    ``acc[m, n] = acc[m, n] + sum over k of a[m, k] * b[k, n]``

    One chain over ascending k that starts from the value in ``acc`` and is never rounded to less than
    float32, so accumulating one micro-batch after another gives the bits of all of them at once, wherever
    the cuts between them start a new group of 16 tokens (see ``docs/contract.md``, "Sequences").

    Args:
        acc: float32 ``[M, N]``, any strides; may not overlap itself, ``a`` or ``b`` in memory.
        a: ``[M, K]``; bfloat16, float16 or float32.
        b: ``[K, N]``; same dtype and device.
        contract: as in :func:`samebits.matmul`.

    Returns:
        ``acc``. With K = 0 it keeps its bits.

    Raises:
        TypeError: ``acc`` is not float32, or ``a`` and ``b`` are not what :func:`samebits.matmul` takes.
        ValueError: shapes or devices do not match, or ``acc`` overlaps. Nothing has been written then.
        NotImplementedError: under ``torch.vmap``.
    """
    given = {"a": a, "b": b}
    (a, b), key, plain = check_operands("addmm_", contract, given)
    if not plain:
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
    if has_memory(acc, *given.values()):  # traced code writes to a copy of its own
        refuse_overlap("addmm_", "acc", acc, **given)
    a4, b4 = a[None, None], b[None, None]
    if torch.is_grad_enabled() and (acc.requires_grad or a.requires_grad or b.requires_grad):
        chain = addbmm(acc[None], a4, b4, None, torch.float32, key)
        return acc.copy_(chain[0])
    addbmm_(acc[None], a4, b4, None, key)
    return acc


def refuse_vmap(op: str, name: str) -> None:
    """PyTorch has no loop over a batch for operators that write, and says so in other words."""
    if not torch.compiler.is_compiling() and transform() == TransformType.Vmap:
        raise NotImplementedError(
            f"samebits.{op}: {name}: torch.vmap is not implemented for what is written in place; use a loop"
        )


def check_accumulator(op: str, name: str, acc: Tensor, lead_name: str, lead: Tensor) -> None:
    """Refuse anything but a dense and plain float32 tensor on the device of ``lead``."""
    if not isinstance(acc, Tensor) or acc.dtype != torch.float32:
        got = acc.dtype if isinstance(acc, Tensor) else type(acc).__name__
        raise TypeError(f"samebits.{op}: {name}: expected a dense float32 tensor, got {got}")
    if acc.layout is not torch.strided or acc.is_nested:
        raise TypeError(f"samebits.{op}: {name}: expected a dense float32 tensor, got layout {acc.layout}")
    if not torch.compiler.is_compiling():
        if acc.is_neg():
            raise TypeError(
                f"samebits.{op}: {name}: expected a plain tensor, got a view with negated elements"
            )
        if acc.is_inference() and not torch.is_inference_mode_enabled():
            raise TypeError(f"samebits.{op}: {name}: expected a plain tensor, got one made in inference mode")
    check_device(op, name, acc, lead_name, lead)


# Effort after which two memory layouts count as overlapping. numpy's stub knows of its two names only.
_OVERLAP_WORK: Any = 1 << 20


def check_cu_seqlens(op: str, cu_seqlens: Tensor, tokens: int) -> None:
    """Refuse offsets that do not cut `tokens` tokens into consecutive spans. Reads the values."""
    if cu_seqlens.numel() == 0:
        raise ValueError(f"samebits.{op}: cu_seqlens: expected at least one offset, got none")
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(
            f"samebits.{op}: cu_seqlens: expected to run from 0 to {tokens} (the number of tokens),"
            f" got {ends[0]} to {ends[-1]}"
        )
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        if stop < start:
            raise ValueError(
                f"samebits.{op}: cu_seqlens: expected non-decreasing offsets, got {start} then {stop}"
                f" at positions {i} and {i + 1}"
            )


_asserted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def assert_cu_seqlens(op: str, cu_seqlens: Tensor, tokens: int, contract: str) -> None:
    """As :func:`check_cu_seqlens`, on the GPU and without waiting for it: bad offsets end in a device assert.

    Layers share one tensor of offsets, and a look costs a launch, so each state of it is looked at once; but
    a CUDA graph looks at every replay. PyTorch's version of the tensor tells its states apart, and counts no
    writes through ``.data``, by a CUDA graph or to an inference tensor. Nobody looks at what those leave. It
    is safe: kernels take offsets outside of the tokens as the nearer end, and spans that end before they
    start as empty.
    """
    in_graph = capturing(cu_seqlens)
    seen = (0 if cu_seqlens.is_inference() else cu_seqlens._version, tokens)
    if not in_graph and _asserted.get(cu_seqlens) == seen:
        return
    if cu_seqlens.numel() == 0:
        raise ValueError(f"samebits.{op}: cu_seqlens: expected at least one offset, got none")
    backend, _ = on_gpu("assert_spans", contract, cu_seqlens.get_device())
    backend.assert_spans(cu_seqlens, tokens)
    if not in_graph:
        _asserted[cu_seqlens] = seen


def _cpu(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    from samebits.backends.reference import matmul as reference

    if cu_seqlens is not None:
        check_cu_seqlens("addbmm", cu_seqlens, a.shape[-1])
    return reference.addbmm(acc, a, b, cu_seqlens, out_dtype=out_dtype, contract=contract)


def _cuda(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    backend, key = on_gpu("matmul", contract, a.get_device())
    if cu_seqlens is not None:
        assert_cu_seqlens("addbmm", cu_seqlens, a.shape[-1], contract)
    out: Tensor = backend.addbmm(acc, a, b, cu_seqlens, out_dtype=out_dtype, contract=key)
    return out


def _inplace(acc: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, contract: str) -> None:
    addbmm_later(acc, a, b, cu_seqlens, contract)()


def addbmm_later(acc: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, contract: str) -> Step:
    """:func:`addbmm_` of plain tensors up to the write, which the step that is returned does."""
    if a.is_cuda:
        backend, key = on_gpu("matmul", contract, a.get_device())
        if cu_seqlens is not None:
            assert_cu_seqlens("addbmm_", cu_seqlens, a.shape[-1], contract)
    else:
        from samebits.backends.reference import matmul as backend

        key = contract
        if cu_seqlens is not None:
            check_cu_seqlens("addbmm_", cu_seqlens, a.shape[-1])
    write = backend.addbmm_later(acc, a, b, cu_seqlens, accumulate=True, contract=key)

    def step() -> None:
        write()
        torch.autograd.graph.increment_version(acc)  # a kernel writes where autograd cannot see

    return step


def refuse_overlap(op: str, called: str, acc: Tensor, **operands: Tensor) -> None:
    """Refuse an accumulator, `called` so, that overlaps itself or an operand in memory."""
    if acc.numel() == 0:
        return
    extent = 1
    for stride, size in sorted(zip(acc.stride(), acc.shape, strict=True)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"samebits.{op}: {called}: expected elements that do not overlap, got shape"
                    f" {tuple(acc.shape)} with strides {acc.stride()}"
                )
            extent += stride * (size - 1)
    for name, t in operands.items():
        if _span(acc)[0] >= _span(t)[1] or _span(t)[0] >= _span(acc)[1]:
            continue
        try:
            overlaps = np.shares_memory(_memory(acc), _memory(t), max_work=_OVERLAP_WORK)
        except np.exceptions.TooHardError:
            overlaps = True
        if overlaps:
            raise ValueError(
                f"samebits.{op}: {called}: expected memory of its own, got memory that {name} shares"
            )


def _span(t: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one past its last."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (reach + 1) * t.element_size()


def _memory(t: Tensor) -> Any:
    """An array over the addresses of `t`, on any device, to reason about and never to read."""
    size = t.element_size()
    strides = tuple(s * size for s in t.stride())
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(t.shape),
        "strides": strides,
        "data": (t.data_ptr(), True),
    }
    holder = type("Addresses", (), {"__array_interface__": interface})
    return np.asarray(holder())


def _fake(
    acc: Tensor | None,
    a: Tensor,
    b: Tensor,
    cu_seqlens: Tensor | None,
    out_dtype: torch.dtype,
    contract: str,
) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[2], b.shape[3]), dtype=out_dtype)


def _fake_inplace(acc: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor | None, contract: str) -> None:
    pass


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, a, b, _, _, ctx.contract = inputs
    needed = ctx.needs_input_grad  # each operand is saved for the other's gradient alone
    ctx.save_for_backward(a if needed[2] else None, b if needed[1] else None)
    ctx.dtype = a.dtype


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = saved
    grad_acc = grad.to(torch.float32) if ctx.needs_input_grad[0] else None
    grad = operand(grad, ctx.dtype, ctx.contract).unsqueeze(1)
    grad_a = grad_b = None
    if ctx.needs_input_grad[1]:
        grad_a = product(grad, b.mT, None, ctx.dtype, ctx.contract)
    if ctx.needs_input_grad[2]:
        B, S, M, K = a.shape
        rows = grad.expand(B, S, *grad.shape[2:]).reshape(B * S, 1, *grad.shape[2:])
        columns = a.mT.reshape(B * S, 1, K, M)
        out = addbmm(None, columns, rows, None, ctx.dtype, ctx.contract)
        grad_b = out.reshape(B, S, K, grad.shape[-1])
    return grad_acc, grad_a, grad_b, None, None, None


# The chain over sequences: out[B, M, N] = acc[B, M, N] + a[B, S, M, K] @ b[B, S, K, N] over s, then k. Every
# s, or with cu_seqlens (and S = 1) every span of K, is a sequence.
addbmm = Operator(
    "addbmm(Tensor? acc, Tensor a, Tensor b, Tensor? cu_seqlens, ScalarType out_dtype, str contract)"
    " -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
addbmm_ = Operator(
    "addbmm_(Tensor(a!) acc, Tensor a, Tensor b, Tensor? cu_seqlens, str contract) -> ()",
    cpu=_inplace,
    cuda=_inplace,
    fake=_fake_inplace,
)
