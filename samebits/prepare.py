"""``samebits.prepare``: have kernels compiled and loaded before they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from samebits.contract import Contract
from samebits.ops.linear import linear


def prepare(
    weights: nn.Module | Tensor | Iterable[Tensor],
    rows: Iterable[int | Sequence[int]],
    *,
    backward: bool = False,
    cu_seqlens: torch.dtype | None = None,
    contract: Contract | None = None,
) -> int:
    """Compile and load the kernels that :func:`samebits.linear` will use with these weights.

    The first product of a kind compiles its kernel, which takes seconds, and loads it, which is not allowed
    while a CUDA graph is captured. This runs one product of every kind ahead of time, on contiguous scratch
    inputs of the weight's dtype. Inputs with other strides may want other kernels: run those once yourself.

    Other operations, such as :func:`samebits.linear_logp` and what :func:`samebits.batch_invariant` covers,
    are not prepared: before a step with these is captured, run it once, forward and backward, with inputs of
    the same dtypes, shapes and strides.

    Args:
        weights: a module (all its ``nn.Linear`` layers), or 2-D weights ``[out_features, in_features]``.
        rows: the inputs to come: their numbers of rows (tokens), or shapes ``(B, T, ...)`` without features.
        backward: prepare the gradients too.
        cu_seqlens: prepare packed sequences, with offsets of this dtype (``torch.int32`` or ``torch.int64``).
        contract: as in :func:`samebits.linear`; by default each layer's own.

    Returns:
        How many different products were prepared.

    Raises:
        TypeError: ``weights`` or ``rows`` are not of these kinds.
        ValueError: a size is negative, or there is nothing to prepare.
    """
    layers: list[tuple[Tensor, Tensor | None, Contract | None]]
    if isinstance(weights, nn.Module):
        linears = [m for m in weights.modules() if isinstance(m, nn.Linear)]
        layers = [(m.weight, m.bias, contract or getattr(m, "contract", None)) for m in linears]
    else:
        layers = [(t, None, contract) for t in ([weights] if isinstance(weights, Tensor) else weights)]
    kinds = {(w.shape, w.stride(), w.dtype, w.device, b is None, c): (w, b, c) for w, b, c in layers}
    shapes = _shapes(rows)
    if not kinds or not shapes:
        raise ValueError(f"samebits.prepare: nothing to prepare: {len(layers)} linear layers, rows {shapes}")
    for weight, bias, its_contract in kinds.values():
        parameters = [t.detach().requires_grad_(backward) for t in (weight, bias) if t is not None]
        for shape in shapes:
            x = weight.new_zeros(*shape, weight.shape[-1], requires_grad=backward)
            ends = None
            if cu_seqlens is not None:
                ends = torch.tensor([0, math.prod(shape)], dtype=cu_seqlens, device=weight.device)
            with torch.set_grad_enabled(backward):
                y = linear(x, *parameters, cu_seqlens=ends, contract=its_contract)
            if backward:
                torch.autograd.grad(y, (x, *parameters), torch.zeros_like(y))
    return len(kinds) * len(shapes)


def _shapes(rows: Iterable[int | Sequence[int]]) -> list[tuple[int, ...]]:
    if isinstance(rows, int):
        raise TypeError(f"samebits.prepare: rows: expected numbers or shapes, got {rows}: write [{rows}]")
    shapes: dict[tuple[int, ...], None] = {}
    for r in rows:
        shape = (r,) if isinstance(r, int) else tuple(r) if isinstance(r, Sequence) else None
        if shape is None or not all(isinstance(n, int) for n in shape):
            raise TypeError(f"samebits.prepare: rows: expected numbers or shapes, got {r!r}")
        if min(shape, default=0) < 0:
            raise ValueError(f"samebits.prepare: rows: expected sizes of 0 or more, got {shape}")
        shapes[shape] = None
    return list(shapes)
