"""The rules of ``samebits.batch_invariant``: which functions of PyTorch are replaced, and by what.

* :mod:`samebits.mode.products` and :mod:`samebits.mode.overrides` have replacements.
* :mod:`samebits.mode.pointwise` computes elementwise functions in whole vectors, or broadcasts with a
  gradient.
* Python functions that call other functions are followed into (:data:`BODIES`).
* Functions whose rows depend on the batch, and which have no replacement, are reported (:data:`REPORTED`).

All other functions are left to PyTorch. The tables of ``docs/mode.md`` are written from :data:`REPLACED` and
the lists below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.mode import indexing, overrides, products, windows
from samebits.mode.pointwise import (
    broadcasting,
    complex_in_whole_vectors,
    cross_entropy_of_logits,
)
from samebits.mode.vectors import in_whole_vectors

__all__ = [
    "ACCUMULATING",
    "ALIASES",
    "BODIES",
    "COMPLEX_WHOLE_VECTORS",
    "ELEMENTWISE",
    "HIGHER_ORDER",
    "NAMES",
    "NAMES_OF_SUMS",
    "POWERS",
    "REPLACED",
    "REPLACEMENTS",
    "REPORTED",
    "REPORTED_NAMES",
    "SUMS",
    "TAKE_OUT",
    "UNCOVERED",
    "UNTRACED",
    "VIEWS",
    "WHOLE_VECTORS",
    "full_name",
    "is_direct",
    "unless",
]


class Row(NamedTuple):
    """Functions of PyTorch and their replacements: a row of the table in ``docs/mode.md``.

    Attributes:
        functions: the replacement of each function. A name stands for all functions of PyTorch with that
            name.
        result: what the replacements compute.
        uncovered: the arguments for which the functions are reported instead.
    """

    functions: Mapping[str | Callable[..., Any], Callable[..., Any]]
    result: str
    uncovered: str = ""


REPLACED = (
    Row(
        {
            "mm": products.mm,
            "bmm": products.bmm_,
            "matmul": products.matmul_,
            "__matmul__": products.matmul_,
            "__rmatmul__": products.rmatmul,
            "mv": products.mv,
            "dot": products.dot,
            "linear": products.linear_,
        },
        "`samebits.matmul`, `bmm`, `linear`",
    ),
    Row(
        {
            "addmm": products.addmm,
            "addmm_": products.in_place(products.addmm),
            "baddbmm": products.baddbmm,
            "baddbmm_": products.in_place(products.baddbmm),
        },
        "a bias that is a vector: as in `linear`. Otherwise beta · input + alpha · product in float32,"
        " rounded once",
    ),
    Row(
        {"_grouped_mm": products.grouped_mm_},
        "`samebits.grouped_mm`, for `F.grouped_mm`, too; rows of no group are +0",
    ),
    Row(
        {"_scaled_mm_v2": products.scaled_mm_},
        "`samebits.scaled_mm`, for `F.scaled_mm`: [FP8](contract.md#fp8)",
        "scales in blocks of 16 or 32, swizzled ones and pairs of them; scales that span rows of the first"
        " operand are refused",
    ),
    Row(
        {"_scaled_grouped_mm_v2": products.scaled_grouped_mm_},
        "`samebits.scaled_grouped_mm`, for `F.scaled_grouped_mm`, of groups of rows; rows of no group are +0",
        "groups of terms, and what `_scaled_mm_v2` does not cover",
    ),
    Row({"einsum": products.einsum_}, "products of pairs, always from left to right"),
    Row(
        {
            "softmax": overrides.softmax_,
            "log_softmax": overrides.log_softmax_,
            F.softmax: overrides.functional_softmax,
            F.log_softmax: overrides.functional_log_softmax,
            "logsumexp": overrides.logsumexp_,
        },
        "[row reductions](contract.md#row-reductions)",
    ),
    Row(
        {"cross_entropy": overrides.cross_entropy},
        "log-softmax, then the losses summed as a row; of a float32 matrix by `samebits.logp`, whose"
        " gradients are those of [log-probabilities](contract.md#log-probabilities)",
        "class weights, label smoothing, probabilities as targets",
    ),
    Row(
        {torch.binary_cross_entropy_with_logits: cross_entropy_of_logits},
        "elementwise, then the losses summed as a row",
    ),
    Row(
        {"layer_norm": overrides.layer_norm_, "rms_norm": overrides.rms_norm_},
        "row reductions; gradients of weights over tokens",
    ),
    Row(
        {
            "sum": overrides.sum_,
            "mean": overrides.mean_,
            "nansum": overrides.nansum,
            "nanmean": overrides.nanmean,
            "sum_to_size": overrides.sum_to_size,
        },
        "row reductions",
    ),
    Row(
        {
            "var": overrides.var_,
            "std": overrides.std_,
            "var_mean": overrides.var_mean,
            "std_mean": overrides.std_mean,
            "norm": overrides.norm,
            torch.linalg.norm: overrides.linalg_norm,
            torch.linalg.vector_norm: overrides.linalg_vector_norm,
            torch._foreach_norm: overrides.foreach_norm,
        },
        "row reductions",
        "norms of other orders than 0 (without gradients), 1, 2 and ±∞, and of matrices",
    ),
    Row(
        {F.embedding: overrides.functional_embedding, torch.embedding: overrides.embedding_},
        "the same rows; a gradient in token order",
        "`max_norm`, `scale_grad_by_freq`, `sparse`",
    ),
    Row(
        {"scaled_dot_product_attention": overrides.attention_},
        "[attention](contract.md#attention) with causal, boolean and float masks, and `enable_gqa`",
        "dropout; a mask with `is_causal` is refused, as by PyTorch on a GPU",
    ),
    Row(
        {"expand": overrides.expand_, "expand_as": overrides.expand_as},
        "themselves; what was broadcast gets a gradient in token order, in all functions that broadcast",
        "in a context that a compiled function enters by itself: other functions than these and +, −, ·, /",
    ),
    Row(
        {"conv1d": windows.conv1d, "conv2d": windows.conv2d, "conv3d": windows.conv3d},
        "[convolutions](contract.md#convolutions): products of what a window sees; sums over positions that"
        " begin anew at each row of the batch",
        "transposed ones",
    ),
    Row(
        {
            **{f"avg_pool{d}d": getattr(windows, f"avg_pool{d}d") for d in (1, 2, 3)},
            **{f"adaptive_avg_pool{d}d": getattr(windows, f"adaptive_avg_pool{d}d") for d in (1, 2, 3)},
        },
        "[means](contract.md#convolutions) over windows, and rows of what a part of a picture has",
    ),
    Row(
        {
            torch._C._nn.upsample_linear1d: windows.upsample("upsample_linear1d", 1),
            torch._C._nn.upsample_bilinear2d: windows.upsample("upsample_bilinear2d", 2),
            torch._C._nn.upsample_trilinear3d: windows.upsample("upsample_trilinear3d", 3),
            torch._C._nn.upsample_bicubic2d: windows.upsample("upsample_bicubic2d", 2, "cubic"),
            **{
                getattr(torch._C._nn, name): windows.upsample_nearest(name, d)
                for d in (1, 2, 3)
                for name in (f"upsample_nearest{d}d", f"_upsample_nearest_exact{d}d")
            },
        },
        "`F.interpolate`: [sums](contract.md#convolutions) of the few entries that have weights, one"
        " dimension after the other",
        "`antialias`",
    ),
    Row({"fold": windows.fold}, "itself, where windows do not meet", "windows that meet"),
    Row(
        {
            torch.group_norm: windows.group_norm,
            torch.instance_norm: windows.instance_norm,
            torch.batch_norm: windows.batch_norm,
        },
        "row reductions; `batch_norm` with the statistics that it keeps, elementwise",
        "statistics of the batch (`batch_norm` in training), and those that `instance_norm` keeps",
    ),
    Row(
        {"rsqrt": overrides.rsqrt_, "rsqrt_": products.in_place(overrides.rsqrt_)},
        "1 / sqrt(x), two roundings in float32; PyTorch's on a CPU, where a GPU has an approximation",
    ),
    Row(
        {
            "gelu": overrides.gelu_,
            "gelu_": products.in_place(overrides.gelu_),
            "silu": overrides.silu_,
            "silu_": products.in_place(overrides.silu_),
            **dict.fromkeys(("sigmoid", "expit"), overrides.sigmoid_),
            "sigmoid_": products.in_place(overrides.sigmoid_),
        },
        "[one for all devices](contract.md#fused-layers), with gradients; PyTorch's depend on the device",
    ),
    Row(
        {torch.linalg.solve_triangular: overrides.solve_triangular},
        "substitution, [row by row](contract.md#triangular-systems), of float32",
    ),
    Row(
        {"sort": indexing.sort, "argsort": indexing.argsort, "msort": indexing.msort, "topk": indexing.topk},
        "stable: equal values in the order of their places, also in `topk`",
        "`out=`",
    ),
    Row(
        {
            Tensor.__getitem__: indexing.getitem,
            "index_select": indexing.index_select,
            "gather": indexing.gather,
            "repeat_interleave": indexing.repeat_interleave,
            Tensor.repeat: indexing.repeat,
        },
        "themselves, and `x[i]`; a gradient in the order of the index",
        "tensors of integers apart from each other (`x[i, :, j]`): their gradients are summed by PyTorch",
    ),
    Row(
        {
            "index_add": indexing.index_add,
            "index_add_": products.in_place(indexing.index_add),
            "scatter_add": indexing.scatter_add,
            "scatter_add_": products.in_place(indexing.scatter_add),
            "scatter_reduce": indexing.scatter_reduce,
            "scatter_reduce_": products.in_place(indexing.scatter_reduce),
            "index_put": indexing.index_put,
            "index_put_": indexing.index_put_,
        },
        "float32 chains from what was there, in the order of the index, rounded once",
        "`index_put` that accumulates at masks, or at tensors of integers apart from each other; products in"
        " `scatter_reduce`",
    ),
    Row(
        {
            "cumsum": indexing.cumsum,
            "cumsum_": products.in_place(indexing.cumsum),
            "cumprod": indexing.cumprod,
            "cumprod_": products.in_place(indexing.cumprod),
        },
        "[row reductions](contract.md#row-reductions), by doubling",
        "gradients of `cumprod`",
    ),
)

_BROADCASTING = """
    add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__
    __div__ __iadd__ __isub__ __imul__ __itruediv__
