"""What fused layers share: their backend, and checks of what they write into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import chosen_backend, module_for
from samebits.ops._checks import are_plain, check_device, check_operands, shape
from samebits.ops._memory import has_memory, refuse_overlap, refuse_vmap
from samebits.remedies import see


def backend(operation: str, t: Tensor) -> Any:
    """The module of a fused layer on the device of `t`."""
    return module_for(operation, t)[0]


def check_tensors(op: str, **tensors: Tensor | None) -> bool:
    """Refuse what is not a dense tensor of bf16, f16 or f32 on the device of the first one. None is allowed.

    Returns:
        Whether :func:`samebits.ops._operator.bypasses_dispatcher` is known to hold for all.
    """
    given = {name: t for name, t in tensors.items() if t is not None}
    lead, first = next(iter(given.items()))
    if all(isinstance(t, Tensor) for t in given.values()) and are_plain([*given.values()]):
        chosen_backend("cuda" if first.is_cuda else "cpu", op)
        return True
    for name, t in given.items():
        check_operands(op, None, {name: t}, autocast=False)
        check_device(op, name, t, lead, first)
    return False


def refuse_gradients(op: str, **tensors: Tensor | None) -> None:
    """Raise if a gradient is asked for."""
    if torch.is_grad_enabled():
        for name, t in tensors.items():
            if t is not None and t.requires_grad:
                raise NotImplementedError(
                    f"samebits.{op}: {name}: gradients are not implemented; expected torch.no_grad(), or a"
                    " tensor that requires no grad" + see("derivatives")
                )


def check_out(
    op: str,
    name: str,
    out: Tensor,
    like: Tensor,
    dtype: torch.dtype,
    may_be: Sequence[Tensor | None],
    **operands: Tensor | None,
) -> None:
    """Refuse an `out`, the argument `name`, that is not of the shape and on the device of `like`.

    It may be one of `may_be`. It may not overlap an operand otherwise.
    """
    if not isinstance(out, Tensor) or out.layout is not torch.strided or out.is_nested or out.dtype != dtype:
        got = f"{out.dtype}, {out.layout}" if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(f"samebits.{op}: {name}: expected a dense tensor of {dtype}, got {got}")
    if out.shape != like.shape:
        raise ValueError(f"samebits.{op}: {name}: expected shape {shape(like)}, got {shape(out)}")
    check_device(op, name, out, next(iter(operands)), like)
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError(f"samebits.{op}: {name}: expected a tensor that requires no grad, it is written to")
    refuse_vmap(op, name)
    allowed = [t for t in may_be if t is not None and _is_same(t, out)]
    given = {o: t for o, t in operands.items() if t is not None and not any(t is a for a in allowed)}
    if has_memory(out, *given.values()):
        refuse_overlap(op, name, out, **given)


def refuse_shared(op: str, **outs: Tensor) -> None:
    """Refuse two tensors that are written to, if they share memory."""
    (first, a), (second, b) = outs.items()
    if a is b or (has_memory(a, b) and a.data_ptr() == b.data_ptr() and a.numel()):
        raise ValueError(f"samebits.{op}: {second}: expected memory of its own, got that of {first}")
    if has_memory(a, b):
        refuse_overlap(op, second, b, **{first: a})


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same elements in memory, each at its place."""
    return a is b or (
        has_memory(a, b)
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )
