"""The operator under attention and its gradient, for every device.

The public functions check their arguments and call :func:`attend`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.backends import Key, module_for
from samebits.backends.attention import Align, Attention
from samebits.ops._memory import has_memory, refuse_overlap
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import rounded
from samebits.ops._sequences import assert_cu_seqlens, check_cu_seqlens
from samebits.ops.expand import sum_to

_LARGEST = 1e38  # LOG2E times this is finite
_is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether both have one storage


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    positions: tuple[Tensor | None, ...],
    window: tuple[int, int],
    align: Align,
    scale: float | None,
    softcap: float,
    key: Key,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, which is `into` if given, and the log-sum-exp.

    What a scale that is not positive asks for is done to q.
    """
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    scale, softcap = (float(np.float32(x)) for x in (scale, softcap))
    if not abs(scale) < _LARGEST:
        raise ValueError(f"samebits.attention: scale: expected a magnitude below {_LARGEST:g}, got {scale}")
    if not 0 <= softcap < _LARGEST:
        raise ValueError(f"samebits.attention: softcap: expected one in [0, {_LARGEST:g}), got {softcap}")
    if scale < 0:
        q, scale = -q, -scale
    elif scale == 0:
        q, scale = q * 0, 1.0
    args = (q, k, v, mask, sinks, *positions, *window, align, scale, softcap, key)
    if into is not None:
        _refuse_shared(into, args[:10])
        lse = _writing(into, *args)
        _written(into)
        return into, lse
    out, lse, _ = _operator(*args)
    return out, lse


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_start: Tensor | None,
    key_length: Tensor | None,
    block_table: Tensor | None,
    left: int,
    right: int,
    align: Align,
    scale: float,
    softcap: float,
    key: Key,
) -> tuple[Any, Attention]:
    """The module that computes on the device of q, and what it is to compute."""
    backend, contract = module_for("attention", q, key)
    x = Attention(
        *(q, k, v, contract, scale, softcap, (left, right), align),
        mask=mask,
        sinks=None if sinks is None else sinks.to(torch.float32).contiguous(),
        cu_seqlens_q=_as_int32(cu_seqlens_q),
        cu_seqlens_k=_as_int32(cu_seqlens_k),
        key_start=_as_int32(key_start),
        key_length=_as_int32(key_length),
        block_table=_as_int32(block_table, rows=True),
    )
    if mask is not None:
        whole = (x.batch, x.heads, x.queries, x.keys)
        x = dataclasses.replace(x, mask=mask.expand(whole))
    for name, offsets, tokens in (
        ("cu_seqlens_q", cu_seqlens_q, x.queries),
        ("cu_seqlens_k", cu_seqlens_k, x.keys),
    ):
        if offsets is not None:
            if not q.is_cuda:
                check_cu_seqlens("attention", offsets, tokens, name)
            elif not backend.checks_offsets(x):
                assert_cu_seqlens("attention", offsets, tokens, key)
    if not q.is_cuda:
        _check_slots(x, key_start, key_length, block_table)
    return backend, x


def _as_int32(t: Tensor | None, *, rows: bool = False) -> Tensor | None:
    """`t` as kernels take it: contiguous, or with contiguous rows."""
    if t is None:
        return None
    if t.dtype == torch.int64:
        t = t.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)  # what is outside of the keys stays so
    return t if t.is_contiguous() or (rows and t.stride(-1) == 1) else t.contiguous()


def _check_slots(
    x: Attention, key_start: Tensor | None, key_length: Tensor | None, block_table: Tensor | None
) -> None:
    """Refuse starts, lengths and pages that do not exist. Reads the values."""
    starts = [0] * x.batch if key_start is None else key_start.tolist()
    lengths = [x.keys] * x.batch if key_length is None else key_length.tolist()
    if x.cu_seqlens_k is None:
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if not 0 <= start <= length <= x.keys:
                raise ValueError(
                    "samebits.attention: key_start, key_length: expected 0 <= start <= length <="
                    f" {x.keys} (slots), got {start} and {length} of sequence {b}"
                )
    if block_table is not None:
        page, pages = x.k.shape[1], x.k.shape[0]
        for b, table in enumerate(block_table.tolist()):
            for block in table[starts[b] // page : -(-lengths[b] // page)] if page else ():
                if not 0 <= block < pages:
                    raise ValueError(
                        f"samebits.attention: block_table: expected pages in [0, {pages}), got {block} of"
                        f" sequence {b}"
                    )


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    backend, x = _call(*args)
    results: tuple[Tensor, Tensor, Tensor] = backend.forward(x)
    return results


def _forward_into(out: Tensor, *args: Any) -> Tensor:
    _refuse_shared(out, args[:10])
    backend, x = _call(*args)
    found, lse, _ = backend.forward(x, out if out.is_contiguous() else None)
    if found is not out:
        out.copy_(found)
    _written(out)
    return lse  # type: ignore[no-any-return]


def _refuse_shared(out: Tensor, operands: tuple[Any, ...]) -> None:
    """Refuse an `out` that overlaps itself, or shares memory with one of the operator's tensors."""
    if not out.is_contiguous() and has_memory(out):
        refuse_overlap("attention", "out", out)
    if torch.compiler.is_compiling():
        return
    for name, t in zip(_TENSORS, operands, strict=True):
        if t is not None and _is_alias_of(out, t) and has_memory(out, t):
            refuse_overlap("attention", "out", out, **{name: t})


def _written(out: Tensor) -> None:
    """Tell autograd, which does not see what a kernel writes."""
    if not torch.compiler.is_compiling() and not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _gradients(
    grad: Tensor, out: Tensor, lse2: Tensor, grad_mask: bool, q: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    backend, x = _call(q, *args)
    mask, sinks = args[2:4]
    dq, dk, dv, dmask, dsinks = backend.backward(x, grad, out, lse2, grad_mask=grad_mask)
    if dmask is not None:
        dmask = rounded(dmask if dmask.shape == mask.shape else sum_to(dmask, mask.shape), mask.dtype)
    if dsinks is not None:
        dsinks = rounded(dsinks, sinks.dtype)
    return dq, dk, dv, *(q.new_empty(0) if t is None else t for t in (dmask, dsinks))


def _fake(q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Any, *rest: Any) -> tuple[Tensor, ...]:
    packed = rest[0] is not None
    statistics = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse, lse2 = (q.new_empty(statistics, dtype=torch.float32) for _ in range(2))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, lse2


def _fake_into(out: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return _fake(q, *rest)[1]


def _fake_gradients(
    grad: Tensor, out: Tensor, lse2: Tensor, grad_mask: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    mask, sinks = rest[:2]
    like_mask = q.new_empty(mask.shape, dtype=mask.dtype) if grad_mask else q.new_empty(0)
    like_sinks = q.new_empty(0) if sinks is None else q.new_empty(sinks.shape, dtype=sinks.dtype)
    return *(t.new_empty(t.shape) for t in (q, k, v)), like_mask, like_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:10], inputs[10:]
    out, lse, lse2 = output
    ctx.mark_non_differentiable(lse, lse2)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out, lse2)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("attention")
    if grad is None:
        return (None,) * 16
    *tensors, out, lse2 = saved
    needed = ctx.needs_input_grad
    found = _gradient(grad, out, lse2, needed[3], *tensors, *ctx.options)
    grads = (t if wanted else None for t, wanted in zip(found, needed, strict=False))
    return *grads, *(None,) * 11


_TENSORS = (
    *("q", "k", "v", "mask", "sinks"),
    *("cu_seqlens_q", "cu_seqlens_k", "key_start", "key_length", "block_table"),
)
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? key_start, Tensor? key_length, Tensor? block_table, int left, int right, str align,"
    " float scale, float softcap, str contract"
)
_operator = Operator(f"attention({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)", cpu=_forward, fake=_fake)
_operator.register_autograd(_backward, setup_context=_setup_context)
_writing = Operator(
    f"attention_out(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
    cpu=_forward_into,
    fake=_fake_into,
    replays=True,
)
_gradient = Operator(
    f"attention_backward(Tensor grad, Tensor out, Tensor lse2, bool grad_mask, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_gradients,
    fake=_fake_gradients,
)
