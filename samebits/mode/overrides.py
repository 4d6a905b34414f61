"""Replacements of PyTorch's functions under ``samebits.batch_invariant``, other than products.

Each function has the parameters of PyTorch's, without ``out``, which :mod:`samebits.mode.context` handles. It
returns NotImplemented for arguments that are not covered. Arguments that PyTorch refuses are refused here,
too. Where the usual checks leave that open, :func:`samebits.mode.arguments.as_pytorch` asks PyTorch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import chosen_backend
from samebits.mode.arguments import as_pytorch, records, takes
from samebits.mode.products import in_place
from samebits.mode.vectors import in_whole_vectors
from samebits.ops._memory import has_memory
from samebits.ops.activation import activation, gelu
from samebits.ops.attention import scaled_dot_product_attention
from samebits.ops.cross_entropy import cross_entropy as cross_entropy_of_rows
from samebits.ops.embedding import copied_rows, embedding
from samebits.ops.expand import expand, sum_over_broadcast
from samebits.ops.layout import in_memory_order
from samebits.ops.logsumexp import logsumexp
from samebits.ops.norm import layer_norm, rms_norm
from samebits.ops.norm_of_shards import is_sharded, norm_of_shards
from samebits.ops.reduce import mean, sum
from samebits.ops.rsqrt import rsqrt
from samebits.ops.softmax import log_softmax, softmax
from samebits.ops.solve import solve_triangular as solve_by_substitution
from samebits.ops.variance import std, var, vector_norm


def softmax_(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
    return _rows(softmax, input, dim, dtype)


def log_softmax_(input: Tensor, dim: Any, dtype: torch.dtype | None = None) -> Any:
    return _rows(log_softmax, input, dim, dtype)


def functional_softmax(
    input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return _rows(softmax, input, dim, dtype)


def functional_log_softmax(
    input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return _rows(log_softmax, input, dim, dtype)


def _rows(op: Callable[..., Tensor], x: Tensor, dim: Any, dtype: torch.dtype | None) -> Any:
    x = _autocast(x) if dtype is None else x.to(dtype)
    if not _is_number(dim) or not takes(x):
        return NotImplemented
    return op(x, operator.index(dim)).contiguous()  # PyTorch's result is contiguous


def _is_number(dim: Any) -> bool:
    """Whether this is one dimension. PyTorch refuses True and False."""
    return isinstance(dim, SupportsIndex) and not isinstance(dim, bool)


def _autocast(x: Tensor) -> Tensor:
    """`x` in the dtype that autocast computes reductions in: float32 on a GPU, unchanged on a CPU."""
    return x.to(torch.float32) if x.is_cuda and torch.is_autocast_enabled("cuda") else x


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    only_defaults = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if (
        not only_defaults
        or not takes(input)
        or target.is_floating_point()
        or reduction not in ("none", "mean", "sum")
    ):
        return NotImplemented
    input = _autocast(input)
    matrix = input.ndim == 2 and target.dtype == torch.int64 and input.shape[1] > 0
    if matrix and (input.dtype == torch.float32 or (target.ndim == 1 and has_memory(input, target))):
        return cross_entropy_of_rows(input, target, ignore_index, reduction)
    # nll_loss's backward needs contiguous ones.
    logarithms = log_softmax(input, 1 if input.ndim > 1 else 0).contiguous()
    loss = F.nll_loss(logarithms, target, None, None, ignore_index, None, "none")
    if reduction == "none":
        return loss
    total = sum(loss)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The operator below :func:`cross_entropy`."""
    by_name = ("none", "mean", "sum")[reduction]
    return cross_entropy(
        input, target, weight, None, ignore_index, None, by_name, label_smoothing=label_smoothing
    )


