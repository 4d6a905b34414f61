"""Log-probabilities on CUDA tensors from hidden states, in pieces of the logits that bound the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import linear_logp_sm90, logp
from samebits.backends.cuda.matmul import check_contract, matmul
from samebits.backends.rows import Rows, Statistics, vocabulary_pieces
from samebits.contract import contract_from_key

_LOGITS = 1 << 23  # held at once: 32 MiB


def statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, *, contract: str
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``."""
    if _fused(hidden, weight, bias, contract):
        return linear_logp_sm90.statistics(hidden, weight, bias, rows)
    out = Statistics.empty(rows)
    for some in vocabulary_pieces(slice(0, rows.vocabulary), hidden.shape[0], _LOGITS):
        logits = _logits(hidden, weight, bias, some, contract)
        logp.add_statistics(out, logits, some.start, rows)
        del logits  # before the next ones are allocated
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
    if _fused(hidden, weight, bias, contract):
        return linear_logp_sm90.grad_logits(hidden, weight, bias, part, rows, grad, grad_entropy)
    tokens, width = hidden.shape[0], part.stop - part.start
    # Rows start at multiples of 16 bytes, for the kernels that multiply them.
    out = hidden.new_empty(tokens, -(-width // 8) * 8, dtype=dtype)[:, :width]
    for some in vocabulary_pieces(part, tokens, _LOGITS):
        logits = _logits(hidden, weight, bias, some, contract)
        columns = out[:, some.start - part.start : some.stop - part.start]
        logp.grad_logits_out(columns, logits, some.start, rows, grad, grad_entropy)
        del logits
    return out


def _fused(hidden: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> bool:
    """Whether logits need no memory at all."""
    check_contract(contract, hidden.get_device())
    step = contract_from_key(contract).step
    return step == "mma" and linear_logp_sm90.supports(hidden, weight, bias)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, contract: str) -> Tensor:
    b = None if bias is None else bias[part]
    return matmul(hidden, weight[part].mT, bias=b, out_dtype=torch.float32, contract=contract)
