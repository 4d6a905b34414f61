"""Adapters (LoRA) of an engine's tokens, which may differ: their products, added to a layer's output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.backends import module_for
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._fused import refuse_gradients
from samebits.ops._operator import Operator

__all__ = ["GROUP", "add_adapters"]

_OP = "add_adapters"
GROUP = 16
"""Ranks are multiples of it, filled up with zeros."""
_MOST_SLICES = 16


def add_adapters(
    base: Tensor, inner: Tensor, b: Tensor, adapters: Tensor, scalings: Tensor, ends: Sequence[int]
) -> Tensor:
    """``base + B(inner) * scaling`` of every token's own adapter, each step rounded to the dtype.

    A layer may have several slices side by side, such as queries, keys and values. Each has matrices A and B
    of its own. One launch on a GPU. No token's bits depend on those beside it.

    Args:
        base: the layer's output ``[tokens, N]``; bfloat16, float16 or float32, any strides.
        inner: ``[tokens, slots * slices * rank]``, the product with A of every slot and slice. Of a token
            only that of its own adapter is read.
        b: ``[slots, N, rank]``, of any strides, with a rank that is a multiple of 16.
        adapters: int64 ``[tokens]``, the slot of each token. Any number that is no slot means none: then the
            token keeps its output. The values stay on the device: nothing waits for them.
        scalings: float32 ``[slots, slices]``. NaN means that the slot's adapter has no such slice: its tokens
            keep their output there.
        ends: where each slice ends, the last one at N.

    Raises:
        TypeError: a dtype is another.
        ValueError: a shape, a device or an end does not fit.
        NotImplementedError: a gradient is asked for.
    """
    operands = {"base": base, "inner": inner, "b": b}
    (base, inner, b), key, _ = check_operands(_OP, None, operands, autocast=False)
    for name, t, dtype in (("adapters", adapters, torch.int64), ("scalings", scalings, torch.float32)):
        if not isinstance(t, Tensor) or t.dtype != dtype:
            found = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"samebits.{_OP}: {name}: expected a Tensor of {dtype}, got {found}")
        check_device(_OP, name, t, "base", base)
    refuse_gradients(_OP, base=base, inner=inner, b=b, scalings=scalings)
    if base.ndim != 2 or b.ndim != 3 or b.shape[1] != base.shape[1]:
        raise ValueError(
            f"samebits.{_OP}: base, b: expected [tokens, N] and [slots, N, rank], got shapes"
            f" {shape(base)} and {shape(b)}"
        )
    slots, n, rank = b.shape
    if rank % GROUP or rank == 0:
        raise ValueError(f"samebits.{_OP}: b: expected a rank that is a multiple of {GROUP}, got {rank}")
    ends = tuple(ends)
    if (
        not 0 < len(ends) <= _MOST_SLICES
        or not all(isinstance(end, int) for end in ends)
        or ends[-1] != n
        or any(begin > end for begin, end in itertools.pairwise((0, *ends)))
    ):
        raise ValueError(
            f"samebits.{_OP}: ends: expected up to {_MOST_SLICES} ascending integers, the last one {n}, got"
            f" {ends}"
        )
    for name, t, wanted in (
        ("inner", inner, (len(base), slots * len(ends) * rank)),
        ("adapters", adapters, (len(base),)),
        ("scalings", scalings, (slots, len(ends))),
    ):
        if t.shape != wanted:
            raise ValueError(f"samebits.{_OP}: {name}: expected shape {wanted}, got {shape(t)}")
    return _operator(base, inner, b, adapters, scalings, ends, key)  # type: ignore[no-any-return]


def _run(base: Tensor, *rest: Any) -> Tensor:
    *given, key = rest
    on, contract = module_for("adapters", base, key)
    found: Tensor = on.add_adapters(base, *given, contract)
    return found


def _fake(base: Tensor, *_: object) -> Tensor:
    return base.new_empty(base.shape)


_operator = Operator(
    "add_adapters(Tensor base, Tensor inner, Tensor b, Tensor adapters, Tensor scalings, int[] ends,"
    " str contract) -> Tensor",
    cpu=_run,
    fake=_fake,
)
