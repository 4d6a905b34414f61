"""Log-probabilities as a trainer computes them: ``log_softmax`` of float32 logits under samebits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samebits.engines.refusals import RefusedError
from samebits.nn import convert
from samebits.ops.linear import linear
from samebits.ops.logp import logp
from samebits.ops.scan import cumsum
from samebits.ops.softmax import log_softmax, softmax

__all__ = [
    "all_logprobs",
    "convert_head",
    "divided",
    "head_dtype",
    "keep_top",
    "of_hidden",
    "processed",
    "without_words",
]

_LOGITS = 1 << 27  # those that exist at a time


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


def without_words(logits: Tensor, words: int | None) -> Tensor:
    """-inf from entry `words` on: an engine does not sample what its tokenizer does not have."""
    if words is None or words >= logits.shape[-1]:
        return logits
    return F.pad(logits[..., :words], (0, logits.shape[-1] - words), value=-torch.inf)


def head_dtype(config: Any) -> torch.dtype | None:
    """The dtype of a model's logits by its configuration, as vLLM reads it. None: that of the model."""
    return torch.float32 if getattr(config, "head_dtype", None) == "float32" else None


def convert_head(model: Any) -> None:
    """Let the head of a ``transformers`` model have logits of :func:`head_dtype`.

    Raises:
        RefusedError: its head is no plain ``torch.nn.Linear``.
    """
    dtype = head_dtype(model.config)
    if dtype is not None:
        for left in convert(model.get_output_embeddings(), out_dtype=dtype).unconverted:
            why = f"the head, a {left.kind}, cannot be converted: {left.reason}"
            raise RefusedError("head_dtype='float32'", why, "unset it in both halves")


def of_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    divisor: float | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    words: int | None = None,
    entropy: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of a head's logits, for a loss under the mode: those of an engine with the same weights.

    ``log_softmax(z, -1)`` with ``z = logits.float() / temperature``. The logits are rounded to `out_dtype`,
    scaled and capped, as by a model's own head. So are their gradients. At most about
    2**27 logits exist at a time: those of more tokens are computed in pieces, and again in the backward.

    Args:
        hidden: ``[tokens, D]``.
        weight: ``[V, D]``, and a bias ``[V]``.
        targets: ``[tokens]``, whose log-probs are asked for.
        temperature: of all tokens.
        divisor, scale, softcap: what a model does to its logits.
        words: of the tokenizer, see :func:`without_words`. All entries of `V` by default.
        entropy: whether to compute it, of all of `V`.
        out_dtype: of the head, as in :func:`samebits.linear`: the dtype of the hidden states by default.

    Returns:
        Float32 tensors of ``[tokens]``: log-probs, and entropies or None.
    """

    def piece(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = linear(hidden, weight, bias, out_dtype=out_dtype)
        if divisor is not None:
            logits = logits / divisor
        elif scale != 1:
            logits = logits * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if temperature != 1:  # a tensor, since PyTorch multiplies by the inverse of a number on a GPU
            logits = logits.float() / torch.full((), temperature, device=logits.device)
        found = logp(without_words(logits, words), targets)
        if not entropy:
            return found, None
        all_ = F.log_softmax(logits, -1, dtype=torch.float32)
        return found, -(all_.exp() * all_).sum(-1)

    rows = max(1, _LOGITS // weight.shape[0])
    parts = [
        checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if entropy else None