def layer_norm_(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if not takes(input, *(t for t in (weight, bias) if t is not None)):
        return NotImplemented
    return layer_norm(_autocast(input), normalized_shape, weight, bias, eps)


def rms_norm_(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not takes(input, *(t for t in (weight,) if t is not None)):
        return NotImplemented
    return rms_norm(_autocast(input), normalized_shape, weight, eps)


def rsqrt_(input: Tensor) -> Any:
    if not takes(input):  # float64, integers and complex numbers
        return _other_rsqrt(input)
    return in_memory_order(rsqrt, _autocast(input))


_other_rsqrt = in_whole_vectors(torch.rsqrt)


def gelu_(input: Tensor, *, approximate: str = "none") -> Any:
    if not takes(input) or approximate not in ("none", "tanh"):
        return _other_gelu(input, approximate=approximate)
    return in_memory_order(partial(gelu, approximate=approximate), input)


_other_gelu = in_whole_vectors(F.gelu)


def silu_(input: Tensor, inplace: bool = False) -> Any:
    if inplace:
        return in_place(silu_)(input)
    if not takes(input):
        return _other_silu(input)
    return in_memory_order(partial(activation, name="silu"), input)


_other_silu = in_whole_vectors(F.silu)


def sigmoid_(input: Tensor) -> Any:
    if not takes(input):
        return _other_sigmoid(input)
    return in_memory_order(partial(activation, name="sigmoid"), input)


_other_sigmoid = in_whole_vectors(torch.sigmoid)


def sum_(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(sum, _autocast(input), dim, keepdim, dtype)


def sum_of_gradients(
    input: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """A gradient's sum over the dimensions in which its tensor was broadcast."""
    if not takes(input) or dtype is not None or input.ndim == 0:
        return NotImplemented
    chosen_backend(input.device.type, "sum")
    summed = {d % input.ndim for d in dim} if dim else set(range(input.ndim))
    total = sum_over_broadcast(input, [1 if d in summed else n for d, n in enumerate(input.shape)])
    return total if keepdim else total.reshape([n for d, n in enumerate(input.shape) if d not in summed])


def mean_(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(mean, input, dim, keepdim, dtype)


def nansum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(_sum_of_numbers, _autocast(input), dim, keepdim, dtype)


def nanmean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return _reduced(_mean_of_numbers, input, dim, keepdim, dtype)


def _reduced(op: Callable[..., Tensor], x: Tensor, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    x = x if dtype is None else x.to(dtype)
    if not takes(x) or not isinstance(keepdim, bool):
        return NotImplemented
    if dim is not None and not isinstance(dim, (tuple, list)):
        if not _is_number(dim):
            return NotImplemented
        dim = operator.index(dim)
    return op(x, dim, keepdim)


def _sum_of_numbers(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    return sum(x.masked_fill(x.isnan(), 0), dim, keepdim)


def _mean_of_numbers(x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    count = torch.sum(~x.isnan(), () if dim is None else dim, keepdim)
    total = _sum_of_numbers(x.to(torch.float32), dim, keepdim)
    return (total / count.to(torch.float32)).to(x.dtype)


def logsumexp_(input: Tensor, dim: Any, keepdim: bool = False) -> Any:
    if not takes(input):
        return NotImplemented
    as_pytorch(torch.logsumexp, input, dim, keepdim)
    return logsumexp(_autocast(input), dim, keepdim)


def var_(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _deviation(var, torch.var, input, *args, **kwargs)


def std_(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _deviation(std, torch.std, input, *args, **kwargs)


def var_mean(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _with_mean(var_, input, *args, **kwargs)


def std_mean(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _with_mean(std_, input, *args, **kwargs)


def _deviation(
    op: Callable[..., Tensor], theirs: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not takes(input):
        return NotImplemented
    as_pytorch(theirs, input, *args, **kwargs)
    dim, correction, keepdim = _deviation_options(*args, **kwargs)
    return op(input, dim, correction, keepdim)


def _deviation_options(
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Any, float, bool]:
    """Dimensions, correction and keepdim, from the arguments of any form of ``torch.var``."""
    if isinstance(dim, bool):  # var(input, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction, keepdim


def _with_mean(of: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    deviation = of(input, *args, **kwargs)
    if deviation is NotImplemented:
        return deviation
    dim, _, keepdim = _deviation_options(*args, **kwargs)
    return deviation, mean(input, dim, keepdim)


_MAXIMA = (math.inf, -math.inf)  # norms of these orders are the values' largest and smallest: exact


def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    return _norm(torch.norm, input, p, dim, keepdim, dtype)


def linalg_norm(
    A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    of_matrices = A.ndim != 1 if dim is None else isinstance(dim, Sequence) and len(dim) == 2
    if ord not in (None, "fro") and of_matrices:
        return NotImplemented  # a norm of matrices other than Frobenius
    return _norm(torch.linalg.norm, A, ord, dim, keepdim, dtype)


def linalg_vector_norm(
    input: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return _norm(torch.linalg.vector_norm, input, ord, dim, keepdim, dtype)


def _norm(
    theirs: Callable[..., Any], x: Tensor, order: Any, dim: Any, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    if order in _MAXIMA and not isinstance(order, bool):
        return theirs(x, order, dim=dim, keepdim=keepdim, dtype=dtype)
    if order not in (None, "fro", 2, 1, 0) or isinstance(order, bool):
        return NotImplemented
    if is_sharded(x):
        wide: Any = x if dtype is None else x.to(dtype)
        recorded = torch.is_grad_enabled() and x.requires_grad
        covered = order != 0 and dim is None and not keepdim and not recorded and takes(wide.to_local())
        return norm_of_shards(wide, 1 if order == 1 else 2) if covered else NotImplemented
    if not takes(x):
        return NotImplemented
    if order == 0 and records(x):
        return NotImplemented
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    plain = theirs is torch.norm or (theirs is torch.linalg.vector_norm and order in (1, 2))
    if not (plain and (dim is None or _is_number(dim)) and isinstance(keepdim, bool) and dtype is None):
        as_pytorch(theirs, x, order, dim=dim, keepdim=keepdim, dtype=dtype)  # it takes longer than the norm
    x = _autocast(x) if dtype is None else x.to(dtype)
    if not takes(x):
        return NotImplemented
    if order == 0:
        return torch.sum(x != 0, () if dim is None else dim, keepdim).to(x.dtype)
    return sum(x.abs(), dim, keepdim) if order == 1 else vector_norm(x, dim, keepdim)


def solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if not takes(A, B) or not A.dtype == B.dtype == torch.float32:
        return NotImplemented
    as_pytorch(torch.linalg.solve_triangular, A, B, upper=upper, left=left, unitriangular=unitriangular)
    return solve_by_substitution(A, B, upper=upper, left=left, unitriangular=unitriangular)


def foreach_norm(self: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """One norm for each tensor. Clipping of gradients uses it."""
    if ord in _MAXIMA:
        return torch._foreach_norm(self, ord, dtype=dtype)
    tensors = self if dtype is None else [x.to(dtype) for x in self]
    if any(map(is_sharded, tensors)):
        norms = [_norm(torch.linalg.vector_norm, x, ord, None, False, None) for x in tensors]
        return NotImplemented if any(n is NotImplemented for n in norms) else norms
    if ord not in (0, 1, 2) or not takes(*self, *tensors) or (ord == 0 and any(map(records, tensors))):
        return NotImplemented
    if ord == 0:
        return [(x != 0).sum().to(x.dtype) for x in tensors]
    return [sum(x.abs()) if ord == 1 else vector_norm(x) for x in tensors]


def functional_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or not takes(weight):
        return NotImplemented
    if not records(weight):  # rows are copied
        return F.embedding(input, weight, padding_idx)
    return embedding(input, weight, padding_idx)


def embedding_(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if scale_grad_by_freq or sparse or not takes(weight):
        return NotImplemented
    if not records(weight):  # rows are copied
        return copied_rows(weight, indices, padding_idx)
    return embedding(indices, weight, None if padding_idx == -1 else padding_idx)


def attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    floats = [t for t in (attn_mask,) if t is not None and t.dtype != torch.bool]
    if dropout_p != 0 or not takes(query, key, value, *floats):
        return NotImplemented
    return scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def expand_(input: Tensor, *size: Any, **rest: Any) -> Any:
    sizes = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    return _expanded(input, sizes, rest, lambda: input.expand(*size, **rest))


def expand_as(input: Tensor, other: Tensor) -> Any:
    return _expanded(input, other.shape, {}, lambda: input.expand_as(other))


def _expanded(x: Tensor, sizes: Sequence[int], rest: Any, otherwise: Callable[[], Tensor]) -> Any:
    if rest or not sizes or not records(x):
        return otherwise()
    return expand(x, sizes)


def sum_to_size(input: Tensor, *size: Any) -> Any:
    sizes = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(sizes)
    dims = [d for d in range(input.ndim) if d < lead or (sizes[d - lead] == 1 != input.shape[d])]
    if not takes(input):
        return NotImplemented
    if not dims or any(n != 1 and n != input.shape[lead + d] for d, n in enumerate(sizes)):
        return input.sum_to_size(sizes)
    return sum(input, dims, True).reshape(sizes)
