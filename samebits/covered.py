"""What PyTorch's functions do under ``samebits.batch_invariant``, in terms of this library's.

The functions here have the parameters of PyTorch's. They return NotImplemented for what is not covered.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from samebits.ops._library import SUPPORTED
from samebits.ops.attention import attention
from samebits.ops.bmm import bmm
from samebits.ops.einsum import einsum
from samebits.ops.embedding import embedding
from samebits.ops.expand import expand
from samebits.ops.linear import linear
from samebits.ops.matmul import matmul
from samebits.ops.norm import layer_norm, rms_norm
from samebits.ops.reduce import mean, sum
from samebits.ops.softmax import log_softmax, softmax

__all__ = [
    "FUNCTIONS",
    "IMPLEMENTATIONS",
    "broadcasting",
    "complex_in_whole_vectors",
    "in_whole_vectors",
    "tensors_of",
    "unless",
]


def tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from tensors_of(x)


def _takes(*tensors: Any) -> bool:
    return all(
        isinstance(t, Tensor)
        and (type(t) in (Tensor, Parameter) or _plain(type(t)))
        and t.dtype in SUPPORTED
        and t.layout == torch.strided
        and t.device.type in ("cpu", "cuda", "meta")
        and not t.is_nested
        for t in tensors
    )


@functools.cache
def _plain(kind: type[Tensor]) -> bool:
    """Whether a subclass leaves functions and operators as they are, or is one of the compiler's."""

    def own(of: type[Tensor], name: str) -> Any:
        return getattr(getattr(of, name), "__func__", getattr(of, name))

    functions = own(Tensor, "__torch_function__"), torch._C._disabled_torch_function_impl
    dispatches = own(kind, "__torch_dispatch__") is not own(Tensor, "__torch_dispatch__")
    ours = not dispatches or kind.__module__.startswith("torch._subclasses.")
    return own(kind, "__torch_function__") in functions and ours


def _mm(input: Tensor, mat2: Tensor, *rest: Any, **named: Any) -> Any:
    return _of_ranks(2, 2, torch.mm, input, mat2, *rest, **named)


def _mv(input: Tensor, vec: Tensor, **rest: Any) -> Any:
    return _of_ranks(2, 1, torch.mv, input, vec, **rest)


def _dot(input: Tensor, tensor: Tensor, **rest: Any) -> Any:
    return _of_ranks(1, 1, torch.dot, input, tensor, **rest)


def _of_ranks(
    rows: int, columns: int, theirs: Callable[..., Any], a: Tensor, b: Tensor, *rest: Any, **named: Any
) -> Any:
    if rest or named or not _takes(a, b):
        return NotImplemented
    if (a.ndim, b.ndim) != (rows, columns):
        return theirs(a, b)  # an error of PyTorch's
    return matmul(a, b)


def _matmul(input: Tensor, other: Tensor, **rest: Any) -> Any:
    return NotImplemented if rest or not _takes(input, other) else matmul(input, other)


def _rmatmul(input: Tensor, other: Tensor) -> Any:
    return _matmul(other, input)


def _bmm(input: Tensor, mat2: Tensor, *rest: Any, **named: Any) -> Any:
    if rest or named or not _takes(input, mat2):
        return NotImplemented
    if input.ndim != 3 or mat2.ndim != 3 or input.shape[0] != mat2.shape[0]:
        return torch.bmm(input, mat2)  # an error of PyTorch's
    return bmm(input, mat2)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **rest: Any
) -> Any:
    if rest or not _takes(input, mat1, mat2):
        return NotImplemented
    if input.ndim == 1 and beta == alpha == 1 and mat1.ndim == mat2.ndim == 2:
        return linear(mat1, mat2.mT, input)
    return _scaled_sum(input, matmul(mat1, mat2, out_dtype=torch.float32), beta, alpha, _dtype(mat1))


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, **rest: Any
) -> Any:
    if rest or not _takes(input, batch1, batch2):
        return NotImplemented
    return _scaled_sum(input, bmm(batch1, batch2, out_dtype=torch.float32), beta, alpha, _dtype(batch1))


