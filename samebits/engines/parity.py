"""Whether an engine's log-probs are a trainer's: replay what it sampled, and compare bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.engines.logprobs import processed
from samebits.mode import batch_invariant
from samebits.testing import bits

__all__ = ["Parity", "Sample", "compare", "first_difference", "outputs_of_modules", "ratios", "replay"]


@dataclass(frozen=True)
class Sample:
    """A sequence from an engine.

    Attributes:
        prompt: token ids.
        tokens: those that the engine sampled.
        logprobs: of `tokens`, as the engine gave them.
        prompt_logprobs: of all tokens of the prompt but the first; may be empty.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    prompt_logprobs: Sequence[float] = ()


@dataclass(frozen=True)
class Parity:
    """What a comparison found. Its ``str`` is a summary.

    With the importance ratio ``r`` of a token, its probability by the trainer over that by the engine:

    Attributes:
        tokens: that were compared, sampled ones and those of prompts.
        differing: how many of them have log-probs with other bits.
        largest: the largest ``abs(log r)``.
        ratio: the ``r`` that is farthest from 1.
        first: sequence and token of the first difference, or None.
        k1: the mean of ``-log r`` over sampled tokens, which estimates KL(engine, trainer).
        k3: the mean of ``r - 1 - log r``, which estimates the same with less variance, and is never negative.
    """

    tokens: int
    differing: int
    largest: float
    ratio: float
    first: tuple[int, int] | None
    k1: float = 0.0
    k3: float = 0.0

    @property
    def equal(self) -> float:
        """The share of tokens whose log-probs have equal bits. Of no tokens it is 1."""
        return 1 - self.differing / max(self.tokens, 1)

    def __bool__(self) -> bool:
        return self.tokens > 0 and self.differing == 0

    def __str__(self) -> str:
        if self.tokens == 0:
            return "no tokens were compared"
        said = f"{self.differing} of {self.tokens:,} tokens differ"
        if self.first is None:
            return f"{said}: every importance ratio is 1"
        at = f"first at token {self.first[1]} of sequence {self.first[0]}"
        return (
            f"{said} ({self.equal:.2%} have equal bits), by up to {self.largest:.3g};"
            f" importance ratios up to {self.ratio:.9g}; KL {self.k1:.3g} (k1), {self.k3:.3g} (k3); {at}"
        )


@torch.no_grad()
def replay(model: nn.Module, sequences: Sequence[Sequence[int]], **distribution: Any) -> list[Tensor]:
    """Log-probs of all tokens of sequences but their first, by a ``transformers`` model under samebits.

    Each sequence runs alone: its bits are the same in any batch.

    Args:
        distribution: arguments of :func:`samebits.engines.logprobs.processed`; by default ``raw_logprobs``.
    """
    device = next(model.parameters()).device
    found = []
    with batch_invariant("ignore"):
        for sequence in sequences:
            ids = torch.tensor([*sequence], device=device)
            logits = model(ids[None], use_cache=False).logits[0, :-1]
            found.append(processed(logits, **distribution).gather(-1, ids[1:, None])[:, 0].cpu())
    return found


def compare(samples: Sequence[Sample], replayed: Sequence[Tensor]) -> Parity:
    """Compare the bits of the log-probs of samples with those of :func:`replay` of ``prompt + tokens``."""
    first, sampled, logs = None, [], []
    differing = 0
    for i, (sample, trainer) in enumerate(zip(samples, replayed, strict=True)):
        start = len(sample.prompt) - 1
        pairs = [(start, sample.logprobs, True)]
        if sample.prompt_logprobs:
            pairs.insert(0, (0, sample.prompt_logprobs, False))
        for at, engine, its_own in pairs:
            mine = torch.tensor([*engine], dtype=torch.float32)
            log, other = _log_ratios(trainer[at : at + len(mine)], mine)
            logs.append(log)
            sampled.append(torch.full(log.shape, its_own))
            differing += int(other.sum())
            if first is None and other.any():
                first = i, at + 1 + int(other.nonzero()[0])
    log = torch.cat(logs) if logs else torch.empty(0, dtype=torch.float64)
    if len(log) == 0:
        return Parity(0, 0, 0.0, 1.0, None)
    farthest = log[log.abs().argmax()]
    k1, k3 = _kl(log[torch.cat(sampled)])
    return Parity(len(log), differing, float(farthest.abs()), float(farthest.exp()), first, k1, k3)


def _log_ratios(trainer: Tensor, engine: Tensor) -> tuple[Tensor, Tensor]:
    """``log r`` in float64, and where bits differ. Elsewhere it is 0. Where a log-prob is NaN, it is inf."""
    other = bits(trainer) != bits(engine)
    log = torch.where(other, trainer.double() - engine.double(), 0.0)
    return log.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf), other


def _kl(log: Tensor) -> tuple[float, float]:
    """The estimates k1 and k3 of KL(engine, trainer), of tokens that the engine sampled."""
    if log.numel() == 0:
        return 0.0, 0.0
    k3 = (log.expm1() - log).nan_to_num(nan=math.inf, posinf=math.inf)  # inf - inf, of an infinite ratio
    return 0.0 - float(log.mean()), float(k3.mean())


def ratios(trainer: Tensor, engine: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    """Importance ratios ``r`` of a training step, for its log.

    Args:
        trainer, engine: log-probs of the sampled tokens, of one shape.
        mask: which of them count; all by default. Of none, ratios are 1.

    Returns:
        ``tokens``, ``differing`` (in their bits), ``equal`` (the share that does not), ``ratio_min``,
        ``ratio_max``, ``ratio_mean``, ``log_ratio_max``, the largest ``abs(log r)``, and two estimates of
        KL(engine, trainer), as in :class:`Parity`: ``k1`` and ``k3``.
    """
    trainer, engine = trainer.detach().to(torch.float32), engine.detach().to(trainer.device, torch.float32)
    if trainer.shape != engine.shape:
        raise ValueError(
            f"samebits.ratios: engine: expected shape {tuple(trainer.shape)}, got {tuple(engine.shape)}"
        )
    if mask is not None:
        trainer, engine = trainer[mask.bool()], engine[mask.bool()]
    log, other = _log_ratios(trainer, engine)
    if log.numel() == 0:
        log, other = log.new_zeros(1), other.new_zeros(1)
    r = log.exp()
    k1, k3 = _kl(log)
    return {
        "tokens": float(trainer.numel()),
        "differing": float(other.sum()),
        "equal": 1 - float(other.double().mean()),
        "ratio_min": float(r.min()),
        "ratio_max": float(r.max()),
        "ratio_mean": float(r.mean()),
        "log_ratio_max": float(log.abs().max()),
        "k1": k1,
        "k3": k3,
    }


@contextmanager
def outputs_of_modules(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The outputs of modules that have weights of their own, in the calls within, by name and in their order.

    Those are rows ``[tokens, n]``, on the CPU. Of several results the first one is taken. Other modules are
    cut differently in engines: one hands on its residual, one multiplies by the gate.
    """
    found: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue

        def keep(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                found[name] = first.detach().reshape(-1, first.shape[-1]).cpu()

        hooks.append(module.register_forward_hook(keep))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(engine: dict[str, Tensor], trainer: dict[str, Tensor]) -> str | None:
    """The first module, in the trainer's order, whose outputs have other bits in the engine.

    Modules that only one of them has, or whose sizes differ (merged projections), are left out.
    """
    for name, theirs in trainer.items():
        mine = engine.get(name)
        if mine is not None and mine.shape == theirs.shape and not torch.equal(bits(mine), bits(theirs)):
            return name
    return None
