"""Log-probabilities on CPU tensors from hidden states, in pieces of the vocabulary that limit the memory."""

from __future__ import annotations

from torch import Tensor

from samebits.backends import Later, logits_in_pieces
from samebits.backends.reference import logp, matmul
from samebits.backends.token_logps import GradLogitsInputs, Rows, Statistics


def statistics(
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
    return logits_in_pieces.statistics(matmul, logp, hidden, weight, bias, rows, keep, contract=contract)


def grad_logits_later(out: Tensor, given: GradLogitsInputs, *, contract: str) -> Later:
    """Write dz into the first columns of ``out``, immediately."""
    hidden, weight, bias, part, rows, grad, grad_entropy = given
    logits = logits_in_pieces.logits_of(matmul, hidden, weight, bias, part, contract)
    dz = out[:, : part.stop - part.start]
    logp.grad_logits(dz, logits, part.start, rows, grad, grad_entropy)
    return int
