"""Log-probabilities on CUDA tensors from hidden states, and the choice of kernels."""

from __future__ import annotations

import functools

from torch import Tensor

from samebits.backends import Later, logits_in_pieces
from samebits.backends.cuda import linear_logp_sm90, logp, matmul
from samebits.backends.token_logps import GradLogitsInputs, Rows, Statistics
from samebits.contract import contract_from_key


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
    if _supports_fused(hidden, weight, bias, contract):
        return linear_logp_sm90.statistics(hidden, weight, bias, rows, keep)
    return logits_in_pieces.statistics(matmul, logp, hidden, weight, bias, rows, keep, contract=contract)


def grad_logits_later(out: Tensor, given: GradLogitsInputs, *, contract: str) -> Later:
    """Write dz of a part of the vocabulary into ``out``, of the shape of ``logits_in_pieces.empty_grads``."""
    if _supports_fused(given.hidden, given.weight, given.bias, contract):
        return linear_logp_sm90.grad_logits_later(out, given)
    return logits_in_pieces.grad_logits_later(matmul, logp, out, given, contract=contract)


def _supports_fused(hidden: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> bool:
    """Whether the fused kernels, which need no logits in memory, take these operands."""
    return _by_tensor_cores(contract, hidden.get_device()) and linear_logp_sm90.supports(hidden, weight, bias)


@functools.cache
def _by_tensor_cores(contract: str, device: int) -> bool:
    matmul.check_contract(contract, device)
    return contract_from_key(contract).step == "mma"
