"""``samebits.topk_routing``: the experts of each token, and their weights, from a router's logits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from samebits.ops._checks import SUPPORTED, check_device, check_operands, shape
from samebits.ops._operator import Operator, refuse_second_derivatives
from samebits.ops._rows import backend, rounded
from samebits.ops.activation import activation
from samebits.ops.reduce import sum
from samebits.ops.softmax import jacobian_product, softmax

__all__ = ["MOST_EXPERTS", "MOST_GROUPS", "MOST_SLOTS", "Score", "topk_routing"]

Score = Literal["softmax", "sigmoid", "logits"]
MOST_EXPERTS, MOST_GROUPS, MOST_SLOTS = 1024, 32, 16
_LARGEST: float = torch.finfo(torch.float32).max


def topk_routing(
    logits: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The `k` experts of each token and their weights, in one launch.

    Scores are the softmax or the sigmoid of ``logits``, in float32. The experts of a token are those of its
    `k` largest scores, the largest first. Of equal scores those with the lowest index come first; NaN is
    above all numbers. The result has the bits of these steps one by one under
    :class:`samebits.batch_invariant`, but for those of NaN, as routers of ``transformers`` take them:

    * ``"softmax"``: Qwen3-MoE, Qwen2-MoE and OLMoE, with `renormalize` as in their configurations; Mixtral;
    * ``"sigmoid"`` with `bias`, `groups`, `eps` and `scale`: DeepSeek-V3 and GLM-4-MoE;
    * ``"logits"``: GPT-OSS and Granite. Experts are chosen by their logits. Weights are the softmax of these.

    Args:
        logits: ``[tokens, experts]``, up to 1024 experts; bfloat16, float16 or float32, any strides.
        k: how many experts a token has, up to 16.
        score: what experts are chosen by.
        bias: float32 ``[experts]``, added to scores for the choice alone.
        groups: how many groups of neighbouring experts there are, up to 32. With more than one, each has at
            least two experts, and a token's experts are in its `top_groups` groups: those with the largest
            sums of their two largest scores. Elsewhere scores count as -inf.
        renormalize: divide weights by their sum, to which `eps` is added.
        scale: what weights are multiplied by at last.
        dtype: of the weights, which are rounded once.

    Returns:
        Weights ``[tokens, k]`` in `dtype`, and int64 indices of experts ``[tokens, k]``.

    The gradient of ``logits`` is that of the steps, in float32, rounded once. ``bias`` has none.

    Raises:
        TypeError: a dtype is another, or a number is none.
        ValueError: a shape or a number does not fit.
    """
    for name, t in {"logits": logits, "bias": bias}.items():
        if t is not None:
            check_operands("topk_routing", None, {name: t}, autocast=False)
            check_device("topk_routing", name, t, "logits", logits)
    if logits.ndim != 2:
        raise ValueError(
            f"samebits.topk_routing: logits: expected [tokens, experts], got shape {shape(logits)}"
        )
    experts = logits.shape[1]
    if experts > MOST_EXPERTS:
        raise ValueError(
            f"samebits.topk_routing: logits: expected up to {MOST_EXPERTS} experts, got {experts}"
        )
    if dtype not in SUPPORTED:
        raise TypeError(f"samebits.topk_routing: dtype: expected bfloat16, float16 or float32, got {dtype}")
    if score not in ("softmax", "sigmoid", "logits"):
        raise ValueError(
            f"samebits.topk_routing: score: expected 'softmax', 'sigmoid' or 'logits', got {score!r}"
        )
    if type(k) is not int or not 1 <= k <= min(MOST_SLOTS, experts):
        raise ValueError(
            f"samebits.topk_routing: k: expected 1 to {min(MOST_SLOTS, experts)} for {experts} experts, got"
            f" {k!r}"
        )
    _check_groups(experts, groups, top_groups)
    if score == "logits" and (bias is not None or groups > 1 or renormalize or eps != 0.0 or scale != 1.0):
        raise ValueError(
            "samebits.topk_routing: score: 'logits' goes without bias, groups, renormalize, eps and scale"
        )
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (experts,)):
        raise ValueError(
            f"samebits.topk_routing: bias: expected float32 of shape {(experts,)}, got {bias.dtype} of shape"
            f" {shape(bias)}"
        )
    if not (isinstance(eps, (int, float)) and isinstance(scale, (int, float))):  # no tensor with a gradient
        raise TypeError(
            "samebits.topk_routing: eps, scale: expected numbers, got"
            f" {type(eps).__name__} and {type(scale).__name__}"
        )
    if not (abs(scale) <= _LARGEST and 0.0 <= eps <= _LARGEST):
        raise ValueError(
            "samebits.topk_routing: eps, scale: expected finite numbers of float32, eps not negative, got"
            f" {eps}, {scale}"
        )
    return _operator(  # type: ignore[no-any-return]
        logits, bias, k, score, groups, top_groups, renormalize, float(eps), float(scale), dtype
    )


def _check_groups(experts: int, groups: int, top_groups: int) -> None:
    if type(groups) is not int or not 1 <= groups <= MOST_GROUPS or experts % groups:
        raise ValueError(
            f"samebits.topk_routing: groups: expected 1 to {MOST_GROUPS}, a divisor of {experts} experts, got"
            f" {groups!r}"
        )
    if groups > 1 and experts // groups < 2:
        raise ValueError(
            f"samebits.topk_routing: groups: expected groups of at least two experts, got {groups} of"
            f" {experts}"
        )
    if type(top_groups) is not int or not 1 <= top_groups <= groups:
        raise ValueError(f"samebits.topk_routing: top_groups: expected 1 to {groups}, got {top_groups!r}")


def _forward(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return backend(logits).topk_routing(logits, *rest)  # type: ignore[no-any-return]


def _fake(logits: Tensor, bias: Tensor | None, k: int, *rest: Any) -> tuple[Tensor, Tensor]:
    size = logits.shape[0], k
    return logits.new_empty(size, dtype=rest[-1]), logits.new_empty(size, dtype=torch.int64)


_operator = Operator(
    "topk_routing(Tensor logits, Tensor? bias, int k, str score, int groups, int top_groups,"
    " bool renormalize, float eps, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    cpu=_forward,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.score, _, _, ctx.renormalize, ctx.eps, ctx.scale, _ = inputs
    ctx.save_for_backward(logits, output[1])


def _backward(
    ctx: Any, saved: tuple[Tensor, ...], grad: Tensor, of_indices: Any
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("topk_routing")
    logits, indices = saved
    wide, g = logits.to(torch.float32), grad.to(torch.float32)
    if ctx.score == "logits":
        g = jacobian_product(softmax(wide.gather(1, indices)), g)
    else:
        scores = softmax(wide) if ctx.score == "softmax" else activation(wide, "sigmoid")
        if ctx.scale != 1.0:
            g = g * ctx.scale
        if ctx.renormalize:
            chosen = scores.gather(1, indices)
            total = sum(chosen, -1, True) + ctx.eps
            g = g / total + sum(-g * ((chosen / total) / total), -1, True)
    of_scores = torch.zeros_like(wide).scatter(1, indices, g)
    if ctx.score == "softmax":
        of_scores = jacobian_product(scores, of_scores)
    elif ctx.score == "sigmoid":
        of_scores = (of_scores * (1 - scores)) * scores
    return rounded(of_scores, logits.dtype), *(None,) * 9


# Each has a score: gradients always call functions of PyTorch's.
_operator.register_autograd(_backward, setup_context=_setup_context, unless="score")
