"""Row reductions on CPU tensors: threads run `rows_kernels` on parts of the rows, or of the columns."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from samebits.backends.reference import activation_kernels
from samebits.backends.reference import rows_kernels as kernels
from samebits.backends.reference.logp import over_rows
from samebits.backends.reference.matmul import require_subnormals, rounded

_f32 = partial(torch.empty, dtype=torch.float32)  # the default dtype may be another


def row_sum(x: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
    """Sums or means in `dtype` of the rows of ``x[rows, n]``."""
    wide, out = _wide(x), _f32(x.shape[0])
    over_rows(wide, lambda *span: kernels.row_sum(wide.numpy(), out.numpy(), mean, *span))
    return rounded(out[:, None], dtype)[:, 0]


def row_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """2-norms in `dtype` of the rows of ``x[rows, n]``."""
    wide = _wide(x)
    return rounded(_root(row_sum(wide * wide, False, torch.float32))[:, None], dtype)[:, 0]


def _root(x: Tensor) -> Tensor:
    """PyTorch's float32 square root is not rounded correctly on every CPU; that of float64 rounds to it."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def rsqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)``, contiguous."""
    return rounded((1 / _root(_wide(x))).reshape(1, -1), x.dtype).view(x.shape)


def softmax(x: Tensor, logarithm: bool, dtype: torch.dtype) -> Tensor:
    """Softmax or its logarithm in `dtype` of the rows of ``x[rows, n]``."""
    z, out = _wide(x), _f32(x.shape)
    over_rows(z, lambda *span: kernels.softmax(z.numpy(), out.numpy(), logarithm, *span))
    return rounded(out, dtype)


def softmax_backward(grad: Tensor, out: Tensor, logarithm: bool, dtype: torch.dtype) -> Tensor:
    """Gradients in `dtype` of the rows that gave `out`."""
    g, y = _wide(grad), _wide(out)
    dx = torch.empty_like(g)
    if logarithm:
        over_rows(g, lambda *span: kernels.log_softmax_backward(g.numpy(), y.numpy(), dx.numpy(), *span))
    else:
        over_rows(g, lambda *span: kernels.softmax_backward(g.numpy(), y.numpy(), dx.numpy(), *span))
    return rounded(dx, dtype)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of the rows of ``x[rows, n]`` (RMS norm without `centred`), means and 1 / deviations."""
    wide, out = _wide(x), _f32(x.shape)
    means, scales = _f32(x.shape[0] if centred else 0), _f32(x.shape[0])
    arrays = (_vector(weight).numpy(), _vector(bias).numpy(), eps, centred, out.numpy())
    over_rows(
        wide,
        lambda *span: kernels.norm(wide.numpy(), *arrays, means.numpy(), scales.numpy(), *span),
    )
    means, scales = (rounded(t[None], torch.float32)[0] for t in (means, scales))
    return rounded(out, x.dtype), means, scales


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor) -> Tensor:
    """Gradients of the rows of `x`."""
    g, wide, out = _wide(grad), _wide(x), _f32(x.shape)
    arrays = (g.numpy(), wide.numpy(), _vector(weight).numpy(), means.numpy(), scales.numpy(), out.numpy())
    over_rows(wide, lambda *span: kernels.norm_backward(*arrays, *span))
    return rounded(out, x.dtype)


def norm_columns(
    grad: Tensor, x: Tensor, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients in `dtype` of weight and bias."""
    g, wide = _wide(grad), _wide(x)
    out = _f32(2, x.shape[1])
    arrays = (g.numpy(), wide.numpy(), means.numpy(), scales.numpy(), out[0].numpy(), out[1].numpy())
    over_rows(wide.T, lambda *span: kernels.norm_columns(*arrays, *span))
    return rounded(out[:1], dtype)[0], rounded(out[1:], dtype)[0]


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, means: Tensor, scales: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows of `x`, and in `dtype` of weight and bias."""
    return (
        norm_backward(grad, x, weight, means, scales),
        *norm_columns(grad, x, means, scales, dtype),
    )


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums in `dtype` over the first dimension of ``x[tokens, ...]``: chains over tokens."""
    wide = _wide(x).flatten(1)
    out = _f32(1, wide.shape[1])
    over_rows(wide.T, lambda *span: kernels.column_sum(wide.numpy(), out[0].numpy(), *span))
    return rounded(out, dtype)[0].view(x.shape[1:])


