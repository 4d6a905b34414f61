"""The loss of a language model from its hidden states: logits are not stored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.fusion.forms import Kind, plain, unhooked, within
from samebits.fusion.probe import active, instead
from samebits.nn import Linear
from samebits.ops.linear_logp import linear_logp
from samebits.ops.matmul import matmul

__all__ = ["Loss", "WideHead"]

_SHIFTED = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
"""Functions of ``transformers.loss.loss_utils``, and whether labels are of the tokens after them."""


@dataclass(frozen=True)
class Loss:
    """:func:`samebits.linear_logp` for a head, and cross entropy of its logits.

    Attributes:
        proven: device and dtype.
    """

    proven: tuple[Kind, ...] = ()

    def only(self, dtypes: Collection[torch.dtype]) -> Loss:
        """The form in these dtypes alone."""
        return replace(self, proven=within(self.proven, dtypes))

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
                    and getattr(model.loss_function, "__name__", "") in _SHIFTED
                    and (hidden.device.type, hidden.dtype) in proven
                ):
                    return None, hidden
                instead("a loss of other operands", hidden, proven)
            return layer(hidden), None

        return head

    def loss(self) -> Callable[..., Any]:
        """A function of a loss function, what `head` gave, the head, and the function's arguments."""

        def loss(function: Any, hidden: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if hidden is None:
                return function(*args, **kwargs)
            return _loss(function, hidden, layer, *args, **kwargs)

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
    if not _SHIFTED[function.__name__]:
        target = labels
    elif shift_labels is not None:
        target = shift_labels
    else:
        target = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = target.to(hidden.device)
    losses = -linear_logp(hidden, layer.weight, target, layer.bias, ignore_index=ignore_index)
    total: Tensor = losses.reshape(1, -1).sum(1).reshape(())
    if num_items_in_batch is None:
        return total / (target != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    mean: Tensor = total / num_items_in_batch
    return mean


class WideHead(nn.Linear):
    """A head whose logits are the accumulators of the product: what :class:`Loss` computes the loss of."""

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = matmul(input, self.weight.mT, out_dtype=torch.float32)
        return logits if self.bias is None else logits + self.bias.float()