""".split()  # noqa: SIM905
WHOLE_VECTORS = """
    floor_divide __floordiv__ __rfloordiv__ __ifloordiv__
    exp exp2 expm1 log log2 log10 log1p pow float_power rsub
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc polar
    arcsin arccos arctan arctan2 arcsinh arccosh arctanh
    erf erfc erfinv erfcx ndtr ndtri log_ndtr entr i0 i0e i1 i1e lgamma gammaln digamma psi polygamma
    igamma igammac gammainc gammaincc logit xlogy xlog1py logaddexp logaddexp2 ldexp hypot lerp addcmul
    addcdiv mish softplus logsigmoid elu selu celu softshrink tanhshrink
""".split()  # noqa: SIM905
COMPLEX_WHOLE_VECTORS = (
    *("abs", "absolute", "__abs__", "square", "reciprocal", "angle", "sgn", "softsign"),
    *("neg", "negative", "__neg__"),
)
# Gradients that depend on where PyTorch's vectors end, of losses and of functions.
LOSS_GRADIENTS_IN_WHOLE_VECTORS = ("smooth_l1_loss_backward", "huber_loss_backward")
GRADIENTS_IN_WHOLE_VECTORS = ("silu_backward", "mish_backward", "softplus_backward")
# Fused steps of optimizers, which are elementwise.
STEPS_IN_WHOLE_VECTORS = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
# Functions that are covered unless they accumulate: the argument that asks for it, and its position.
ACCUMULATING = {
    **dict.fromkeys(("put", "put_"), ("accumulate", 3)),
    **dict.fromkeys(("scatter", "scatter_"), ("reduce", 4)),
    **dict.fromkeys(("histogramdd", "_histogramdd_from_bin_cts"), ("weight", 3)),
}

REPORTED = {
    "products": """
        addbmm addbmm_ addmv addmv_ addr bilinear chain_matmul inner multi_dot tensordot trace vdot vecdot
        _scaled_mm _scaled_grouped_mm
    """,
    "distances and losses": """
        cdist pdist dist cosine_similarity pairwise_distance cosine_embedding_loss triplet_margin_loss
        multi_margin_loss multilabel_margin_loss ctc_loss
    """,
    "convolutions, pooling, interpolation": """
        convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
        conv_tbc grid_sample
    """,
    "norms": """
        renorm renorm_ matrix_norm native_batch_norm
        native_group_norm native_layer_norm _weight_norm
    """,
    "sums of other kinds": """
        logcumsumexp prod cov corrcoef histogram bincount embedding_bag trapezoid trapz cumulative_trapezoid
        segment_reduce index_reduce index_reduce_
    """,
    "recurrent layers": """
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    "PyTorch's own kernels, called by name": """
        _softmax _log_softmax _native_multi_head_attention _transformer_encoder_layer_fwd
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward
    """,
    "Fourier transforms": """
        fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft hfft2 ihfft2 hfftn
        ihfftn stft istft
    """,
    "linear algebra": """
        cholesky cholesky_ex cholesky_solve cholesky_inverse qr svd svdvals eigh eigvalsh eig eigvals
        solve solve_ex triangular_solve lstsq inv inv_ex inverse pinv det logdet slogdet
        tensorinv tensorsolve matrix_exp matrix_power matrix_rank householder_product geqrf ormqr
        lu lu_factor lu_factor_ex lu_solve ldl_factor ldl_solve
    """,
}
"""Functions whose rows are known to depend on the batch, and which are not covered."""
REPORTED_NAMES = [name for names in REPORTED.values() for name in names.split()]
_OTHER_VARIANT: dict[Callable[..., Any], str] = {
    torch.sparse.mm: "torch.sparse.mm",
    torch.sparse.addmm: "torch.sparse.addmm",
    torch._sparse_sum: "torch.sparse.sum",
    torch.sparse.softmax: "torch.sparse.softmax",
    torch.sparse.sampled_addmm: "torch.sparse.sampled_addmm",
    torch.sparse.log_softmax: "torch.sparse.log_softmax",
    torch.linalg.cond: "torch.linalg.cond",
    torch._C._nn._upsample_bilinear2d_aa: "torch.nn.functional.interpolate with antialias",
    torch._C._nn._upsample_bicubic2d_aa: "torch.nn.functional.interpolate with antialias",
}


