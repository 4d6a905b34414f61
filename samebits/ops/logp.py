"""``samebits.logp`` and ``gather_logp``: the log-softmax of given logits at selected targets, or ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits.backends import Key, module_for
from samebits.backends.replay import refuse
from samebits.backends.token_logps import Rows, Statistics
from samebits.ops._checks import check_device, check_operands, shape
from samebits.ops._fused import refuse_gradients
from samebits.ops._memory import capturing, has_memory
from samebits.ops._operator import Operator, refuse_second_derivatives, reshaped


def logp(logits: Tensor, target: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The log-probability of a target under each row of logits, ``log_softmax(logits, -1)[target]``.

    ``out[...] = (z[t] - R) - log(sum over v of exp(z[v] - R))``, with ``z = logits[...]`` and ``R = max z``

    The sum runs over fixed blocks of 128 entries in a fixed order, with this library's exp and log (see
    ``docs/contract.md``, "Log-probabilities"). So a row's result depends only on that row, and has the same
    bits on every device.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32, any strides. They are widened to float32.
        target: int64 or int32 ``[...]``, on the same device.
        ignore_index: rows with this target give 0 and have no gradient.

    Returns:
        float32 ``[...]``. A row that contains NaN or +inf, or only -inf, gives NaN.

    The gradient has the dtype of ``logits``, with one rounding.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match, or V is 0.
        IndexError: a target is neither ``ignore_index`` nor within [0, V). On a GPU the call waits for the
            check of the targets, but not for the results. Where it cannot wait (in CUDA-graph capture, under
            ``torch.compile`` and ``torch.func``), such a row gives NaN and a gradient of zero.
    """
    (logits,), key, _ = check_operands("logp", None, {"logits": logits}, autocast=False)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"samebits.logp: logits: expected [..., V] with V > 0, got shape {shape(logits)}")
    target = check_target("logp", target, "logits", logits, ignore_index)
    refuse_unknown = watch_target("logp", target, logits.shape[-1], ignore_index, key)
    rows = logits.reshape(-1, logits.shape[-1])
    out: Tensor = _operator(rows, target.reshape(-1), ignore_index, key)[0]
    refuse_unknown()
    return reshaped(out, target.shape)


