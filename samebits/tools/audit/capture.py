"""Capture of the rows that reach a model's linear layers in a real forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.tools.audit.target import Target
from samebits.tools.text import AuditError, one_line


def capture(
    model: nn.Module, targets: Sequence[Target], inputs: Sequence[Any], max_rows: int
) -> tuple[dict[str, list[Tensor]], set[str]]:
    """The rows that reach each target when `model` runs on `inputs`: at most `max_rows`, evenly spaced.

    They have the dtype that the layer computes in, which is autocast's if it is on in the call. If a layer
    computed in several dtypes or widths, its rows come in several tensors.

    Returns:
        The rows of each target, and the names of the targets that ran under autocast.
    """
    taken: dict[str, list[Tensor]] = {target.name: [] for target in targets}
    autocast: set[str] = set()
    quota = -(-max_rows // len(inputs))

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        rows = rows[_spread(len(rows), quota)].clone()
        kind = rows.device.type
        if torch.is_autocast_enabled(kind) and rows.is_floating_point():
            rows = rows.to(torch.get_autocast_dtype(kind))
            autocast.add(name)
        taken[name].append(rows)

    handles = [
        target.module.register_forward_pre_hook(partial(hook, target.name), with_kwargs=True)
        for target in targets
    ]
    # The mode of each module, because a model in training can have parts in eval mode. The user's eval() may
    # change more than that.
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for item in inputs:
            if isinstance(item, Mapping):
                model(**item)
            elif isinstance(item, tuple):
                model(*item)
            else:
                model(item)
    except (Exception, SystemExit) as error:
        raise AuditError(
            f"the model's forward pass on the given inputs raised {type(error).__name__}: {one_line(error)}"
        ) from error
    finally:
        for module, mode in training:
            module.training = mode
        for handle in handles:
            handle.remove()
    captured = {}
    for name, parts in taken.items():
        kinds: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        for part in parts:
            if len(part):
                kinds.setdefault((part.dtype, part.shape[1]), []).append(part)
        captured[name] = [rows[_spread(len(rows), max_rows)] for rows in map(torch.cat, kinds.values())]
    return captured, autocast


def _spread(count: int, most: int) -> Tensor:
    """Indices of at most `most` of `count` rows, evenly spaced."""
    every = torch.arange(min(count, most), device="cpu")
    return every if count <= most else every * count // most
