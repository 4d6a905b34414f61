"""Calls of whole modules on random values, for their proofs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from samebits.fusion.loss import WideHead
from samebits.fusion.probe import DTYPES, rows, weights
from samebits.mode import batch_invariant

__all__ = ["evaluated", "of_logits", "of_loss", "of_module"]


def of_module(
    module: nn.Module, call: Any, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    """Random weights and rows for a call of a module in `dtype`, and a function of them that calls it."""
    main = next((p.dtype for p in module.parameters() if p.is_floating_point()), dtype)
    parameters = {n: p for n, p in module.named_parameters() if p.dtype in DTYPES}
    leaves, spec = tree_flatten(call)
    rows_at = (i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.dtype == main and t.ndim > 1)
    at = next(rows_at, None)
    operands = {
        n: weights(p.detach(), p.dtype if dtype == main else dtype, i)
        for i, (n, p) in enumerate(parameters.items())
    }
    if at is not None:
        operands["argument"] = rows(tuple(leaves[at].shape), dtype, leaves[at].device, 0)

    def run(t: dict[str, Tensor]) -> Any:
        given = [
            x.to(dtype) if isinstance(x, Tensor) and x.dtype == main else copy.deepcopy(x) for x in leaves
        ]
        if at is not None:
            given[at] = t["argument"].clone()
        args, kwargs = tree_unflatten(given, spec)
        return functional_call(module, {n: t[n] for n in parameters}, args, kwargs)

    return operands, run


def of_loss(
    model: Any, call: Any, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Callable[..., Any], Callable[[], Any]]:
    """As :func:`of_module`, of a model's head and loss. The model before the head is not run again.

    Returns:
        Operands; a function of them; and a context in which the head's logits are not rounded to 16 bits,
        as :class:`samebits.fusion.loss.Loss` does not.
    """
    head = model.get_output_embeddings()
    output, _, labels = _outputs(model, call)
    mine = {id(p) for p in head.parameters()}
    names = {id(p): n for n, p in model.named_parameters() if id(p) in mine}
    operands = {
        n: weights(p.detach(), dtype, i)
        for i, (p, n) in enumerate((p, names[id(p)]) for p in head.parameters())
    }
    operands["hidden"] = rows(tuple(output.last_hidden_state.shape), dtype, labels.device, 0)

    def run(t: dict[str, Tensor]) -> Any:
        given = copy.copy(output)
        given["last_hidden_state"] = t["hidden"].clone()
        with _giving(model.base_model, given):
            args, kwargs = copy.deepcopy(call)
            of_head = {n: t[n] for n in operands if n != "hidden"}
            return functional_call(model, of_head, args, kwargs | {"labels": labels}).loss

    @contextmanager
    def wide() -> Iterator[None]:
        kind = type(head)
        head.__class__ = WideHead
        try:
            yield
        finally:
            head.__class__ = kind

    return operands, run, nullcontext if dtype == torch.float32 else wide


def of_logits(
    model: Any, call: Any, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Callable[..., Any], Callable[[], Any]]:
    """As :func:`of_loss`, of a model's loss from its logits."""
    output, logits, labels = _outputs(model, call)
    operands = {"logits": rows(tuple(logits.shape), dtype, labels.device, 0)}

    def run(t: dict[str, Tensor]) -> Any:
        head = model.get_output_embeddings()
        with _giving(model.base_model, copy.copy(output)), _giving(head, t["logits"].clone()):
            args, kwargs = copy.deepcopy(call)
            return model(*args, **(kwargs | {"labels": labels})).loss

    return operands, run, nullcontext


def _outputs(model: Any, call: Any) -> tuple[Any, Tensor, Tensor]:
    """What a model gives before its head, and what its head gives; and labels."""
    args, kwargs = copy.deepcopy(call)
    found: dict[nn.Module, Any] = {}
    parts = model.base_model, model.get_output_embeddings()
    hooks = [m.register_forward_hook(lambda m, args, output: found.update({m: output})) for m in parts]
    try:
        with torch.no_grad(), batch_invariant("ignore"):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    labels: Tensor = kwargs["input_ids"].clone()
    labels[:, ::3] = -100
    output, logits = (found[m] for m in parts)
    return output, logits, labels


@contextmanager
def _giving(module: Any, output: Any) -> Iterator[None]:
    """Let a module give this, whatever its arguments."""
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """In evaluation mode: without dropout, and without checkpointing."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
