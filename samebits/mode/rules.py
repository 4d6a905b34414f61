"""The rules of ``samebits.batch_invariant``: what becomes of each function of PyTorch's.

:data:`RULES` has one :class:`Rule` for a function. Two modules derive from them what the mode's forms ask:
:mod:`samebits.mode.functions` by function, for code that ``torch.compile`` traces, and
:mod:`samebits.mode.operators` by operator, for PyTorch's dispatcher. What has no rule is left to PyTorch.

* :mod:`samebits.mode.products`, :mod:`~samebits.mode.overrides`, :mod:`~samebits.mode.indexing` and
  :mod:`~samebits.mode.windows` have replacements. The tables of ``docs/mode.md`` are written from
  :data:`REPLACED` and :data:`REPORTED`.
* :mod:`samebits.mode.pointwise` makes those of elementwise functions: they compute in whole vectors, or
  broadcast with a gradient.
* Functions whose rows depend on the batch, and which have no replacement, are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.mode import indexing, overrides, products, windows
from samebits.mode.optimizers import step_in_whole_vectors
from samebits.mode.pointwise import (
    broadcasting,
    complex_in_whole_vectors,
    cross_entropy_of_logits,
    glu_in_whole_vectors,
    loss_gradient_in_whole_vectors,
    scaling_in_whole_vectors,
)
from samebits.mode.vectors import in_whole_vectors

__all__ = ["BACKENDS", "ELEMENTWISE", "REPLACED", "REPORTED", "RULES", "Rule"]

Replacement = Callable[..., Any]

BACKENDS = ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA")
"""Keys of PyTorch's dispatcher."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a function of PyTorch's, and of the operators below it.

    Attributes:
        name: of the function. Without `functions` it stands for all functions with that name.
        replacement: takes the function's arguments but ``out``, and returns NotImplemented for those that are
            not covered.
        example: a call of it, for tests, which have the tensors ``t``: a batch ``t.x[B, 6, 8]``, and others.
        functional: the replacement of ``torch.nn.functional``'s function, where that takes other arguments.
        functions: the only functions that it is for.
        operators: the names of the operators. None: the function's, also as a special function. Empty: they
            have no rule, since what they call has one, or since they are reported by a pattern.
        as_operator: the replacement of the operators, where they take other arguments.
        in_autograd: the replacement of calls by which autograd itself reduces gradients.
        each: makes the replacement of every function with the name, from it and, for one that writes into its
            first argument, from the function that computes.
        each_operator: the same for operators.
        unless: an argument, and its position. The function is covered, by itself, unless that is given.
        keys: of the dispatcher, at which the rule holds in the process. In contexts it holds for all tensors,
            or for those on a CPU, if it has keys for them alone.
        sums: it computes in the dtype of ``out``.
        is_view: its result may be a view of its argument.
        moves: it only copies values, so a call of its operator by name is not reported.
        of_gradients: the operators that autograd calls for gradients of functions that this library does not
            replace: most of them add up.
        label: the name for messages, if PyTorch shows the function elsewhere.
    """

    name: str
    replacement: Replacement | None = None
    example: Callable[[Any], Any] | None = None
    functional: Replacement | None = None
    functions: tuple[Callable[..., Any], ...] = ()
    operators: tuple[str, ...] | None = None
    as_operator: Replacement | None = None
    in_autograd: Replacement | None = None
    each: Callable[..., Replacement] | None = None
    each_operator: Callable[..., Replacement] | None = None
    unless: tuple[str, int] | None = None
    keys: tuple[str, ...] = BACKENDS
    sums: bool = False
    is_view: bool = False
    moves: bool = False
    of_gradients: tuple[str, ...] = ()
    label: str = ""

    @property
    def reported(self) -> bool:
        """Whether all calls are, since nothing replaces them."""
        return not (self.replacement or self.each or self.each_operator or self.unless)


class Row(NamedTuple):
    """Functions that are replaced: a row of the table in ``docs/mode.md``.

    Attributes:
        result: what their replacements compute.
        uncovered: the arguments for which they are reported instead.
    """

    rules: tuple[Rule, ...]
    result: str
    uncovered: str = ""


REPLACED = (
    Row(
        (
            Rule("mm", products.mm, lambda t: torch.mm(t.x[:, 0], t.m8)),
            Rule("bmm", products.bmm_, lambda t: torch.bmm(t.x, t.batch_of_m8), of_gradients=("bmm",)),
            Rule("matmul", products.matmul_, lambda t: torch.matmul(t.x, t.m8)),
            Rule("__matmul__", products.matmul_, lambda t: t.x @ t.m8),
            Rule("__rmatmul__", products.rmatmul, lambda t: t.x.__rmatmul__(t.m6)),
            Rule("mv", products.mv, lambda t: torch.mv(t.x[:, 0], t.v8)),
            Rule("dot", products.dot, lambda t: torch.dot(t.x[:, 0, 0], t.x[:, 0, 1])),
            Rule("linear", products.linear_, lambda t: F.linear(t.x, t.w, t.v8[:5])),
        ),
        "`samebits.matmul`, `bmm`, `linear`",
    ),
    Row(
        (
            Rule(
                "addmm",
                products.addmm,
                lambda t: torch.addmm(t.v8, t.x[:, 0], t.m8) + torch.addmm(t.v8, t.x[:, 0], t.m8, alpha=0.5),
            ),
            Rule(
                "addmm_", products.in_place(products.addmm), lambda t: (t.x[:, 0] * 1).addmm_(t.x[:, 1], t.m8)
            ),
            Rule("baddbmm", products.baddbmm, lambda t: torch.baddbmm(t.v8, t.x, t.batch_of_m8, beta=0.5)),
            Rule(
                "baddbmm_",
                products.in_place(products.baddbmm),
                lambda t: (t.x * 1).baddbmm_(t.x, t.batch_of_m8),
            ),
        ),
        "a bias that is a vector: as in `linear`. Otherwise beta · input + alpha · product in float32,"
        " rounded once",
    ),
    Row(
        (Rule("_grouped_mm", products.grouped_mm_),),
        "`samebits.grouped_mm`, for `F.grouped_mm`, too; rows of no group are +0",
    ),
    Row(
        (Rule("_scaled_mm_v2", products.scaled_mm_),),
        "`samebits.scaled_mm`, for `F.scaled_mm`: [FP8](contract.md#fp8)",
        "scales in blocks of 16 or 32, swizzled ones and pairs of them; scales that span rows of the first"
        " operand are refused",
    ),
    Row(
        (Rule("_scaled_grouped_mm_v2", products.scaled_grouped_mm_),),
        "`samebits.scaled_grouped_mm`, for `F.scaled_grouped_mm`, of groups of rows; rows of no group are +0",
        "groups of terms, and what `_scaled_mm_v2` does not cover",
    ),
    Row(
        (
            Rule(
                "einsum",
                products.einsum_,
                lambda t: (
                    torch.einsum("btd,ed->bte", t.x, t.w) + torch.einsum("btd,bsd->bts", t.x, t.x[:, :5])
                ),
                as_operator=products.einsum_operator,
            ),
        ),
        "products of pairs, always from left to right",
    ),
    Row(
        (
            Rule(
                "softmax",
                overrides.softmax_,
                lambda t: t.x.softmax(-1) + torch.softmax(t.x, 1),
                functional=overrides.functional_softmax,
            ),
            Rule(
                "log_softmax",
                overrides.log_softmax_,
                lambda t: t.x.log_softmax(-1) + F.log_softmax(t.x, 1),
                functional=overrides.functional_log_softmax,
            ),
            Rule(
                "logsumexp",
                overrides.logsumexp_,
                lambda t: torch.logsumexp(t.x, -1) + t.x.logsumexp((1, 2), True)[:, 0],
            ),
        ),
        "[row reductions](contract.md#row-reductions)",
    ),
    Row(
        (
            Rule(
                "cross_entropy",
                overrides.cross_entropy,
                lambda t: F.cross_entropy(t.x[:, 0], t.x[:, 0].detach().argmax(-1), reduction="none"),
                operators=("cross_entropy_loss",),
                as_operator=overrides.cross_entropy_loss,
            ),
        ),
        "log-softmax, then the losses summed as a row; of a float32 matrix by `samebits.logp`, whose"
        " gradients are those of [log-probabilities](contract.md#log-probabilities)",
        "class weights, label smoothing, probabilities as targets",
    ),
    Row(
        (
            Rule(
                "binary_cross_entropy_with_logits",
                cross_entropy_of_logits,
                lambda t: F.binary_cross_entropy_with_logits(t.x, t.x.detach().sigmoid(), reduction="none"),
                functions=(torch.binary_cross_entropy_with_logits,),
            ),
        ),
        "elementwise, then the losses summed as a row",
    ),
    Row(
        (
            Rule(
                "layer_norm",
                overrides.layer_norm_,
                lambda t: F.layer_norm(t.x, (8,), t.v8, t.v8) + F.layer_norm(t.x, (6, 8)),
            ),
            Rule("rms_norm", overrides.rms_norm_, lambda t: F.rms_norm(t.x, (8,), t.v8)),
        ),
        "row reductions; gradients of weights over tokens",
    ),
    Row(
        (
            Rule(
                "sum",
                overrides.sum_,
                lambda t: t.x.sum(-1) + t.x.sum((1, 2))[:, None],
                in_autograd=overrides.sum_of_gradients,
                sums=True,
                of_gradients=("sum",),
            ),
            Rule("mean", overrides.mean_, lambda t: t.x.mean(-1) + t.x.mean(1)[:, :6], sums=True),
            Rule("nansum", overrides.nansum, lambda t: t.x.nansum(-1), sums=True),
            Rule("nanmean", overrides.nanmean, lambda t: t.x.nanmean(-1), sums=True),
            Rule(
                "sum_to_size",
                overrides.sum_to_size,
                lambda t: t.x.sum_to_size(t.x.shape[0], 6, 1),
                operators=(),
            ),
        ),
        "row reductions",
    ),
    Row(
        (
            Rule("var", overrides.var_, lambda t: t.x.var(-1) + t.x.var((1, 2), keepdim=True)[:, 0]),
            Rule("std", overrides.std_, lambda t: t.x.std(-1)),
            Rule("var_mean", overrides.var_mean, lambda t: torch.var_mean(t.x, -1)[0]),
            Rule("std_mean", overrides.std_mean, lambda t: torch.std_mean(t.x, -1)[1]),
            Rule("norm", overrides.norm, lambda t: t.x.norm(dim=-1) + torch.norm(t.x, 1, -1)),
            Rule(
                "linalg_norm",
                overrides.linalg_norm,
                lambda t: torch.linalg.norm(t.x, dim=-1),
                functions=(torch.linalg.norm,),
            ),
            Rule(
                "linalg_vector_norm",
                overrides.linalg_vector_norm,
                lambda t: torch.linalg.vector_norm(t.x, dim=-1),
                functions=(torch.linalg.vector_norm,),
            ),
            Rule("_foreach_norm", overrides.foreach_norm, lambda t: torch._foreach_norm([t.x[0], t.x[1]])[0]),
        ),
        "row reductions",
        "norms of other orders than 0 (without gradients), 1, 2 and ±∞, and of matrices",
    ),
    Row(
        (
            Rule(
                "embedding",
                overrides.embedding_,
                lambda t: F.embedding((t.x.detach() > 0).long(), t.m8),
                functional=overrides.functional_embedding,
            ),
        ),
        "the same rows; a gradient in token order",
        "`max_norm`, `scale_grad_by_freq`, `sparse`",
    ),
    Row(
        (
            Rule(
                "scaled_dot_product_attention",
                overrides.attention_,
                lambda t: F.scaled_dot_product_attention(*(t.x[:, None],) * 3, is_causal=True),
            ),
        ),
        "[attention](contract.md#attention) with causal, boolean and float masks, and `enable_gqa`",
        "dropout; a mask with `is_causal` is refused, as by PyTorch on a GPU",
    ),
    Row(
        (
            Rule(
                "expand",
                overrides.expand_,
                lambda t: t.x[:, :1].expand(-1, 6, 8) * t.x,
                is_view=True,
                operators=(),
                moves=True,
            ),
            Rule(
                "expand_as",
                overrides.expand_as,
                lambda t: t.x[:, :1].expand_as(t.x) * t.x,
                is_view=True,
                operators=(),
                moves=True,
            ),
        ),
        "themselves; what was broadcast gets a gradient in token order, in all functions that broadcast",
        "in a context that a compiled function enters by itself: other functions than these and +, −, ·, /",
    ),
    Row(
        (
            Rule("conv1d", windows.conv1d, lambda t: F.conv1d(t.x, t.taps, padding=1)),
            Rule("conv2d", windows.conv2d, lambda t: F.conv2d(t.pictures, t.taps[:, :, None])),
            Rule("conv3d", windows.conv3d, lambda t: F.conv3d(t.clips, t.taps[:, :, None, None])),
        ),
        "[convolutions](contract.md#convolutions): products of what a window sees; sums over positions that"
        " begin anew at each row of the batch",
        "transposed ones",
    ),
    Row(
        (
            Rule("avg_pool1d", windows.avg_pool1d, lambda t: F.avg_pool1d(t.x, 2)),
            Rule("avg_pool2d", windows.avg_pool2d, lambda t: F.avg_pool2d(t.pictures, 3, 2, 1)),
            Rule("avg_pool3d", windows.avg_pool3d, lambda t: F.avg_pool3d(t.clips, 2)),
            Rule("adaptive_avg_pool1d", windows.adaptive_avg_pool1d, lambda t: F.adaptive_avg_pool1d(t.x, 3)),
            Rule(
                "adaptive_avg_pool2d",
                windows.adaptive_avg_pool2d,
                lambda t: F.adaptive_avg_pool2d(t.pictures, (2, 3)),
            ),
            Rule(
                "adaptive_avg_pool3d",
                windows.adaptive_avg_pool3d,
                lambda t: F.adaptive_avg_pool3d(t.clips, (2, 3, 3)),
            ),
        ),
        "[means](contract.md#convolutions) over windows, and rows of what a part of a picture has",
    ),
    Row(
        (
            Rule(
                "upsample_linear1d",
                windows.upsample("upsample_linear1d", 1),
                lambda t: F.interpolate(t.x, scale_factor=1.5, mode="linear"),
                functions=(torch._C._nn.upsample_linear1d,),
            ),
            Rule(
                "upsample_bilinear2d",
                windows.upsample("upsample_bilinear2d", 2),
                lambda t: F.interpolate(t.pictures, (3, 9), mode="bilinear"),
                functions=(torch._C._nn.upsample_bilinear2d,),
            ),
            Rule(
                "upsample_trilinear3d",
                windows.upsample("upsample_trilinear3d", 3),
                lambda t: F.interpolate(t.clips, (3, 9, 2), mode="trilinear"),
                functions=(torch._C._nn.upsample_trilinear3d,),
            ),
            Rule(
                "upsample_bicubic2d",
                windows.upsample("upsample_bicubic2d", 2, "cubic"),
                lambda t: F.interpolate(t.pictures, (3, 9), mode="bicubic"),
                functions=(torch._C._nn.upsample_bicubic2d,),
            ),
            Rule(
                "upsample_nearest1d",
                windows.upsample_nearest("upsample_nearest1d", 1),
                lambda t: F.interpolate(t.x, scale_factor=1.5),
                functions=(torch._C._nn.upsample_nearest1d,),
            ),
            Rule(
                "_upsample_nearest_exact1d",
                windows.upsample_nearest("_upsample_nearest_exact1d", 1),
                lambda t: F.interpolate(t.x, 5, mode="nearest-exact"),
                functions=(torch._C._nn._upsample_nearest_exact1d,),
            ),
            Rule(
                "upsample_nearest2d",
                windows.upsample_nearest("upsample_nearest2d", 2),
                lambda t: F.interpolate(t.pictures, (3, 9)),
                functions=(torch._C._nn.upsample_nearest2d,),
            ),
            Rule(
                "_upsample_nearest_exact2d",
                windows.upsample_nearest("_upsample_nearest_exact2d", 2),
                lambda t: F.interpolate(t.pictures, (3, 9), mode="nearest-exact"),
                functions=(torch._C._nn._upsample_nearest_exact2d,),
            ),
            Rule(
                "upsample_nearest3d",
                windows.upsample_nearest("upsample_nearest3d", 3),
                lambda t: F.interpolate(t.clips, (3, 9, 2)),
                functions=(torch._C._nn.upsample_nearest3d,),
            ),
            Rule(
                "_upsample_nearest_exact3d",
                windows.upsample_nearest("_upsample_nearest_exact3d", 3),
                lambda t: F.interpolate(t.clips, (3, 9, 2), mode="nearest-exact"),
                functions=(torch._C._nn._upsample_nearest_exact3d,),
            ),
        ),
        "`F.interpolate`: [sums](contract.md#convolutions) of the few entries that have weights, one"
        " dimension after the other",
        "`antialias`",
    ),
    Row(
        (
            Rule(
                "fold",
                windows.fold,
                lambda t: F.fold(t.x[..., :4], (4, 6), (2, 3), stride=(2, 3)),
                operators=("col2im",),
            ),
        ),
        "itself, where windows do not meet",
        "windows that meet",
    ),
    Row(
        (
            Rule(
                "group_norm",
                windows.group_norm,
                lambda t: F.group_norm(t.x, 3, t.v6, t.v6) + F.group_norm(t.pictures, 2)[:, :, 0],
                functions=(torch.group_norm,),
            ),
            Rule(
                "instance_norm",
                windows.instance_norm,
                lambda t: F.instance_norm(t.x, weight=t.v6),
                functions=(torch.instance_norm,),
            ),
            Rule(
                "batch_norm",
                windows.batch_norm,
                lambda t: F.batch_norm(t.x, t.v6, t.v6.abs(), t.v6, t.v6),
                functions=(torch.batch_norm,),
            ),
        ),
        "row reductions; `batch_norm` with the statistics that it keeps, elementwise",
        "statistics of the batch (`batch_norm` in training), and those that `instance_norm` keeps",
    ),
    Row(
        (
            Rule("rsqrt", overrides.rsqrt_, lambda t: torch.rsqrt(t.x)),
            Rule("rsqrt_", products.in_place(overrides.rsqrt_), lambda t: (t.x * 1).rsqrt_()),
        ),
        "1 / sqrt(x), two roundings in float32; PyTorch's on a CPU, where a GPU has an approximation",
    ),
    Row(
        (
            Rule("gelu", overrides.gelu_, lambda t: F.gelu(t.x) + F.gelu(t.x, approximate="tanh")),
            Rule("gelu_", products.in_place(overrides.gelu_)),
            Rule("silu", overrides.silu_, lambda t: F.silu(t.x) + F.silu(t.x * 1, inplace=True)),
            Rule("silu_", products.in_place(overrides.silu_)),
            Rule(
                "sigmoid",
                overrides.sigmoid_,
                lambda t: torch.sigmoid(t.x) + F.sigmoid(t.x),
                of_gradients=("sigmoid", "sigmoid.out"),
            ),
            Rule("expit", overrides.sigmoid_, lambda t: torch.special.expit(t.x)),
            Rule("sigmoid_", products.in_place(overrides.sigmoid_), lambda t: (t.x * 1).sigmoid_()),
        ),
        "[one for all devices](contract.md#fused-layers), with gradients; PyTorch's depend on the device",
    ),
    Row(
        (
            Rule(
                "linalg_solve_triangular",
                overrides.solve_triangular,
                lambda t: torch.linalg.solve_triangular(t.triangle, t.x, upper=False),
                functions=(torch.linalg.solve_triangular,),
            ),
        ),
        "substitution, [row by row](contract.md#triangular-systems), of float32",
    ),
    Row(
        (
            Rule("sort", indexing.sort, lambda t: t.x.sort(-1).values, moves=True),
            Rule("argsort", indexing.argsort, lambda t: t.x.argsort(-1), moves=True),
            Rule("msort", indexing.msort, lambda t: torch.msort(t.x[0]), moves=True),
            Rule("topk", indexing.topk, lambda t: t.x.topk(3).values),
        ),
        "stable: equal values in the order of their places, also in `topk`",
        "`out=`",
    ),
    Row(
        (
            Rule(
                "__getitem__",
                indexing.getitem,
                lambda t: t.x[:, t.places],
                functions=(Tensor.__getitem__,),
                is_view=True,
                operators=(),
            ),
            Rule(
                "index_select",
                indexing.index_select,
                lambda t: t.x.index_select(1, t.places),
                operators=(),
                moves=True,
            ),
            Rule(
                "gather",
                indexing.gather,
                lambda t: t.x.gather(2, (t.x.detach() > 0).long()),
                operators=(),
                moves=True,
            ),
            Rule(
                "repeat_interleave",
                indexing.repeat_interleave,
                lambda t: t.x.repeat_interleave(2, 1),
                operators=(),
                moves=True,
            ),
            Rule(
                "repeat",
                indexing.repeat,
                lambda t: t.x.repeat(1, 2, 1),
                functions=(Tensor.repeat,),
                operators=(),
            ),
        ),
        "themselves, and `x[i]`; a gradient in the order of the index",
        "tensors of integers apart from each other (`x[i, :, j]`): their gradients are summed by PyTorch",
    ),
    Row(
        (
            Rule(
                "index_add", indexing.index_add, lambda t: t.x.index_add(1, t.places, t.x[:, :5], alpha=0.5)
            ),
            Rule(
                "index_add_",
                products.in_place(indexing.index_add),
                lambda t: (t.x * 1).index_add_(1, t.places, t.x[:, :5]),
                of_gradients=("index_add_",),
            ),
            Rule(
                "scatter_add",
                indexing.scatter_add,
                lambda t: t.x.scatter_add(2, (t.x.detach() > 0).long(), t.x),
            ),
            Rule(
                "scatter_add_",
                products.in_place(indexing.scatter_add),
                lambda t: (t.x * 1).scatter_add_(2, (t.x.detach() > 0).long(), t.x),
                of_gradients=("scatter_add_",),
            ),
            Rule(
                "scatter_reduce",
                indexing.scatter_reduce,
                lambda t: t.x.scatter_reduce(2, (t.x.detach() > 0).long(), t.x, "mean"),
            ),
            Rule(
                "scatter_reduce_",
                products.in_place(indexing.scatter_reduce),
                lambda t: (t.x * 1).scatter_reduce_(2, (t.x.detach() > 0).long(), t.x, "sum"),
            ),
            Rule(
                "index_put",
                indexing.index_put,
                lambda t: t.x.index_put((torch.arange(1), t.places[:1]), t.x[:1, 0], True),
                moves=True,
            ),
            Rule(
                "index_put_",
                indexing.index_put_,
                lambda t: (t.x * 1).index_put_((torch.arange(1), t.places[:1]), t.x[:1, 0], True),
                operators=("index_put_", "_index_put_impl_"),
                of_gradients=("_index_put_impl_",),
                moves=True,
            ),
        ),
        "float32 chains from what was there, in the order of the index, rounded once",
        "`index_put` that accumulates at masks, or at tensors of integers apart from each other; products in"
        " `scatter_reduce`",
    ),
    Row(
        (
            Rule("cumsum", indexing.cumsum, lambda t: t.x.cumsum(-1)),
            Rule("cumsum_", products.in_place(indexing.cumsum), lambda t: (t.x * 1).cumsum_(1)),
            Rule("cumprod", indexing.cumprod, lambda t: t.x.detach().cumprod(-1)),
            Rule("cumprod_", products.in_place(indexing.cumprod), lambda t: (t.x.detach() * 1).cumprod_(1)),
        ),
        "[row reductions](contract.md#row-reductions), by doubling",
        "gradients of `cumprod`",
    ),
)

_BROADCASTING = """
    add sub subtract mul multiply div divide true_divide __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__
    __div__ __iadd__ __isub__ __imul__ __itruediv__
