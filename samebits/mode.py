"""``samebits.batch_invariant``: PyTorch's own operators run this library's, for as long as it lasts."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samebits.covered import (
    FUNCTIONS,
    IMPLEMENTATIONS,
    broadcasting,
    complex_in_whole_vectors,
    in_whole_vectors,
    tensors_of,
    unless,
)
from samebits.ops._library import own

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
    covered. "Limits" in ``README.md`` says what may change bits all the same.

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
        with nullcontext() if _is_on(before) else _Mode(on_uncovered):
            yield
    finally:
        _state.on_uncovered = before


def _is_on(before: OnUncovered | None) -> bool:
    """Whether an outer context's mode sees calls. It does not see what an operator that it called does."""
    if before is None or torch.compiler.is_compiling():
        return before is not None
    return any(isinstance(mode, _Mode) for mode in _get_current_function_mode_stack())


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
            named = {_ALIASES.get(k, k): x for k, x in kwargs.items() if k != "out" or x is not None}
            result = _watched(func, covered, args, named)
            if result is not NotImplemented:
                return result if func in _VIEWS else _owned(result, args, named)
        elif func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        if (covered is not None or func in _UNCOVERED or _is_direct(func)) and _inexact(
            (*args, *kwargs.values())
        ):
            _report(func, self.on_uncovered)
        return func(*args, **kwargs)


def _watched(func: Callable[..., Any], covered: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
    """Run `covered`; an audit at work sees it as one call of `func`."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "run_covered"):
                return mode.run_covered(func, covered, args, named)
    return covered(*args, **named)


def _owned(result: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """No view, as PyTorch's are none: so what was made without gradients may be changed with some."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return result
    return result if any(result is x for x in (*args, *named.values())) else own(result)


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


def _inexact(args: Sequence[Any]) -> bool:
    """Whether rounding is at work: sums of integers have the same bits in any order."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors_of(args))


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
_COMPLEX_IN_WHOLE_VECTORS = ("abs", "absolute", "__abs__", "square", "reciprocal", "angle", "sgn", "softsign")
# Covered unless they are asked to accumulate, by an argument at that place, if it has one.
_ACCUMULATING = {
    **dict.fromkeys(("index_put", "index_put_", "put", "put_"), ("accumulate", 3)),
    **dict.fromkeys(("scatter", "scatter_"), ("reduce", 4)),
}

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
    func: implementation for name, implementation in IMPLEMENTATIONS.items() for func in _named(name)
}
_COVERED |= FUNCTIONS
_VIEWS = {func for name in ("expand", "expand_as") for func in _named(name)}
_COVERED |= {func: unless(func, *asks) for name, asks in _ACCUMULATING.items() for func in _named(name)}
_COVERED |= {
    func: cover(func, out_of_place)
    for cover, names in (
        (broadcasting, _BROADCASTING),
        (in_whole_vectors, _IN_WHOLE_VECTORS),
        (complex_in_whole_vectors, _COMPLEX_IN_WHOLE_VECTORS),
    )
    for name in names
    for func, out_of_place in _pointwise(name)
}
_POWERS = [  # torch.compile does not find these in a dictionary
    (Tensor.__pow__, in_whole_vectors(Tensor.pow)),
    (Tensor.__rpow__, in_whole_vectors(Tensor.__rpow__)),
    (Tensor.__ipow__, in_whole_vectors(Tensor.pow_, Tensor.pow)),
]
_UNCOVERED = {func for name in _KNOWN_VARIANT for func in _named(name)} | set(_OTHER_VARIANT)
_NAMES = {
    func: label
    for name in (*IMPLEMENTATIONS, *_KNOWN_VARIANT, *_ACCUMULATING)
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

_DIRECT = {*IMPLEMENTATIONS, *_KNOWN_VARIANT, "embedding", "_fused_rms_norm"} - {"expand", "expand_as"}
_DIRECT_KINDS = ("linalg_", "_linalg_", "fft_", "_fft_", "upsample_", "grid_sampler_", "_scaled_dot_product_")


def _is_direct(func: Any) -> bool:
    """Whether this is a call of ``torch.ops.aten`` that reduces."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    return namespace == "aten" and (name in _DIRECT or name.startswith(_DIRECT_KINDS))
