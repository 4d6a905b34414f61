"""Log-probabilities on GPU tensors by Triton from hidden states: which kernels compute them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.backends import Step
from samebits.backends import linear_logp as by_logits
from samebits.backends.rows import Rows, Statistics
from samebits.backends.triton import logp, logp_kernels, matmul
from samebits.backends.triton.matmul import TileSchedule
from samebits.contract import contract_from_key

STATISTICS_SCHEDULES = (
    TileSchedule(128, 256, 64, 8, 4, us=38, persistent=True),
    TileSchedule(128, 128, 64, 8, 3, us=23),
    TileSchedule(64, 128, 128, 4, 4, us=18, persistent=True),
    TileSchedule(32, 128, 64, 4, 5, us=13, swap=True),
    TileSchedule(16, 128, 128, 4, 3, us=11, swap=True),
)
"""Tiles of whole blocks of the vocabulary. Two programs of a small one fit on a multiprocessor, so that the
epilogue of one runs beside the products of the other."""


def schedules(entry: str, device: torch.device) -> Sequence[TileSchedule | None]:
    """All that ``statistics`` or ``grad_logits`` may have on `device`: only None where it is not fused."""
    offered, size = (STATISTICS_SCHEDULES, 0) if entry == "statistics" else (matmul.TILE_SCHEDULES, 2)
    return [s for s in offered if matmul.fits(s, size, False, device)] or [None]


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    *,
    contract: str,
    schedule: TileSchedule | None = None,
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``.

    `schedule` replaces the default choice among STATISTICS_SCHEDULES where the kernels are fused.
    """
    if not fused(hidden, weight, bias, contract):
        return by_logits.statistics(matmul, logp, hidden, weight, bias, rows, contract=contract)
    (tokens, features), vocabulary = hidden.shape, weight.shape[0]
    out = Statistics.empty(rows)
    s = schedule or matmul.choose_tiles(
        tokens, vocabulary, 0, False, hidden.device, offered=STATISTICS_SCHEDULES
    )
    with torch.cuda.device_of(hidden):
        logp_kernels.statistics_tiles[matmul.programs(s, tokens, vocabulary, hidden.device)](
            *(
                matmul.descriptor(hidden, s.block_m, s.block_k),
                matmul.descriptor(weight, s.block_n, s.block_k),
            ),
            *(bias, rows.target, out.m, out.s, out.u if rows.with_entropy else None, out.target_logit),
            *(tokens, vocabulary, features, out.m.shape[1], rows.scale),
            **matmul.tile_constants(s, 0, False, hidden.device),
        )
    return out


def grad_logits_later(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    rows: Rows,
    grad: Tensor,
    grad_entropy: Tensor | None,
    *,
    contract: str,
    schedule: TileSchedule | None = None,
) -> Step:
    """dz of a part of the vocabulary into ``out``, of the shape of ``by_logits.empty_grads``.

    `schedule`, of matmul.TILE_SCHEDULES, as above.
    """
    given = out, hidden, weight, bias, part, rows, grad, grad_entropy
    if not fused(hidden, weight, bias, contract):
        return by_logits.grad_logits_later(matmul, logp, *given, contract=contract)
    return partial(_grad_logits_tiles, *given, schedule)


def _grad_logits_tiles(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    rows: Rows,
    grad: Tensor,
    grad_entropy: Tensor | None,
    schedule: TileSchedule | None,
) -> None:
    weight, bias = weight[part], None if bias is None else bias[part]
    (tokens, features), width, dtype = hidden.shape, weight.shape[0], out.dtype
    s = schedule or matmul.choose_tiles(tokens, width, dtype.itemsize, False, hidden.device)
    with torch.cuda.device_of(hidden):
        logp_kernels.grad_logits_tiles[matmul.programs(s, tokens, width, hidden.device)](
            *(
                matmul.descriptor(hidden, s.block_m, s.block_k),
                matmul.descriptor(weight, s.block_n, s.block_k),
            ),
            *(bias, rows.target, rows.shift, rows.log_sum, rows.entropy, grad, grad_entropy),
            matmul.descriptor(out, s.block_m, s.block_n // s.parts),
            *(part.start, rows.vocabulary, rows.ignore_index, tokens, width, features, rows.scale),
            PARTS=s.parts,
            **matmul.tile_constants(s, dtype.itemsize, False, hidden.device),
        )


def fused(hidden: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> bool:
    """Whether logits need no memory at all."""
    found = contract_from_key(contract)
    matmul.check(found, hidden.device)
    return (
        found.step == "mma"
        and hidden.numel() > 0
        and max(*hidden.shape, *weight.shape) <= matmul.LARGEST
        and matmul.fetches_rows(hidden)
        and matmul.fetches_rows(weight)
        and (bias is None or bias.is_contiguous())
    )
