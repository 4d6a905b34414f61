"""Which sequences the rows of a flattened batch belong to, as layers of experts flatten one.

``x.view(-1, D)`` loses the sequences of ``x[batch, tokens, D]``, and with them how gradients of weights begin
anew. Linear layers and norms see both forms. So the last batch of three dimensions that one of them saw in
this thread tells how many sequences a product of as many rows has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["added_in_sequences", "forget", "in_sequences", "seeing", "sequences_of"]


class _Seen(threading.local):
    sequences = 1
    tokens = -1  # of all of them


_seen = _Seen()


def forget() -> None:
    _seen.tokens = -1


def sequences_of(rows: int) -> int:
    """How many sequences of one length have these rows."""
    return _seen.sequences if rows == _seen.tokens else 1


def see(x: Any) -> None:
    """Remember `x`, if it is such a batch."""
    if isinstance(x, Tensor) and x.ndim == 3:
        _seen.sequences, tokens = x.shape[0], x.shape[1]
        _seen.tokens = _seen.sequences * tokens


def _are_sequences(x: Any) -> bool:
    """Whether these are rows of a flattened batch, and gradients may be asked for."""
    return (
        isinstance(x, Tensor)
        and x.ndim == 2
        and x.shape[0] == _seen.tokens
        and _seen.sequences > 1
        and torch.is_grad_enabled()
    )


Call = Callable[..., Any]


def seeing(norm: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if args:
        see(args[0])
    return norm(*args, **kwargs)


def in_sequences(linear: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``linear(*args, **kwargs)``. Rows of a flattened batch are sequences where gradients are recorded."""
    if args and _are_sequences(args[0]):
        out = linear(args[0].unflatten(0, (_seen.sequences, -1)), *args[1:], **kwargs)
        return out if out is NotImplemented else out.flatten(0, 1)
    return seeing(linear, args, kwargs)


def added_in_sequences(linear: Call, addmm: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``addmm(*args, **kwargs)``, which is :func:`in_sequences` of `linear` if the bias is a vector."""
    if len(args) == 3 and not kwargs and _are_sequences(args[1]):
        bias, x, weight = args
        if isinstance(bias, Tensor) and bias.ndim == 1 and isinstance(weight, Tensor) and weight.ndim == 2:
            out = in_sequences(linear, (x, weight.mT, bias), {})
            if out is not NotImplemented:
                return out
    return addmm(*args, **kwargs)