def _higher_order(*names: str) -> list[Any]:
    """The operators of these names that this PyTorch has."""
    found = torch.ops.higher_order
    return [getattr(found, name) for name in names if hasattr(found, name)]


HIGHER_ORDER = _higher_order("flex_attention", "cond", "while_loop", "map_impl", "scan", "associative_scan")
UNTRACED = [*HIGHER_ORDER, *_higher_order("tag_activation_checkpoint")]
"""``torch.compile`` traces what they call without a context that is entered in the function it compiles."""


def unless(func: Callable[..., Any], argument: str, place: int) -> Callable[..., Any]:
    """`func`, covered only where `argument`, at position `place`, is False, None or absent."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get(argument)
        return func(*args, **kwargs) if asked is None or asked is False else NotImplemented

    return call


_WHERE = (torch, torch.Tensor, F, torch.linalg, torch.fft, torch.special)
_LABELS = ("torch", "torch.Tensor", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")


def _named(name: str) -> dict[Callable[..., Any], str]:
    """All functions of PyTorch with this name, and their full names."""
    found = zip(_WHERE, _LABELS, strict=True)
    return {getattr(w, name): f"{label}.{name}" for w, label in found if callable(getattr(w, name, None))}


def full_name(name: str) -> str | None:
    """Where users find the function that an operator of this name is called by."""
    kind, _, rest = name.partition("_")
    if kind in ("linalg", "fft", "special") and hasattr(getattr(torch, kind), rest):
        return f"torch.{kind}.{rest}"
    for variant, label in _OTHER_VARIANT.items():
        if variant.__name__ == name:
            return label
    return next(iter(_named(name).values()), None)


def _pointwise(name: str) -> Iterator[tuple[Callable[..., Any], Callable[..., Any] | None]]:
    """All functions of PyTorch called `name` or `name_`. In-place ones come with their out-of-place form."""
    for where in _WHERE:
        func = getattr(where, name, None)
        if func is not None:
            yield func, getattr(where, "__" + name[3:]) if name.startswith("__i") else None
            if hasattr(where, name + "_"):
                yield getattr(where, name + "_"), func


_NO_CHECKS = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def _body(function: FunctionType) -> FunctionType:
    """A copy of PyTorch's `function` that does not dispatch itself, so that its calls are overridden."""
    body = FunctionType(
        function.__code__,
        function.__globals__ | _NO_CHECKS,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other"}
"""Other names that PyTorch takes for arguments."""

_REPLACED_NAMES = [name for row in REPLACED for name in row.functions if isinstance(name, str)]
REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The replacement of each function. It returns NotImplemented for arguments that are not covered."""

for _one_by_one in (False, True):  # an entry for a function overrides one for its name
    for _row in REPLACED:
        for _key, _override in _row.functions.items():
            if callable(_key) == _one_by_one:
                REPLACEMENTS |= dict.fromkeys([_key] if callable(_key) else _named(_key), _override)
VIEWS = {func for name in ("expand", "expand_as") for func in _named(name)} | {Tensor.__getitem__}
TAKE_OUT = frozenset(REPLACEMENTS)
"""Functions whose ``out`` this library writes. Those added below have no replacement with ``out``."""
NAMES_OF_SUMS = ("sum", "mean", "nansum", "nanmean")
SUMS = {func for name in NAMES_OF_SUMS for func in _named(name)}
"""Functions that sum in the dtype of ``out``."""
REPLACEMENTS |= {func: unless(func, *asks) for name, asks in ACCUMULATING.items() for func in _named(name)}
ELEMENTWISE = {
    func: replacement(func, out_of_place)
    for replacement, names in (
        (broadcasting, _BROADCASTING),
        (in_whole_vectors, WHOLE_VECTORS),
        (complex_in_whole_vectors, COMPLEX_WHOLE_VECTORS),
    )
    for name in names
    for func, out_of_place in _pointwise(name)
}
"""Those that matter on a CPU, or in the gradients of what broadcasts."""
REPLACEMENTS |= ELEMENTWISE
POWERS = [  # torch.compile does not find these in a dictionary
    (Tensor.__pow__, in_whole_vectors(Tensor.pow)),
    (Tensor.__rpow__, in_whole_vectors(Tensor.__rpow__)),
    (Tensor.__ipow__, in_whole_vectors(Tensor.pow_, Tensor.pow)),
]
UNCOVERED = {func for name in REPORTED_NAMES for func in _named(name)} | set(_OTHER_VARIANT)
NAMES = {
    func: label
    for name in (*_REPLACED_NAMES, *REPORTED_NAMES, *ACCUMULATING)
    for func, label in _named(name).items()
}
NAMES |= {f: f"torch.{f.__name__}" for f in (torch.group_norm, torch.instance_norm, torch.batch_norm)}
NAMES |= {torch.embedding: "torch.embedding", F.embedding: "torch.nn.functional.embedding"}
NAMES |= {torch.linalg.solve_triangular: "torch.linalg.solve_triangular"}
NAMES |= {torch._foreach_norm: "torch._foreach_norm", torch.linalg.vector_norm: "torch.linalg.vector_norm"}
NAMES |= _OTHER_VARIANT

# Python functions of PyTorch that are followed into. Functions with a closure are dispatched by it. Those of
# `torch.functional` have a rule, or call nothing that has one, and the compiler traces no copies of them.
BODIES = {
    function: _body(function)
    for function in vars(F).values()
    if isinstance(function, FunctionType)
    and function.__module__ == F.__name__
    and not function.__closure__
    and function not in UNCOVERED
}
# Backward functions are followed into so that activation checkpointing's second forward is covered.
_BACKWARD: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
BODIES |= {func: _body(func) for func in _BACKWARD}

_DIRECT = {
    *_REPLACED_NAMES,
    *REPORTED_NAMES,
    "embedding",
    "_fused_rms_norm",
    "_foreach_norm",
    "linalg_vector_norm",
} - {
    *("expand", "expand_as", "sort", "argsort", "msort", "index_select", "gather", "repeat_interleave"),
    *("index_put", "index_put_"),
}
_DIRECT_KINDS = (
    "linalg_",
    "_linalg_",
    "fft_",
    "_fft_",
    "upsample_",
    "_upsample_",
    "grid_sampler_",
    "_scaled_dot_product_",
)


def is_direct(func: Any) -> bool:
    """Whether `func` is an operator of ``torch.ops.aten`` that reduces, or of ``transformers``."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    if namespace == "transformers":
        return name == "grouped_mm_fallback"
    return namespace == "aten" and (name in _DIRECT or name.startswith(_DIRECT_KINDS))
