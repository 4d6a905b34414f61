"""Log-probabilities on CPU tensors from given logits: threads run `logp_kernels` on parts of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from samebits.backends import Later, token_logps
from samebits.backends.reference import logp_kernels as kernels
from samebits.backends.reference.matmul import in_threads, require_subnormals, rounded
from samebits.backends.token_logps import Rows, Statistics
from samebits.backends.token_logps import first_unknown as first_unknown
from samebits.functions import VOCAB_BLOCK

_WORTH_A_THREAD = 1 << 15


def add_statistics(to: Statistics, logits: Tensor, first: int, rows: Rows) -> None:
    """Fill in the part of `to` that depends on ``logits[tokens, n]``, the vocabulary's entries from `first`.

    Args:
        logits: float32, bfloat16 or float16.
        first: a multiple of 128. So is n, unless the logits end with the vocabulary.
    """
    require_subnormals()
    wide = logits.to(torch.float32)
    arrays = wide.numpy(), rows.scale, first // VOCAB_BLOCK, to.m.numpy(), to.s.numpy(), to.u.numpy()
    over_rows(wide, lambda *span: kernels.block_statistics(*arrays, rows.with_entropy, *span))
    here = ((rows.target >= first) & (rows.target < first + logits.shape[1])).nonzero()[:, 0]
    to.target_logit[here] = wide[here, rows.target[here] - first] * torch.tensor(
        rows.scale, dtype=torch.float32
    )


def combine(statistics: Statistics, rows: Rows) -> None:
    """Fill in the results of `rows`."""
    m, s, u, target_logit = (t.numpy() for t in statistics)
    target, logp, entropy, shift, log_sum = (
        t.numpy() for t in (rows.target, rows.logp, rows.entropy, rows.shift, rows.log_sum)
    )
    kernels.combine(m, s, u, shift, log_sum, entropy, rows.with_entropy)
    kernels.select(target_logit, shift, log_sum, logp)
    for results in (logp, entropy) if rows.with_entropy else (logp,):
        results[(target < 0) | (target >= rows.vocabulary)] = kernels.NAN
        results[target == rows.ignore_index] = 0


of_ids = partial(token_logps.of_ids, add_statistics, combine)


def grad_logits(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> None:
    """Write dz of logits as in :func:`add_statistics` into `out`, from the gradients of the results."""
    require_subnormals()
    wide = logits.to(torch.float32)
    dz = torch.empty_like(wide)
    scale = torch.tensor(rows.scale, dtype=torch.float32)
    known = (rows.target >= 0) & (rows.target < rows.vocabulary) & (rows.target != rows.ignore_index)
    arrays = (
        *(wide.numpy(), rows.scale, torch.where(known, rows.target - first, -1 << 62).numpy(), known.numpy()),
        *(rows.shift.numpy(), rows.log_sum.numpy(), rows.entropy.numpy()),
        (grad * scale).numpy(),
        np.empty(0, np.float32) if grad_entropy is None else (grad_entropy * scale).numpy(),
        dz.numpy(),
    )
    over_rows(wide, lambda *span: kernels.grad_logits(*arrays, *span))
    out.copy_(rounded(dz, out.dtype))


def grad_logits_later(
    out: Tensor, logits: Tensor, first: int, rows: Rows, grad: Tensor, grad_entropy: Tensor | None
) -> Later:
    """:func:`grad_logits`, immediately."""
    grad_logits(out, logits, first, rows, grad, grad_entropy)
    return int


def over_rows(logits: Tensor, run: Callable[[int, int], None]) -> None:
    rows = logits.shape[0]
    threads = min(torch.get_num_threads(), rows, 1 + logits.numel() // _WORTH_A_THREAD)
    if threads <= 1:
        run(0, rows)
        return
    bounds = np.linspace(0, rows, threads + 1).astype(int).tolist()
    in_threads(run, bounds, threads)