def slot_sum(x: Tensor) -> Tensor:
    """``x[a, n, b].sum(1)``: sums of rows."""
    a, n, b = x.shape
    return row_sum(x.transpose(1, 2).reshape(a * b, n), False, x.dtype).view(a, b)


def take_slots(x: Tensor, places: Tensor, count: int, weights: Tensor | None) -> Tensor:
    """``x[i // count]`` in row ``places[i]``, times ``weights[i]``, rounded once."""
    rows = x.repeat_interleave(count, 0)
    if weights is not None:
        rows = rounded(_wide(rows) * _wide(weights).reshape(-1, 1), x.dtype)
    return torch.empty_like(rows).index_copy_(0, places, rows)


def combine_slots(x: Tensor, places: Tensor, count: int, weights: Tensor | None) -> Tensor:
    """Sums over every token's `count` slots i of ``x[places[i]]``, times ``weights[i]``, rounded once.

    Weights are of the dtype of `x`, or in float32, as then are products and sums.
    """
    rows = x.index_select(0, places)
    if weights is not None:
        rows = rounded(_wide(rows) * _wide(weights).reshape(-1, 1), weights.dtype)
    return slot_sum(rows.view(len(places) // count, count, x.shape[1]))


def route(experts: Tensor, count: int, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Slots by their experts, sorted stably. Numbers below 0 count as 0, those beyond `count` as `count`.

    Returns:
        The sorted experts, the slots that they are of, where each slot is there, the ends of `count` experts,
        and the numbers of sequences of `each` slots; none for 0.
    """
    experts, order = experts.clamp(0, count).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(count, device=order.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    sequences = (order // each if each else order[:0]).to(torch.int32)
    return experts, order, places, ends, sequences


def topk_routing(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    top_groups: int,
    renormalize: bool,
    eps: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weights in `dtype` and indices of the `k` experts of each row of ``logits[tokens, experts]``."""
    if score == "logits":
        chosen = _largest(_wide(logits), k)
        return softmax(_wide(logits).gather(1, chosen), False, dtype), chosen
    scores = softmax(logits, False, torch.float32) if score == "softmax" else _sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        each = choice.unflatten(1, (groups, -1))
        sums = each.gather(2, _largest(each, 2)).sum(2)
        hidden = torch.ones_like(sums, dtype=torch.bool).scatter(1, _largest(sums, top_groups), False)
        choice = each.masked_fill(hidden[:, :, None], -torch.inf).flatten(1)
    chosen = _largest(choice, k)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (row_sum(weights, False, torch.float32)[:, None] + eps)
    return rounded(weights * scale, dtype), chosen


def _sigmoid(x: Tensor) -> Tensor:
    z, out = _wide(x), _f32(x.shape)
    arrays = z.numpy(), out.numpy(), activation_kernels.SIGMOID
    over_rows(z, lambda *span: activation_kernels.activate(*arrays, *span))
    return rounded(out, torch.float32)


def _largest(x: Tensor, k: int) -> Tensor:
    """Places of the `k` largest along the last dimension: the first of equal ones first, NaN above all."""
    return x.sort(dim=-1, descending=True, stable=True)[1][..., :k].contiguous()


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """``weight[ids]``, by PyTorch: rows are copied."""
    return torch.embedding(weight, ids)


def embedding_backward(grad: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    """Gradients ``[count, n]`` of an embedding's rows from ``grad[tokens, n]`` and ``ids[tokens]``."""
    g, out = _wide(grad), _f32(count, grad.shape[1])
    arrays = (g.numpy(), ids.numpy(), padding, out.numpy())
    over_rows(g.T, lambda *span: kernels.embedding_backward(*arrays, *span))
    return rounded(out, grad.dtype)


def _wide(x: Tensor) -> Tensor:
    require_subnormals()
    return x.detach().to(torch.float32)


def _vector(x: Tensor | None) -> Tensor:
    """A copy of a parameter. FSDP2 cannot free memory that ``Tensor.numpy`` shares."""
    return _f32(0) if x is None else _wide(x).clone()
