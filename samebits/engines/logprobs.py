"""Log-probabilities as a trainer computes them: ``log_softmax`` of float32 logits under samebits."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.ops.scan import cumsum
from samebits.ops.softmax import log_softmax, softmax

__all__ = ["all_logprobs", "divided", "keep_top", "processed"]


def all_logprobs(logits: Tensor) -> Tensor:
    """``log_softmax(logits.float(), -1)`` of ``[rows, V]``."""
    return log_softmax(logits.to(torch.float32), -1)


def divided(logits: Tensor, temperature: Tensor) -> Tensor:
    """``logits.float() / temperature[:, None]``, where a temperature of 0 (greedy) counts as 1."""
    temperature = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return logits.to(torch.float32) / temperature.to(torch.float32)[:, None]


def keep_top(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """-inf where an entry of ``logits[rows, V]`` is not among the `k` largest, or not needed for mass `p`.

    The rows are sorted ascending and stably. Of equal entries, those with a smaller index go first.
    """
    if k is None and p is None:
        return logits
    ordered, at = logits.sort(dim=-1, stable=True)
    if k is not None:
        least = ordered.gather(-1, ordered.shape[-1] - k.to(torch.int64)[:, None])
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
    if p is not None:
        hidden = cumsum(softmax(ordered, -1), -1) <= 1 - p.to(torch.float32)[:, None]
        hidden[:, -1] = False
        ordered = ordered.masked_fill(hidden, -torch.inf)
    return logits.scatter(-1, at, ordered)


def processed(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Log-probs of the distribution that an engine samples from, for a trainer to compare.

    ``log_softmax(keep_top(logits.float() / temperature, top_k, top_p))``: what
    ``logprobs_mode="processed_logprobs"`` gives. The temperature and `top_p` are rounded to float32 first.

    Args:
        logits: ``[rows, V]``.
    """
    rows, size = logits.shape
    z = divided(logits, logits.new_full((rows,), temperature, dtype=torch.float32))
    k = None if not top_k or top_k < 0 or top_k >= size else torch.full((rows,), top_k, device=z.device)
    p = None if top_p is None or top_p == 1 else torch.full((rows,), top_p, device=z.device)
    return log_softmax(keep_top(z, k, p), -1)
