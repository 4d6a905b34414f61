"""Log-probabilities on GPU tensors by Triton from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends import linear_logp as by_logits
from samebits.backends.rows import Rows, Statistics
from samebits.backends.triton import logp, matmul


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
    return by_logits.grad_logits(
        *(matmul, logp, hidden, weight, bias, part, rows, grad, grad_entropy), dtype=dtype, contract=contract
    )
