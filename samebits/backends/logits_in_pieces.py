"""Log-probabilities from hidden states, with logits stored in pieces that limit the memory.

`products` and `logp` are a backend's modules for products and for log-probabilities of given logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.backends import Later
from samebits.backends.token_logps import GradLogitsInputs, Rows, Statistics, vocabulary_pieces

_LOGITS = 1 << 23  # logits in a piece: 32 MiB


def statistics(
    products: Any,
    logp: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    keep: Tensor | None = None,
    *,
    contract: str,
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``.

    The vocabulary's first logits go into `keep`, with as many columns: ``token_logps.room_for_logits``.
    """
    out, kept = Statistics.empty(rows), 0
    if keep is not None:
        kept = keep.shape[1]
        b = None if bias is None else bias[:kept]
        products.matmul_later(keep, hidden, weight[:kept].mT, bias=b, contract=contract)()
        logp.add_statistics(out, keep, 0, rows)
    for some in vocabulary_pieces(slice(kept, rows.vocabulary), hidden.shape[0], _LOGITS):
        logits = logits_of(products, hidden, weight, bias, some, contract)
        logp.add_statistics(out, logits, some.start, rows)
        del logits  # before the next ones are allocated
    return out


def grad_logits_later(
    products: Any, logp: Any, out: Tensor, given: GradLogitsInputs, *, contract: str
) -> Later:
    """Write dz of a part of the vocabulary into ``out``, which has the shape of :func:`empty_grads`."""
    hidden, weight, bias, part, rows, *grads = given
    tokens, steps = hidden.shape[0], []
    pieces = [*vocabulary_pieces(part, tokens, _LOGITS)]
    room = hidden.new_empty(tokens * max(p.stop - p.start for p in pieces), dtype=torch.float32)
    for some in pieces:
        width = some.stop - some.start
        logits = room[: tokens * width].view(tokens, width)
        b = None if bias is None else bias[some]
        steps.append(products.matmul_later(logits, hidden, weight[some].mT, bias=b, contract=contract))
        columns = out[:, some.start - part.start : some.stop - part.start]
        steps.append(partial(logp.grad_logits, columns, logits, some.start, rows, *grads))
    return lambda: [step() for step in steps]


def grad_logits(later: Callable[..., Later], *inputs: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    """Run a backend's ``grad_logits_later`` on :class:`GradLogitsInputs` immediately."""
    given = GradLogitsInputs(*inputs)
    width = given.part.stop - given.part.start
    (out,) = empty_grads(given.hidden.shape[0], [width], dtype, given.hidden.device)
    later(out, given, **options)()
    return out[:, :width]


def empty_grads(tokens: int, widths: Iterable[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Memory for dz of parts of the vocabulary, with these `widths`. All parts use the same memory in turn.

    Rows start at multiples of 16 bytes, as the product kernels need.
    """
    padded = [-(-width // 8) * 8 for width in widths]
    room = torch.empty(tokens * max(padded), dtype=dtype, device=device)
    return [room[: tokens * width].view(tokens, width) for width in padded]


def logits_of(
    products: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, contract: str
) -> Tensor:
    """The logits of a part of the vocabulary, in float32."""
    b = None if bias is None else bias[part]
    z: Tensor = products.matmul(hidden, weight[part].mT, bias=b, out_dtype=torch.float32, contract=contract)
    return z
