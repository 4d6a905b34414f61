"""Which sequences the rows of a flattened batch belong to, as layers of experts flatten one.

``x.view(-1, D)`` loses the sequences of ``x[batch, tokens, D]``, and with them how gradients of weights begin
anew. Linear layers see both forms. So the last batch of three dimensions that one of them saw in this thread
tells how many sequences a product of as many rows has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["forget", "in_sequences", "sequences_of"]


class _Seen(threading.local):
    sequences = 1
    tokens = -1  # of all of them


_seen = _Seen()


def forget() -> None:
    _seen.tokens = -1


def sequences_of(rows: int) -> int:
    """How many sequences of one length have these rows."""
    return _seen.sequences if rows == _seen.tokens else 1


def in_sequences(linear: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``linear(*args, **kwargs)``. Rows of a flattened batch are sequences where gradients are recorded."""
    x = args[0] if args else None
    if isinstance(x, Tensor):
        ndim = x.ndim
        if ndim == 3:
            _seen.sequences, tokens = x.shape[0], x.shape[1]
            _seen.tokens = _seen.sequences * tokens
        elif ndim == 2 and x.shape[0] == _seen.tokens and _seen.sequences > 1 and torch.is_grad_enabled():
            out = linear(x.unflatten(0, (_seen.sequences, -1)), *args[1:], **kwargs)
            return out if out is NotImplemented else out.flatten(0, 1)
    return linear(*args, **kwargs)
