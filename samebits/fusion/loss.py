"""The loss of a language model: from its hidden states, or from logits that stay in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.fusion.forms import Kind, plain, unhooked
from samebits.fusion.probe import active, instead
from samebits.nn import Linear
from samebits.ops.cross_entropy import cross_entropy
from samebits.ops.linear import linear
from samebits.ops.linear_logp import linear_logp

__all__ = ["Loss", "LossOfLogits", "WideHead", "knows"]

_SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""Functions of ``transformers.loss.loss_utils``, and whether labels are of the tokens after them."""


def knows(function: Any) -> bool:
    """Whether it is one of these functions."""
    return getattr(function, "__name__", "") in _SHIFTED


@dataclass(frozen=True)
class Loss:
    """:func:`samebits.linear_logp` for a head, and cross entropy of its logits.

    Attributes:
        proven: device and dtype.
    """

    proven: tuple[Kind, ...] = ()

    def head(self) -> Callable[..., Any]:
        """A function of the model, its head, hidden states and labels: logits, or None and hidden states."""
        proven = self.proven

        def head(model: Any, layer: Any, hidden: Any, labels: Any) -> tuple[Any, Any]:
            if active() and labels is not None:
                if (
                    type(layer) in (nn.Linear, Linear)
                    and unhooked(layer)
                    and plain(hidden)
                    and plain(layer.weight)
                    and hidden.dtype == layer.weight.dtype
                    and labels.shape == hidden.shape[:-1]
                    and getattr(layer, "contract", None) is None
                    and getattr(layer, "fp8", None) is None
                    and not torch.is_autocast_enabled(hidden.device.type)
                    and knows(model.loss_function)
                    and (hidden.device.type, hidden.dtype) in proven
                ):
                    return None, hidden
                instead("a loss of other operands", hidden, proven)
            return layer(hidden), None

        return head

    def loss(self) -> Callable[..., Any]:
        """A function of what takes logits, a loss function, what `head` gave, the head, and arguments."""

        def loss(of_logits: Any, function: Any, hidden: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if hidden is None:
                return of_logits(function, *args, **kwargs)
            return _loss(function, hidden, layer, *args, **kwargs)

        return loss


@dataclass(frozen=True)
class LossOfLogits:
    """Cross entropy of 16-bit logits, with the bits that it has of them in float32.

    Attributes:
        proven: device and dtype.
    """

    proven: tuple[Kind, ...] = ()

    def run(self) -> Callable[..., Any]:
        """A function of a loss function and its arguments."""
        proven = self.proven

        def loss(function: Any, *args: Any, **kwargs: Any) -> Any:
            if active():
                logits: Any = args[0] if args else kwargs.get("logits")
                if knows(function) and plain(logits) and (logits.device.type, logits.dtype) in proven:
                    found = _loss_of_logits(function, *args, **kwargs)
                    if found is not None:
                        return found
                instead("a loss of other operands", logits, proven)
            return function(*args, **kwargs)

        return loss


def _loss(
    function: Any,
    hidden: Tensor,
    layer: Any,
    logits: None,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """As those functions of ``transformers``."""
    target = _target(function, labels, ignore_index, shift_labels).to(hidden.device)
    losses = -linear_logp(hidden, layer.weight, target, layer.bias, ignore_index=ignore_index)
    total: Tensor = losses.reshape(1, -1).sum(1).reshape(())
    if num_items_in_batch is None:
        return total / (target != ignore_index).sum()
    return _share(total, num_items_in_batch)


def _loss_of_logits(
    function: Any,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The same, of logits. None: the function itself is to compute it, or to refuse it."""
    if not (plain(labels) and (shift_labels is None or plain(shift_labels))):
        return None
    target = _target(function, labels, ignore_index, shift_labels).to(logits.device)
    if target.dtype != torch.int64 or (*target.shape, vocab_size) != logits.shape or vocab_size == 0:
        return None
    reduction = "mean" if num_items_in_batch is None else "sum"
    rows = logits.reshape(-1, vocab_size), target.reshape(-1)
    loss = cross_entropy(*rows, ignore_index, reduction, wide=True)
    return loss if num_items_in_batch is None else _share(loss, num_items_in_batch)


def _target(function: Any, labels: Tensor, ignore_index: int, shift_labels: Tensor | None) -> Tensor:
    if not _SHIFTED[function.__name__]:
        return labels
    if shift_labels is not None:
        return shift_labels
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _share(total: Tensor, items: Any) -> Tensor:
    share: Tensor = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return share


class WideHead(nn.Linear):
    """A head whose logits are the accumulators of the product: what :class:`Loss` computes the loss of."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, out_dtype=torch.float32)