def gather_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of several ids of each row: ``log_softmax(logits.float(), -1).gather(-1, ids)``.

    ``out[..., i] = (z[ids[..., i]] - R) - log(sum over v of exp(z[v] - R))``, with ``z = logits[...]`` and
    ``R = max z``: the bits of these functions under :class:`samebits.batch_invariant`, and of
    :func:`samebits.logp` of each id (see ``docs/contract.md``, "Log-probabilities"). A row's results depend
    on that row alone. The log-softmax is not stored. Nothing waits for the GPU, so that an engine can call it
    in a CUDA graph.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32, any strides. They are widened to float32.
        ids: int64 or int32 ``[..., n]``, on the same device. One that is not within [0, V) gives NaN.

    Returns:
        float32 ``[..., n]``. A row that contains NaN or +inf, or only -inf, gives NaN.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match, or V is 0.
        NotImplementedError: a gradient is asked for. :func:`samebits.logp` has one.
    """
    _, key, bypass = check_operands("gather_logp", None, {"logits": logits}, autocast=False)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"samebits.gather_logp: logits: expected [..., V] with V > 0, got shape {shape(logits)}"
        )
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"samebits.gather_logp: ids: expected int64 or int32, got {got}")
    if ids.ndim != logits.ndim or ids.shape[:-1] != logits.shape[:-1]:
        wanted = f"({', '.join(map(str, logits.shape[:-1]))}, n)"
        raise ValueError(
            f"samebits.gather_logp: ids: expected shape {wanted} for logits {shape(logits)}, got {shape(ids)}"
        )
    check_device("gather_logp", "ids", ids, "logits", logits)
    refuse_gradients("gather_logp", logits=logits)
    rows = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
    of_rows = ids if ids.ndim == 2 else ids.reshape(len(rows), ids.shape[-1])
    out: Tensor = _of_ids(rows, of_rows, key, bypass=bypass)
    return reshaped(out, ids.shape)


def check_target(op: str, target: Tensor, name: str, like: Tensor, ignore_index: int) -> Tensor:
    """The targets as int64. Refuses those that are not integers, one for each row of `like`."""
    if not isinstance(target, Tensor):
        raise TypeError(f"samebits.{op}: target: expected a Tensor, got {type(target).__name__}")
    if target.layout is not torch.strided or target.is_nested:
        raise TypeError(f"samebits.{op}: target: expected a dense tensor, got layout {target.layout}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"samebits.{op}: target: expected int64 or int32, got {target.dtype}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"samebits.{op}: ignore_index: expected an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"samebits.{op}: ignore_index: expected an int of 64 bits, got {ignore_index}")
    check_device(op, "target", target, name, like)
    if target.shape != like.shape[:-1]:
        raise ValueError(
            f"samebits.{op}: target: expected shape {tuple(like.shape[:-1])} for {name} {shape(like)},"
            f" got {shape(target)}"
        )
    return target.to(torch.int64)


def watch_target(op: str, target: Tensor, vocabulary: int, ignore_index: int, key: Key) -> Callable[[], None]:
    """Check that targets are in range. On a GPU the returned function raises, on a CPU this one does.

    So the operation is launched before the CPU waits, and the CPU waits only for the check of the targets.
    Kernels give NaN for a target out of range.
    """
    if not has_memory(target) or capturing(target):
        return lambda: None
    count = target.numel()
    if count == 0:
        return lambda: None
    first_unknown = _backend(target, key).first_unknown(target, vocabulary, ignore_index)

    def refuse() -> None:
        first = first_unknown()
        if first < count:
            at = tuple(int(i) for i in np.unravel_index(first, target.shape))
            where = at[0] if len(at) == 1 else at
            raise IndexError(
                f"samebits.{op}: target: expected {ignore_index} (ignore_index) or a value in"
                f" [0, {vocabulary}), got {target[at].item()} at position {where}"
            )

    if not target.is_cuda:
        refuse()
    return refuse


def _backend(t: Tensor, key: Key) -> Any:
    """The module that computes log-probabilities on the device of `t`, of the backend in `key`."""
    return module_for("logp", t, key)[0]


# Logits in one piece. They limit the memory for widened logits on a CPU, and for statistics on a GPU.
_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}


def pieces(tokens: int, vocabulary: int, logits: int) -> list[tuple[int, int]]:
    """Pieces ``(start, stop)`` of the tokens, alike in size, with at most about `logits` logits each.

    Pieces of 128 tokens or more are whole tiles of 128 rows.
    """
    step = -(-tokens // max(1, -(-tokens * vocabulary // logits)))
    step = max(1, step if step < 128 else -(-step // 128) * 128)
    if step < tokens:
        refuse("pieces use the same memory, one after the other")
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def row_statistics(logits: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """R and log S, as ``docs/contract.md`` defines them, of every row of ``logits[rows, V]``."""
    ignored = torch.full(logits.shape[:1], -1, dtype=torch.int64, device=logits.device)
    return forward(logits, ignored, -1, key)[1:]


def _pieces(logits: Tensor) -> list[tuple[int, int]]:
    return pieces(logits.shape[0], logits.shape[1], _LOGITS[logits.device.type])


def forward(logits: Tensor, target: Tensor, ignore_index: int, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, R and log S of ``logits[rows, V]``. NaN at a target out of range."""
    backend = _backend(logits, key)
    rows = Rows.empty(target.contiguous(), logits.shape[1], ignore_index)
    for start, stop in _pieces(logits):
        part = rows.part(start, stop)
        statistics = Statistics.empty(part)
        backend.add_statistics(statistics, logits[start:stop], 0, part)
        backend.combine(statistics, part)
    return rows.logp, rows.shift, rows.log_sum


def grad_logits(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    shift: Tensor,
    log_sum: Tensor,
    ignore_index: int,
    key: Key,
) -> Tensor:
    none = shift.new_empty(0)
    rows = Rows(target.contiguous(), logits.shape[1], ignore_index, 1.0, none, none, shift, log_sum)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel() == 0:
        return out
    backend, grad = _backend(logits, key), grad.contiguous()
    for start, stop in _pieces(logits):
        some = slice(start, stop)
        backend.grad_logits(out[some], logits[some], 0, rows.part(start, stop), grad[some], None)
    return out


def _fake(logits: Tensor, target: Tensor, ignore_index: int, key: Key) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(target.shape, dtype=torch.float32) for _ in range(3))


_operator = Operator(
    "logp(Tensor logits, Tensor target, int ignore_index, str contract) -> (Tensor, Tensor, Tensor)",
    cpu=forward,
    fake=_fake,
)


_gradient = Operator(
    "logp_backward(Tensor grad, Tensor logits, Tensor target, Tensor shift, Tensor log_sum, int ignore_index,"
    " str contract) -> Tensor",
    cpu=grad_logits,
    fake=lambda grad, logits, *_: logits.new_empty(logits.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignore_index, ctx.key = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("logp")
    if grad is None:
        return None, None, None, None
    logits, target, shift, log_sum = saved
    out = _gradient(grad, logits, target, shift, log_sum, ctx.ignore_index, ctx.key)
    return out, None, None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_of_ids(logits: Tensor, ids: Tensor, key: Key) -> Tensor:
    if ids.numel() == 0:
        return torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    of_ids = _backend(logits, key).of_ids
    parts = [of_ids(logits[start:stop], ids[start:stop]) for start, stop in _pieces(logits)]
    found: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found


_of_ids = Operator(
    "gather_logp(Tensor logits, Tensor ids, str contract) -> Tensor",
    cpu=_run_of_ids,
    fake=lambda logits, ids, _: logits.new_empty(ids.shape, dtype=torch.float32),
)
