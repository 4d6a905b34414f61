"""Embeddings with gradients that are chains over tokens: ``F.embedding``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from samebits.backends import UnavailableError, is_chosen, on_gpu, pack_key
from samebits.ops._checks import check_device, shape
from samebits.ops._operator import Operator, bypasses_dispatcher
from samebits.ops._rows import backend, check_rows

_INTEGERS = (torch.int64, torch.int32)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """``out[..., :] = weight[ids[...], :]``, as :func:`torch.nn.functional.embedding`.

    The gradient of a row of ``weight`` is one chain over the tokens with that id, in row-major order, with a
    float32 accumulator and one rounding at the end. Tokens with zero gradients change no bit of it. Second
    derivatives are not implemented.

    Args:
        ids: int64 or int32 ``[...]``, each within [0, V). On a GPU other ids end in a device-side assert.
        weight: ``[V, features]``; bfloat16, float16 or float32.
        padding_idx: tokens with this id have no gradient.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not match.
        IndexError: on the CPU, an id is not within [0, V). Or ``padding_idx`` is not within [-V, V).
    """
    bypass = check_rows("embedding", weight)
    _check(weight, ids)
    count = weight.shape[0]
    if padding_idx is not None and not -count <= padding_idx < count:
        raise IndexError(f"samebits.embedding: padding_idx: expected one of {count} rows, got {padding_idx}")
    padding = -1 if padding_idx is None else padding_idx % count
    bypass = bypass and bypasses_dispatcher([ids])
    out: Tensor = _operator(weight, ids, padding, bypass=bypass)
    return out


def _check(weight: Tensor, ids: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"samebits.embedding: ids: expected an int64 or int32 tensor, got {got}")
    check_device("embedding", "ids", ids, "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"samebits.embedding: weight: expected [V, features], got shape {shape(weight)}")


def copied_rows(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """``weight[ids]``, of which autograd records nothing: by a kernel of ours, or else by PyTorch's.

    ``padding_idx`` is for PyTorch's alone: a transform or a trace may take gradients of that.
    """
    ours = (
        weight.is_cuda
        and weight.ndim == 2
        and ids.dtype in _INTEGERS
        and ids.device == weight.device
        and bypasses_dispatcher([weight, ids])
        and not is_chosen()
        and _have_kernels(weight.get_device())
    )
    return _operator(weight, ids, -1, bypass=True) if ours else torch.embedding(weight, ids, padding_idx)


@functools.cache
def _have_kernels(device: int) -> bool:
    try:
        on_gpu("rows", pack_key("", None), device)
    except UnavailableError:
        return False
    return True


def _forward(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    _check(weight, ids)  # whoever calls the registered operator
    return backend(weight).embedding(weight, ids)  # type: ignore[no-any-return]


def _grad(grad: Tensor, ids: Tensor, count: int, padding_idx: int) -> Tensor:
    rows = grad.reshape(ids.numel(), grad.shape[-1])
    flat = ids.reshape(-1).to(torch.int64)
    return backend(grad).embedding_backward(rows, flat, count, padding_idx)  # type: ignore[no-any-return]


def _fake(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


_operator = Operator(
    "embedding(Tensor weight, Tensor ids, int padding_idx) -> Tensor", cpu=_forward, fake=_fake
)


def _fake_grad(grad: Tensor, ids: Tensor, count: int, padding_idx: int) -> Tensor:
    return grad.new_empty((count, grad.shape[-1]))


_gradient = Operator(
    "embedding_backward(Tensor grad, Tensor ids, int count, int padding_idx) -> Tensor",
    cpu=_grad,
    fake=_fake_grad,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_idx = inputs
    ctx.count = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = saved
    return _gradient(grad, ids, ctx.count, ctx.padding_idx), None, None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _keep_ids(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)


def _second(ctx: Any, saved: tuple[Tensor, ...], v: Tensor) -> tuple[Any, ...]:
    (ids,) = saved
    found = _operator(v, ids, ctx.padding_idx)
    if ctx.padding_idx >= 0:
        found = found.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
    return found, None, None, None


_gradient.register_autograd(_second, setup_context=_keep_ids)
