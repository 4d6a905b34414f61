"""Log-probabilities on CPU tensors from hidden states, in pieces of the vocabulary that bound the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.reference import logp
from samebits.backends.reference.matmul import matmul
from samebits.backends.rows import Rows, Statistics, vocabulary_pieces

_LOGITS = 1 << 22  # held at once


def statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, *, contract: str
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``."""
    out = Statistics.empty(rows)
    for some in vocabulary_pieces(slice(0, rows.vocabulary), hidden.shape[0], _LOGITS):
        logits = _logits(hidden, weight, bias, some, contract)
        logp.add_statistics(out, logits, some.start, rows)
    return out


def grad_logits(
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
    logits = _logits(hidden, weight, bias, part, contract)
    return logp.grad_logits(logits, part.start, rows, grad, grad_entropy, dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, contract: str) -> Tensor:
    b = None if bias is None else bias[part]
    return matmul(hidden, weight[part].mT, bias=b, out_dtype=torch.float32, contract=contract)
