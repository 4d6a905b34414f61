"""``samebits.batch_invariant``: PyTorch's own operators run this library's, for as long as it lasts."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

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

__all__ = ["UncoveredError", "batch_invariant"]

OnUncovered = Literal["warn", "error", "ignore"]


class UncoveredError(RuntimeError):
    """An operator whose rows may depend on the batch was called where that was to be an error."""


class _State(threading.local):
    # Attributes of a thread-local object, because torch.compile reads and guards those.
    def __init__(self) -> None:
        self.on_uncovered: OnUncovered | None = None


_state = _State()
_warned: set[str] = set()


def batch_invariant(on_uncovered: OnUncovered = "warn") -> AbstractContextManager[None]:
    """A context, or a decorator, under which PyTorch's own operators give the bits of this library's.

    Products (``mm``, ``bmm``, ``matmul``, ``@``, ``addmm``, ``baddbmm``, ``mv``, ``dot``, ``einsum``,
    ``F.linear``), ``softmax``, ``log_softmax``, ``F.cross_entropy``, ``F.layer_norm``, ``F.rms_norm``,
    ``sum``, ``mean``, ``F.embedding``, ``F.scaled_dot_product_attention``, and broadcasting in sums and
    products, for the sake of its gradient; ``docs/mode.md`` has the list, and which arguments are covered. A
    call made here also has this library's gradient, wherever the backward runs.

    It acts on calls from Python in this thread, in functions and modules of any kind; nothing of PyTorch
    changes for other threads or afterwards. It may be nested; the innermost ``on_uncovered`` counts. Do not
    ``await`` or ``yield`` inside, nor decorate a function that does. Activation checkpointing runs the
    forward again in the backward, so enter it around that too. Under ``torch.compile`` what is traced here is
    covered.

    Args:
        on_uncovered: what to do when an operator is called whose rows are known to depend on the batch, and
            which is not covered: ``"warn"`` once for each operator, ``"error"`` (an :class:`UncoveredError`),
            or ``"ignore"``.

    Raises:
        ValueError: ``on_uncovered`` is none of these.
    """
    if on_uncovered not in ("warn", "error", "ignore"):
        raise ValueError(
            'samebits.batch_invariant: on_uncovered: expected "warn", "error" or "ignore",'
            f" got {on_uncovered!r}"
        )
    return _context(on_uncovered)


@contextmanager
def _context(on_uncovered: OnUncovered) -> Iterator[None]:
    before = _state.on_uncovered
    _state.on_uncovered = on_uncovered
    try:
        with _Mode(on_uncovered) if before is None else nullcontext():
            yield
    finally:
        _state.on_uncovered = before


class _Mode(TorchFunctionMode):
    def __init__(self, on_uncovered: OnUncovered) -> None:
        super().__init__()
        self.on_uncovered = on_uncovered  # in threads that autograd takes this mode to

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.compile cannot look these up
            for operator in _HIGHER_ORDER:
                if func is operator:
                    _report(func, self.on_uncovered)
            return func(*args, **kwargs)
        covered = _COVERED.get(func)
        for operator, implementation in _POWERS:
            covered = implementation if func is operator else covered
        if covered is not None:
            result = covered(*args, **{_ALIASES.get(key, key): value for key, value in kwargs.items()})
            if result is not NotImplemented:
                return result
        elif func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        if (covered is not None or func in _UNCOVERED or _is_direct(func)) and _inexact(
            (*args, *kwargs.values())
        ):
            _report(func, self.on_uncovered)
        return func(*args, **kwargs)


_NO_CHECKS = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def _body(function: FunctionType) -> FunctionType:
    """A Python function of PyTorch that lets the functions it calls be overridden, rather than itself."""
    body = FunctionType(
        function.__code__,
        function.__globals__ | _NO_CHECKS,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _report(func: Callable[..., Any], outermost: OnUncovered) -> None:
    what = _state.on_uncovered or outermost
    if what == "ignore":
        return
    name = _NAMES.get(func) or str(func)
    message = (
        f"samebits.batch_invariant: {name} is not covered with these arguments: its results may depend on the"
        " batch (docs/mode.md lists what is covered)"
    )
    if what == "error":
        raise UncoveredError(message)
    if name not in _warned and not torch.compiler.is_compiling():
        _warned.add(name)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _inexact(args: Sequence[Any]) -> bool:
    """Whether rounding is at work: sums of integers have the same bits in any order."""
    return any(t.is_floating_point() or t.is_complex() for t in _tensors(args))


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


# The functions below have the parameters of PyTorch's. They return NotImplemented for what is not covered.


def _mm(input: Tensor, mat2: Tensor, **rest: Any) -> Any:
    return NotImplemented if rest or not _takes(input, mat2) else matmul(input, mat2)


def _matmul(input: Tensor, other: Tensor, **rest: Any) -> Any:
    return _mm(input, other, **rest)


def _rmatmul(input: Tensor, other: Tensor) -> Any:
    return _mm(other, input)


def _bmm(input: Tensor, mat2: Tensor, **rest: Any) -> Any:
    return NotImplemented if rest or not _takes(input, mat2) else bmm(input, mat2)


def _mv(input: Tensor, vec: Tensor, **rest: Any) -> Any:
    return _mm(input, vec, **rest)


def _dot(input: Tensor, tensor: Tensor, **rest: Any) -> Any:
    return _mm(input, tensor, **rest)


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
    return NotImplemented if rest or not isinstance(dim, int) or not _takes(x) else op(x, dim)


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


def _unless_accumulating(func: Callable[..., Any]) -> Callable[..., Any]:
    def put(input: Tensor, indices: Any, values: Tensor, accumulate: bool = False, **rest: Any) -> Any:
        return NotImplemented if accumulate else func(input, indices, values, accumulate, **rest)

    return put


def _unless_reducing(func: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if kwargs.get("reduce") is not None else func(*args, **kwargs)

    return scatter


_binary_cross_entropy = torch.binary_cross_entropy_with_logits


def _cross_entropy_of_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    loss = _in_whole_vectors(_binary_cross_entropy)(input, target, weight, pos_weight, 0)
    if reduction == 0:
        return loss
    return NotImplemented if not _takes(loss) else mean(loss) if reduction == 1 else sum(loss)


def _broadcasting(func: Callable[..., Any], out_of_place: Callable[..., Any] | None) -> Callable[..., Any]:
    """`func` of two tensors, element by element, with the gradient of what is broadcast."""
    scaled = _in_whole_vectors(func, out_of_place)

    def pointwise(input: Any, other: Any, *args: Any, **rest: Any) -> Any:
        if args or rest.get("alpha", 1) != 1 or rest.get("rounding_mode"):
            return scaled(input, other, *args, **rest)
        both = isinstance(input, Tensor) and isinstance(other, Tensor)
        if both and not (input.is_nested or other.is_nested) and input.shape != other.shape:
            theirs, ours = _records(other), not out_of_place and _records(input)
            if theirs or ours:  # or the shape, which takes longer than a small kernel, is not asked for
                shape = torch.broadcast_shapes(input.shape, other.shape)
                if theirs and other.shape != shape:
                    other = expand(other, shape)
                if ours and input.shape != shape:
                    input = expand(input, shape)
        return func(input, other, **rest)

    return pointwise


_SHARE = 1 << 14  # elements that PyTorch's CPU loops do not divide among threads


def _in_whole_vectors(
    func: Callable[..., Any], out_of_place: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`func` of tensors, element by element, in lengths for which PyTorch's CPU loops treat all alike.

    What is left over after whole vectors, in each thread's share, they compute with other functions.
    For a `func` that writes into its first argument, `out_of_place` is what computes.
    """
    parameters = func.__code__.co_varnames if isinstance(func, FunctionType) else ()
    flag = parameters.index("inplace") if "inplace" in parameters else None

    def pointwise(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
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


_WHERE = (torch, torch.Tensor, F, torch.linalg, torch.fft, torch.special)
_LABELS = ("torch", "torch.Tensor", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")


def _named(name: str) -> dict[Callable[..., Any], str]:
    """All functions of PyTorch that are called so, with their full names."""
    found = zip(_WHERE, _LABELS, strict=True)
    return {getattr(w, name): f"{label}.{name}" for w, label in found if callable(getattr(w, name, None))}


def _pointwise(name: str) -> Iterator[tuple[Callable[..., Any], Callable[..., Any] | None]]:
    """All functions of PyTorch called `name` or `name_`; those in place with what computes the same."""
    for where in _WHERE:
        func = getattr(where, name, None)
        if func is not None:
            yield func, getattr(where, "__" + name[3:]) if name.startswith("__i") else None
            if hasattr(where, name + "_"):
                yield getattr(where, name + "_"), func


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
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
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}  # PyTorch's own
_BROADCASTING = """
    add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__
    __div__ __iadd__ __isub__ __imul__ __itruediv__
""".split()  # noqa: SIM905
_IN_WHOLE_VECTORS = """
    floor_divide __floordiv__ __rfloordiv__ __ifloordiv__
    exp exp2 expm1 log log2 log10 log1p rsqrt pow float_power rsub
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc polar
    arcsin arccos arctan arctan2 arcsinh arccosh arctanh
    erf erfc erfinv erfcx ndtr ndtri log_ndtr entr i0 i0e i1 i1e lgamma gammaln digamma psi polygamma
    igamma igammac gammainc gammaincc logit xlogy xlog1py logaddexp logaddexp2 ldexp hypot lerp addcmul
    addcdiv sigmoid expit silu gelu mish softplus logsigmoid elu selu celu softshrink tanhshrink
""".split()  # noqa: SIM905
_ACCUMULATING = ("index_put", "index_put_", "put", "put_")
_SCATTERING = ("scatter", "scatter_")

_KNOWN_VARIANT = """
    addbmm addbmm_ addmm_ addmv addmv_ addr baddbmm_ bilinear chain_matmul inner multi_dot tensordot trace
    vdot vecdot cdist pdist dist cosine_similarity pairwise_distance cosine_embedding_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss
    convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    interpolate grid_sample fold embedding_bag ctc_loss renorm renorm_ cov corrcoef histc histogram
    batch_norm instance_norm group_norm local_response_norm
    native_batch_norm native_group_norm native_layer_norm _softmax _log_softmax _weight_norm
    cumsum cumsum_ cumprod cumprod_ logcumsumexp logsumexp norm vector_norm matrix_norm prod nansum nanmean
    std var std_mean var_mean trapezoid trapz cumulative_trapezoid segment_reduce bincount
    scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_reduce index_reduce_
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _native_multi_head_attention _transformer_encoder_layer_fwd
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward
    fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft hfft2 ihfft2 hfftn ihfftn
    stft istft
    cholesky cholesky_ex cholesky_solve cholesky_inverse qr svd svdvals eigh eigvalsh eig eigvals
    solve solve_ex solve_triangular triangular_solve lstsq inv inv_ex inverse pinv det logdet slogdet
    tensorinv tensorsolve matrix_exp matrix_power matrix_rank householder_product geqrf ormqr
    lu lu_factor lu_factor_ex lu_solve ldl_factor ldl_solve
    grouped_mm scaled_mm scaled_grouped_mm _grouped_mm _scaled_mm _scaled_grouped_mm
""".split()  # noqa: SIM905
_OTHER_VARIANT: dict[Callable[..., Any], str] = {
    torch.sparse.mm: "torch.sparse.mm",
    torch.sparse.addmm: "torch.sparse.addmm",
    torch._sparse_sum: "torch.sparse.sum",
    torch.sparse.softmax: "torch.sparse.softmax",
    torch.sparse.log_softmax: "torch.sparse.log_softmax",
    torch.linalg.cond: "torch.linalg.cond",
}

_HIGHER_ORDER = [
    getattr(torch.ops.higher_order, name)
    for name in ("flex_attention", "cond", "while_loop", "map_impl", "scan", "associative_scan")
    if hasattr(torch.ops.higher_order, name)
]

_COVERED: dict[Callable[..., Any], Callable[..., Any]] = {
    func: implementation for name, implementation in _IMPLEMENTATIONS.items() for func in _named(name)
}
_COVERED |= {F.softmax: _f_softmax, F.log_softmax: _f_log_softmax}
_COVERED |= {F.embedding: _f_embedding, torch.embedding: _embedding}
_COVERED |= {torch.binary_cross_entropy_with_logits: _cross_entropy_of_logits}
_COVERED |= {func: _unless_accumulating(func) for name in _ACCUMULATING for func in _named(name)}
_COVERED |= {func: _unless_reducing(func) for name in _SCATTERING for func in _named(name)}
_COVERED |= {
    func: cover(func, out_of_place)
    for cover, names in ((_broadcasting, _BROADCASTING), (_in_whole_vectors, _IN_WHOLE_VECTORS))
    for name in names
    for func, out_of_place in _pointwise(name)
}
_POWERS = [  # torch.compile does not find these in a dictionary
    (Tensor.__pow__, _in_whole_vectors(Tensor.pow)),
    (Tensor.__rpow__, _in_whole_vectors(Tensor.__rpow__)),
    (Tensor.__ipow__, _in_whole_vectors(Tensor.pow_, Tensor.pow)),
]
_UNCOVERED = {func for name in _KNOWN_VARIANT for func in _named(name)} | set(_OTHER_VARIANT)
_NAMES = {
    func: label
    for name in (*_IMPLEMENTATIONS, *_KNOWN_VARIANT, *_ACCUMULATING, *_SCATTERING)
    for func, label in _named(name).items()
}
_NAMES |= {torch.embedding: "torch.embedding", F.embedding: "torch.nn.functional.embedding"}
_NAMES |= _OTHER_VARIANT

# Python functions of PyTorch that are followed into. Those that a closure dispatches for check by themselves.
_BODIES = {
    function: _body(function)
    for module in (F, torch.functional)
    for function in vars(module).values()
    if isinstance(function, FunctionType)
    and function.__module__ == module.__name__
    and not function.__closure__
    and function not in _UNCOVERED
    and function is not torch.functional.meshgrid  # it calls a function that dispatches it again
}
# Of a backward, so that what is computed again there is covered: activation checkpointing.
_BACKWARD: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_BODIES |= {func: _body(func) for func in _BACKWARD}

_DIRECT = {*_IMPLEMENTATIONS, *_KNOWN_VARIANT, "embedding", "_fused_rms_norm"} - {"expand", "expand_as"}
_DIRECT_KINDS = ("linalg_", "_linalg_", "fft_", "_fft_", "upsample_", "grid_sampler_", "_scaled_dot_product_")


def _is_direct(func: Any) -> bool:
    """Whether this is a call of ``torch.ops.aten`` that reduces."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    return namespace == "aten" and (name in _DIRECT or name.startswith(_DIRECT_KINDS))
