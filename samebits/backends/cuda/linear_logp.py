"""Log-probabilities on CUDA tensors from hidden states, in pieces of the logits that bound the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.backends.cuda import logp
from samebits.backends.cuda.matmul import matmul
from samebits.backends.rows import Rows, Statistics
from samebits.functions import VOCAB_BLOCK

_LOGITS = 1 << 23  # held at once: 32 MiB


def statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, *, contract: str
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``."""
    out = Statistics.empty(rows)
    step = max(1, _LOGITS // hidden.shape[0] // VOCAB_BLOCK) * VOCAB_BLOCK
    for first in range(0, rows.vocabulary, step):
        logits = _logits(hidden, weight, bias, slice(first, first + step), contract)
        logp.add_statistics(out, logits, first, rows)
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
    tokens, width = hidden.shape[0], part.stop - part.start
    # Rows start at multiples of 16 bytes, for the kernels that multiply them.
    out = hidden.new_empty(tokens, -(-width // 8) * 8, dtype=dtype)[:, :width]
    step = max(1, _LOGITS // width)
    for start in range(0, tokens, step):
        some = slice(start, min(start + step, tokens))
        logp.grad_logits_out(
            *(out[some], _logits(hidden[some], weight, bias, part, contract), part.start),
            *(rows.part(some.start, some.stop), grad[some]),
            None if grad_entropy is None else grad_entropy[some],
        )
    return out


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice, contract: str) -> Tensor:
    b = None if bias is None else bias[part]
    return matmul(hidden, weight[part].mT, bias=b, out_dtype=torch.float32, contract=contract)
