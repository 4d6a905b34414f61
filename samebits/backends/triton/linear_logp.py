"""Log-probabilities on GPU tensors by Triton from hidden states, and the choice of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.backends import Later, logits_in_pieces
from samebits.backends.product import LARGEST
from samebits.backends.token_logps import GradLogitsInputs, Rows, Statistics
from samebits.backends.triton import logp, logp_kernels, matmul, runtime, tiles
from samebits.backends.triton.products import TILE_SCHEDULES
from samebits.backends.triton.tiles import TileSchedule
from samebits.contract import contract_from_key

STATISTICS_SCHEDULES = (
    TileSchedule(128, 256, 64, 8, 4, us=38, persistent=True),
    TileSchedule(128, 128, 64, 8, 3, us=23),
    TileSchedule(64, 128, 128, 4, 4, us=18, persistent=True),
    TileSchedule(32, 128, 64, 4, 5, us=13, swap=True),
    TileSchedule(16, 128, 128, 4, 3, us=11, swap=True),
)
"""Tiles of whole blocks of the vocabulary. Two programs with a small tile fit on a multiprocessor. Then the
epilogue of one runs during the products of the other."""


_LOGIT = 4  # bytes of a logit that is kept: it goes through shared memory


def schedules(entry: str, device: int) -> Sequence[TileSchedule | None]:
    """The schedules of ``statistics`` or ``grad_logits`` on GPU `device`: only None without fused kernels."""
    offered, size = (STATISTICS_SCHEDULES, _LOGIT) if entry == "statistics" else (TILE_SCHEDULES, 2)
    gpu = runtime.gpu(device)
    return [s for s in offered if tiles.fits(s, size, False, gpu)] or [None]


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    keep: Tensor | None = None,
    *,
    contract: str,
    schedule: TileSchedule | None = None,
) -> Statistics:
    """Statistics of the logits of ``hidden[tokens, D]``, ``weight[V, D]`` and ``bias[V]``.

    The vocabulary's first logits go into `keep`, with as many columns: ``token_logps.room_for_logits``.
    `schedule`, one of STATISTICS_SCHEDULES, replaces the default choice of the fused kernel.
    """
    if not supports_fused(hidden, weight, bias, contract):
        return logits_in_pieces.statistics(matmul, logp, hidden, weight, bias, rows, keep, contract=contract)
    (tokens, features), vocabulary = hidden.shape, weight.shape[0]
    out = Statistics.empty(rows)
    gpu = runtime.gpu(hidden.get_device())
    s = schedule or tiles.choose_tiles(tokens, vocabulary, _LOGIT, False, gpu, STATISTICS_SCHEDULES)
    with torch.cuda.device_of(hidden):
        logp_kernels.statistics_tiles[tiles.programs(s, tokens, vocabulary, gpu)](
            *(
                tiles.descriptor(hidden, s.block_m, s.block_k),
                tiles.descriptor(weight, s.block_n, s.block_k),
            ),
            *(bias, rows.target, out.m, out.s, out.u if rows.with_entropy else None, out.target_logit, keep),
            *(0, 0) if keep is None else (keep.stride(0), keep.shape[1]),
            *(tokens, vocabulary, features, out.m.shape[1], rows.scale),
            **tiles.tile_constants(s, 0 if keep is None else _LOGIT, False, gpu),
        )
    return out


def grad_logits_later(
    out: Tensor, given: GradLogitsInputs, *, contract: str, schedule: TileSchedule | None = None
) -> Later:
    """Write dz of a part of the vocabulary into ``out``, of the shape of ``logits_in_pieces.empty_grads``.

    `schedule`, one of TILE_SCHEDULES, replaces the default choice of the fused kernel.
    """
    if not supports_fused(given.hidden, given.weight, given.bias, contract):
        return logits_in_pieces.grad_logits_later(matmul, logp, out, given, contract=contract)
    return partial(_grad_logits_tiles, out, given, schedule)


def _grad_logits_tiles(out: Tensor, given: GradLogitsInputs, schedule: TileSchedule | None) -> None:
    hidden, weight, bias, part, rows, grad, grad_entropy = given
    weight, bias = weight[part], None if bias is None else bias[part]
    (tokens, features), width, dtype = hidden.shape, weight.shape[0], out.dtype
    gpu = runtime.gpu(hidden.get_device())
    s = schedule or tiles.choose_tiles(tokens, width, dtype.itemsize, False, gpu, TILE_SCHEDULES)
    with torch.cuda.device_of(hidden):
        logp_kernels.grad_logits_tiles[tiles.programs(s, tokens, width, gpu)](
            *(
                tiles.descriptor(hidden, s.block_m, s.block_k),
                tiles.descriptor(weight, s.block_n, s.block_k),
            ),
            *(bias, rows.target, rows.shift, rows.log_sum, rows.entropy, grad, grad_entropy),
            tiles.descriptor(out, s.block_m, s.block_n // s.parts),
            *(part.start, rows.vocabulary, rows.ignore_index, tokens, width, features, rows.scale),
            PARTS=s.parts,
            **tiles.tile_constants(s, dtype.itemsize, False, gpu),
        )


def supports_fused(hidden: Tensor, weight: Tensor, bias: Tensor | None, contract: str) -> bool:
    """Whether the fused kernels, which need no logits in memory, take these operands."""
    device = hidden.get_device()
    matmul.check_contract(contract, device)
    gpu = runtime.gpu(device)
    return (
        contract_from_key(contract).step == "mma"
        and hidden.numel() > 0
        and max(*hidden.shape, *weight.shape) <= LARGEST
        and tiles.fetches_rows(hidden, gpu)
        and tiles.fetches_rows(weight, gpu)
        and (bias is None or bias.is_contiguous())
    )
