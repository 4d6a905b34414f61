"""Log-probabilities on CPU tensors from hidden states, in pieces of the vocabulary that bound the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import linear_logp as by_logits
from samebits.backends.reference import logp, matmul
from samebits.backends.rows import Rows, Statistics


def statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, *, contract: str
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``."""
    return by_logits.statistics(matmul, logp, hidden, weight, bias, rows, contract=contract)


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
    logits = by_logits.logits_of(matmul, hidden, weight, bias, part, contract)
    out = torch.empty(logits.shape, dtype=dtype)
    logp.grad_logits(out, logits, part.start, rows, grad, grad_entropy)
    return out