""".split()  # noqa: SIM905
_WHOLE_VECTORS = """
    floor_divide __floordiv__ __rfloordiv__ __ifloordiv__
    exp exp2 expm1 log log2 log10 log1p pow float_power rsub
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc polar
    arcsin arccos arctan arctan2 arcsinh arccosh arctanh
    erf erfc erfinv erfcx ndtr ndtri log_ndtr entr i0 i0e i1 i1e lgamma gammaln digamma psi polygamma
    igamma igammac gammainc gammaincc logit xlogy xlog1py logaddexp logaddexp2 ldexp hypot lerp addcmul
    addcdiv mish softplus logsigmoid elu selu celu softshrink tanhshrink
""".split()  # noqa: SIM905
_COMPLEX = """
    abs absolute __abs__ square reciprocal angle sgn softsign neg negative __neg__
""".split()  # noqa: SIM905
_SCALING = ("add", "sub", "mul", "div")
_CPU = ("CPU", "AutogradCPU")
ELEMENTWISE = (
    *(
        Rule(
            name,
            each=broadcasting,
            each_operator=scaling_in_whole_vectors if name in _SCALING else None,
            operators=None if name in _SCALING else (),
            keys=_CPU,
        )
        for name in _BROADCASTING
    ),
    *(
        Rule(
            name,
            each=in_whole_vectors,
            each_operator=in_whole_vectors,
            operators=("log_sigmoid",) if name == "logsigmoid" else None,
            keys=_CPU,
        )
        for name in _WHOLE_VECTORS
    ),
    *(
        Rule(name, each=complex_in_whole_vectors, each_operator=complex_in_whole_vectors, keys=_CPU)
        for name in _COMPLEX
    ),
    Rule("glu", each=glu_in_whole_vectors, each_operator=glu_in_whole_vectors, keys=_CPU),
)
"""They matter on a CPU, and in the gradients of what broadcasts."""

_OPERATORS = (
    # Gradients that depend on where PyTorch's vectors end. Autograd calls the second ones on whole vectors.
    *(
        Rule(name, each_operator=loss_gradient_in_whole_vectors, keys=("CPU",), of_gradients=(name,))
        for name in ("smooth_l1_loss_backward", "huber_loss_backward")
    ),
    *(
        Rule(name, each_operator=in_whole_vectors, keys=("CPU",))
        for name in ("silu_backward", "mish_backward", "softplus_backward")
    ),
    # Fused steps of optimizers, which are elementwise.
    *(
        Rule(name, each_operator=step_in_whole_vectors, keys=("CPU",))
        for name in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    ),
)
_ACCUMULATING = (
    *(Rule(name, unless=("accumulate", 3)) for name in ("put", "put_")),
    *(Rule(name, unless=("reduce", 4)) for name in ("scatter", "scatter_")),
    *(Rule(name, unless=("weight", 3)) for name in ("histogramdd", "_histogramdd_from_bin_cts")),
)

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
_VARIANTS = (
    # Sparse products and sums: no rule of a function leads to their operators.
    *(
        Rule(function.__name__, functions=(function,), label=label, keys=())
        for function, label in (
            (torch.sparse.mm, "torch.sparse.mm"),
            (torch.sparse.addmm, "torch.sparse.addmm"),
            (torch._sparse_sum, "torch.sparse.sum"),
            (torch.sparse.softmax, "torch.sparse.softmax"),
            (torch.sparse.log_softmax, "torch.sparse.log_softmax"),
        )
    ),
    *(
        Rule(function.__name__, functions=(function,), label=label, operators=())
        for function, label in (
            (torch.sparse.sampled_addmm, "torch.sparse.sampled_addmm"),
            (torch.linalg.cond, "torch.linalg.cond"),
            (torch._C._nn._upsample_bilinear2d_aa, "torch.nn.functional.interpolate with antialias"),
            (torch._C._nn._upsample_bicubic2d_aa, "torch.nn.functional.interpolate with antialias"),
        )
    ),
)

RULES = (
    *(Rule(name) for names in REPORTED.values() for name in names.split()),
    *ELEMENTWISE,
    *_OPERATORS,
    *_ACCUMULATING,
    *(rule for row in REPLACED for rule in row.rules),
    *_VARIANTS,
)
"""All of them. Where functions have two, the later one counts."""
