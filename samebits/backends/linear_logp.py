"""Log-probabilities from hidden states by way of their logits, in pieces that bound the memory.

`products` and `logp` are a backend's modules for products and for log-probabilities of given logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samebits.backends.rows import Rows, Statistics, vocabulary_pieces

_LOGITS = 1 << 23  # held at once: 32 MiB


def statistics(
    products: Any,
    logp: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    *,
    contract: str,
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``."""
    out = Statistics.empty(rows)
    for some in vocabulary_pieces(slice(0, rows.vocabulary), hidden.shape[0], _LOGITS):
        logits = logits_of(products, hidden, weight, bias, some, contract)
        logp.add_statistics(out, logits, some.start, rows)
        del logits  # before the next ones are allocated
    return out


def grad_logits(
    products: Any,
    logp: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    rows: Rows,
    grad: Tensor,
    grad_entropy: Tensor | None,
    *,
    dtype: torch.dtype,
    contract: str,
) -> Tensor:
    """dz in `dtype` for a part of the vocabulary."""
    width = part.stop - part.start
    out = empty_grads(hidden.shape[0], width, dtype, hidden.device)
    for some in vocabulary_pieces(part, hidden.shape[0], _LOGITS):
        logits = logits_of(products, hidden, weight, bias, some, contract)
        columns = out[:, some.start - part.start : some.stop - part.start]
        logp.grad_logits(columns, logits, some.start, rows, grad, grad_entropy)
        del logits
    return out[:, :width]


def empty_grads(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for dz, whose rows start at multiples of 16 bytes, for the kernels that multiply them."""
    return torch.empty(tokens, -(-width // 8) * 8, dtype=dtype, device=device)


def logits_of(
    products: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, contract: str
) -> Tensor:
    """Those of a part of the vocabulary, in float32."""
    b = None if bias is None else bias[part]
    z: Tensor = products.matmul(hidden, weight[part].mT, bias=b, out_dtype=torch.float32, contract=contract)
    return z