def _dtype(x: Tensor) -> torch.dtype:
    """Of a product of `x`, which autocast decides."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _scaled_sum(input: Tensor, product: Tensor, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """``beta * input + alpha * product``, in float32 up to the end. `input` is not read if beta is 0."""
    out = product if alpha == 1 else product * alpha
    if beta != 0:
        wide = expand(input, out.shape).to(torch.float32)
        out = (wide if beta == 1 else wide * beta) + out
    return out.to(dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    operands = (input, weight) if bias is None else (input, weight, bias)
    if not _takes(*operands) or weight.ndim != 2:
        return NotImplemented
    if bias is not None and bias.ndim > 1:  # PyTorch adds it as it broadcasts
        return _scaled_sum(bias, matmul(input, weight.mT, out_dtype=torch.float32), 1, 1, _dtype(input))
    return linear(input, weight, bias)


def _einsum(equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    return (
        NotImplemented
        if not isinstance(equation, str) or not _takes(*operands)
        else einsum(equation, *operands)
    )


def _softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    return _along(softmax, input, dim, dtype, rest)


def _log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    return _along(log_softmax, input, dim, dtype, rest)


def _f_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return _along(softmax, input, dim, dtype, {})


def _f_log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return _along(log_softmax, input, dim, dtype, {})


def _along(
    op: Callable[..., Tensor], x: Tensor, dim: int | None, dtype: torch.dtype | None, rest: dict[str, Any]
) -> Any:
    x = _autocast(x) if dtype is None else x.to(dtype)
    if rest or not isinstance(dim, SupportsIndex) or not _takes(x):
        return NotImplemented
    return op(x, operator.index(dim)).contiguous()  # as PyTorch's is


def _autocast(x: Tensor) -> Tensor:
    """Autocast computes these in float32 on a GPU, and as they come on a CPU."""
    return x.to(torch.float32) if x.is_cuda and torch.is_autocast_enabled("cuda") else x


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if (
        not plain
        or not _takes(input)
        or target.is_floating_point()
        or reduction not in ("none", "mean", "sum")
    ):
        return NotImplemented
    loss = F.nll_loss(
        log_softmax(_autocast(input), 1 if input.ndim > 1 else 0).contiguous(),  # its backward wants that
        *(target, None, None, ignore_index, None, "none"),
    )
    if reduction == "none":
        return loss
    total = sum(loss)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if not _takes(input, *(t for t in (weight, bias) if t is not None)):
        return NotImplemented
    return layer_norm(_autocast(input), normalized_shape, weight, bias, eps)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not _takes(input, *(t for t in (weight,) if t is not None)):
        return NotImplemented
    return rms_norm(_autocast(input), normalized_shape, weight, eps)


def _sum(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **rest: Any
) -> Any:
    return _over(sum, _autocast(input), dim, keepdim, dtype, rest)


def _mean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **rest: Any
) -> Any:
    return _over(mean, input, dim, keepdim, dtype, rest)


def _over(
    op: Callable[..., Tensor],
    x: Tensor,
    dim: Any,
    keepdim: bool,
    dtype: torch.dtype | None,
    rest: dict[str, Any],
) -> Any:
    x = x if dtype is None else x.to(dtype)
    if rest or not _takes(x) or not isinstance(keepdim, bool):
        return NotImplemented
    if dim is not None and not isinstance(dim, (tuple, list)):
        if not isinstance(dim, SupportsIndex):
            return NotImplemented
        dim = operator.index(dim)
    return op(x, dim, keepdim)


def _f_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or not _takes(weight):
        return NotImplemented
    return embedding(input, weight, padding_idx)


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if scale_grad_by_freq or sparse or not _takes(weight):
        return NotImplemented
    return embedding(indices, weight, None if padding_idx == -1 else padding_idx)


def _attention(
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
    if dropout_p != 0 or not _takes(query, key, value, *floats) or any(t.requires_grad for t in floats):
        return NotImplemented
    return attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def _expand(input: Tensor, *size: Any, **rest: Any) -> Any:
    sizes = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    return _expanded(input, sizes, rest, lambda: input.expand(*size, **rest))


def _expand_as(input: Tensor, other: Tensor) -> Any:
    return _expanded(input, other.shape, {}, lambda: input.expand_as(other))


def _expanded(x: Tensor, sizes: Sequence[int], rest: Any, otherwise: Callable[[], Tensor]) -> Any:
    if rest or not sizes or not _records(x):
        return otherwise()
    return expand(x, sizes)


def _records(x: Any) -> bool:
    """Whether a gradient of `x` is recorded that this library can compute."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad and _takes(x)


def _sum_to_size(input: Tensor, *size: Any) -> Any:
    sizes = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(sizes)
    dims = [d for d in range(input.ndim) if d < lead or (sizes[d - lead] == 1 != input.shape[d])]
    if not _takes(input):
        return NotImplemented
    if not dims or any(n not in (1, input.shape[lead + d]) for d, n in enumerate(sizes)):
        return input.sum_to_size(sizes)
    return sum(input, dims, True).reshape(sizes)


