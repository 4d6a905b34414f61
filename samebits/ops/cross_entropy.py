"""``F.cross_entropy`` of a matrix of logits under the mode, as one operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.backends import Key, chosen_backend, on_gpu, unpack_key
from samebits.ops import logp
from samebits.ops._checks import check_operands
from samebits.ops._operator import Operator, refuse_second_derivatives, refuse_third_derivatives
from samebits.ops._rows import backend, rounded
from samebits.ops.reduce import sum
from samebits.ops.softmax import jacobian_product, softmax

_NONE, _MEAN = 0, 1  # reductions, as PyTorch numbers them; 2 is a sum


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: str, *, wide: bool = False
) -> Tensor:
    """The losses of ``logits[rows, V]`` at int64 ``target[rows]``, and what `reduction` says of them.

    A loss is the negated log-softmax at the target, of 16-bit logits as rounded to their dtype. In float32
    it is that of :func:`samebits.logp`, and the log-softmax is not stored. Losses are summed as a row. Their
    mean divides by the number of targets that are not ignored. On a GPU a target out of range ends in a
    device-side assert, as in PyTorch.

    Args:
        logits: bfloat16, float16 or float32.
        target: the rows' targets.
        ignore_index: rows with this target have no loss.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        wide: have the bits of ``cross_entropy(logits.float(), ...)``, a loss in float32 and its gradients,
            without storing logits, or gradients of them, in float32.

    Raises:
        TypeError, ValueError: as :func:`samebits.logp`.
        IndexError: on a CPU, a target is out of range.
    """
    (logits,), key, _ = check_operands("cross_entropy", None, {"logits": logits}, autocast=False)
    wide = wide or logits.dtype == torch.float32
    if reduction != "none" or not wide:
        chosen_backend(logits.device.type, "log_softmax")  # or a sum of rows
    target = logp.check_target("cross_entropy", target, "logits", logits, ignore_index)
    if not target.is_cuda:
        logp.watch_target("cross_entropy", target, logits.shape[1], ignore_index, key)
    number = ("none", "mean", "sum").index(reduction)
    out: Tensor = _operator(logits, target, ignore_index, number, wide, key)[0]
    return out


def _forward(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: int, wide: bool, key: Key
) -> tuple[Tensor, ...]:
    """The result, what the gradient needs (the log-softmax, or R and log S), and the count of a mean."""
    kernels, target = _kernels(logits, key), target.contiguous()
    kept: tuple[Tensor, Tensor]
    if wide:
        logs, *kept = logp.forward(logits, target, ignore_index, key)  # type: ignore[assignment]
    else:
        logs = backend(logits).softmax(logits, True, logits.dtype)
        kept = logs, logs.new_empty(0)
    if kernels is not None:
        losses = kernels.pick(logs, target, logits.shape[1], ignore_index)
    elif logs.ndim == 2:
        losses = F.nll_loss(logs, target, None, None, ignore_index, None, "none")
    else:
        ignored = target == ignore_index
        if target.is_cuda:
            known = ignored | ((target >= 0) & (target < logits.shape[1]))
            torch._assert_async(known.all(), "samebits: cross_entropy: a target is out of range")
        losses = logs.neg().masked_fill(ignored, 0.0)
    if reduction == _NONE:
        return losses, *kept, target.new_empty(0)
    total = backend(losses).row_sum(losses[None], False, losses.dtype)
    if reduction != _MEAN:
        return total.reshape(()), *kept, target.new_empty(0)
    if kernels is not None:
        mean, count = kernels.mean(total, target, ignore_index)
    else:
        count = (target != ignore_index).sum()
        mean = rounded(total.reshape(()) / count, total.dtype)
    return mean, *kept, count


def _kernels(t: Tensor, key: Key) -> Any:
    """The kernels for what PyTorch's operators do otherwise. An explicit choice may not have them."""
    return on_gpu("losses", "", t.get_device())[0] if t.is_cuda and not unpack_key(key)[1] else None


def _grad(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    shift: Tensor,
    log_sum: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: int,
    wide: bool,
    key: Key,
) -> Tensor:
    """`x` is the logits if `wide`, else their log-softmax."""
    kernels, target = _kernels(x, key), target.contiguous()
    mean = reduction == _MEAN
    if kernels is not None:
        g = kernels.spread(grad, count if mean else None, target, x.shape[1], ignore_index, not wide)
    else:
        g, ignored = (grad / count if mean else grad).expand(target.shape), target == ignore_index
        if wide:
            g = -g.masked_fill(ignored, 0.0)
        else:
            at = target.masked_fill(ignored, 0)[:, None]
            g = (-g).masked_fill(ignored, 0.0).to(x.dtype)  # autocast on a CPU has float32 losses
            g = torch.zeros_like(x).scatter_(1, at, g[:, None])
    if wide:
        return logp.grad_logits(g, x, target, shift, log_sum, ignore_index, key)
    return backend(x).softmax_backward(g, x, True, x.dtype)  # type: ignore[no-any-return]


def _fake(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: int, wide: bool, key: Key
) -> tuple[Tensor, ...]:
    dtype = torch.float32 if wide else logits.dtype
    out = logits.new_empty(target.shape if reduction == _NONE else (), dtype=dtype)
    count = target.new_empty(() if reduction == _MEAN else 0)
    if not wide:
        return out, logits.new_empty(logits.shape), logits.new_empty(0), count
    return out, *(logits.new_empty(target.shape, dtype=dtype) for _ in range(2)), count


_operator = Operator(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, int reduction, bool wide, str contract)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_forward,
    fake=_fake,
)
_gradient = Operator(
    "cross_entropy_backward(Tensor grad, Tensor x, Tensor target, Tensor shift, Tensor log_sum, Tensor count,"
    " int ignore_index, int reduction, bool wide, str contract) -> Tensor",
    cpu=_grad,
    fake=lambda grad, x, *_: x.new_empty(x.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *ctx.options = inputs
    _, first, second, count = output
    wide = ctx.options[2]
    ctx.save_for_backward(logits if wide else first, target, first if wide else second, second, count)
    ctx.mark_non_differentiable(first, second, count)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    if saved[0].dtype != torch.float32:
        refuse_second_derivatives("cross_entropy of 16-bit logits")
    return _gradient(grad, *saved, *ctx.options), *(None,) * 5


_operator.register_autograd(_backward, setup_context=_setup_context)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, x, target, _, _, count, ctx.ignore_index, ctx.reduction, *_ = inputs
    ctx.save_for_backward(grad, x, target, count)


def _second(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Tensor | None, ...]:
    """Of ``u * (p - onehot)`` in rows that are not ignored, with u the gradient of a row's loss."""
    refuse_third_derivatives("cross_entropy")
    grad, x, target, count = saved
    ignored, p = target == ctx.ignore_index, softmax(x)
    at = target.masked_fill(ignored, 0)[:, None]
    of_u = (sum(p * v, -1) - v.gather(1, at)[:, 0]).masked_fill(ignored, 0.0)
    u = (grad / count if ctx.reduction == _MEAN else grad).expand(target.shape).masked_fill(ignored, 0.0)
    of_x = jacobian_product(p, u[:, None] * v)
    of_grad = of_u if ctx.reduction == _NONE else sum(of_u)
    return (of_grad / count if ctx.reduction == _MEAN else of_grad), of_x, *(None for _ in range(8))


_gradient.register_autograd(_second, setup_context=_keep_gradient)