def unless(func: Callable[..., Any], argument: str, place: int) -> Callable[..., Any]:
    """`func`, which is covered where it is not asked for what `argument`, at that place, asks for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get(argument)
        return NotImplemented if asked else func(*args, **kwargs)

    return call


_binary_cross_entropy = torch.binary_cross_entropy_with_logits


def _cross_entropy_of_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    loss = in_whole_vectors(_binary_cross_entropy)(input, target, weight, pos_weight, 0)
    if reduction == 0:
        return loss
    return NotImplemented if not _takes(loss) else mean(loss) if reduction == 1 else sum(loss)


def broadcasting(func: Callable[..., Any], out_of_place: Callable[..., Any] | None) -> Callable[..., Any]:
    """`func` of two tensors, element by element, with the gradient of what is broadcast."""
    scaled = in_whole_vectors(func, out_of_place)

    def pointwise(input: Any, other: Any, *args: Any, **rest: Any) -> Any:
        both = isinstance(input, Tensor) and isinstance(other, Tensor)
        if both and not (input.is_nested or other.is_nested) and input.shape != other.shape:
            theirs, ours = _records(other), not out_of_place and _records(input)
            if theirs or ours:  # or the shape, which takes longer than a small kernel, is not asked for
                shape = torch.broadcast_shapes(input.shape, other.shape)
                if theirs and other.shape != shape:
                    other = expand(other, shape)
                if ours and input.shape != shape:
                    input = expand(input, shape)
        if args or rest.get("alpha", 1) != 1 or rest.get("rounding_mode") or _complex(input, other):
            return scaled(input, other, *args, **rest)
        return func(input, other, **rest)

    return pointwise


def _complex(*operands: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_complex() for x in operands)


def complex_in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`func`, of complex numbers :func:`in_whole_vectors`; of real ones each has its bits anyway."""
    scaled = in_whole_vectors(func, out_of_place)

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        return (scaled if _complex(*args, *kwargs.values()) else func)(*args, **kwargs)

    return pointwise


_SHARE = 1 << 14  # elements that PyTorch's CPU loops do not divide among threads


def in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`func` of tensors, element by element, in lengths for which PyTorch's CPU loops treat all alike.

    What is left over after whole vectors, in each thread's share, they compute with other functions.
    For a `func` that writes into its first argument, `out_of_place` is what computes.
    """
    parameters = func.__code__.co_varnames if isinstance(func, FunctionType) else ()
    flag = parameters.index("inplace") if "inplace" in parameters else None

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_of((*args, *kwargs.values())))
        if not all(t.is_cpu and t.layout == torch.strided and not t.is_nested for t in tensors):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            return NotImplemented
        compute, in_place, plain, options = out_of_place or func, out_of_place is not None, args, dict(kwargs)
        if flag is not None:
            in_place = options.pop("inplace", False) or any(args[flag:])
            plain = args[:flag]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        count = shape.numel()

        def parts(x: Any) -> Any:
            if not isinstance(x, Tensor) or (x.ndim == 0 and shape):  # PyTorch promotes no types for these
                return None
            wide = x if x.shape == shape else expand(x, shape) if _records(x) else x.expand(shape)
            padding = 0.5 if x.is_floating_point() else 1
            return F.pad(wide.reshape(-1), (0, -count % 64), value=padding).split(_SHARE)

        positional = [(x, parts(x)) for x in plain]
        named = {key: (x, parts(x)) for key, x in options.items()}
        out = torch.cat(
            [
                compute(
                    *(x if p is None else p[i] for x, p in positional),
                    **{key: x if p is None else p[i] for key, (x, p) in named.items()},
                )
                for i in range(max(1, -(-count // _SHARE)))
            ]
        )
        out = out[:count].view(shape)
        if not in_place:
            like = next((t for t in tensors if t.shape == shape), out)
            # As PyTorch's, the result lies in memory as its operand does.
            return out if like.is_contiguous() else torch.empty_like(like, dtype=out.dtype).copy_(out)
        into = tensors[0]
        kinds = [(t.is_floating_point(), t.is_complex()) for t in (into, out)]
        if shape != into.shape or kinds[0] != kinds[1]:
            return func(*args, **kwargs)  # most often an error of PyTorch's
        return into.copy_(out)

    return pointwise


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "matmul": _matmul,
    "__matmul__": _matmul,
    "__rmatmul__": _rmatmul,
    "bmm": _bmm,
    "mv": _mv,
    "dot": _dot,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "linear": _linear,
    "einsum": _einsum,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cross_entropy": _cross_entropy,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "sum": _sum,
    "mean": _mean,
    "scaled_dot_product_attention": _attention,
    "expand": _expand,
    "expand_as": _expand_as,
    "sum_to_size": _sum_to_size,
}
"""By name, of all functions of PyTorch that are called so."""

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.softmax: _f_softmax,
    F.log_softmax: _f_log_softmax,
    F.embedding: _f_embedding,
    torch.embedding: _embedding,
    _binary_cross_entropy: _cross_entropy_of_logits,
}
"""Those that have parameters of their own."""
