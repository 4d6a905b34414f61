"""Fused steps of PyTorch's optimizers on a CPU, in whole vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from samebits.mode.arguments import keeps_operators

__all__ = ["step_in_whole_vectors"]


def step_in_whole_vectors(step: OpOverload) -> Callable[..., Any]:
    """The fused `step` of an optimizer, in lengths for which PyTorch's CPU loops compute all elements alike.

    What whole vectors leave over takes its step in a padded tensor of its own.
    """
    lists = {a.name: a.is_write for a in step._schema.arguments if str(a.type) == "List[Tensor]"}

    def stepped(*args: Any, **options: Any) -> Any:
        named: dict[str, Sequence[Tensor]] = dict(zip(lists, args, strict=False))
        split = {name: list(map(_local, x)) for name, x in named.items() if x and name != "state_steps"}
        tensors = [t for x in split.values() for t in x]
        if not all(t.is_cpu and t.layout is torch.strided for t in tensors):
            return step(*args, **options)
        if not (_sharded_alike(named) and all(keeps_operators(type(t)) for t in tensors)):
            return NotImplemented
        parts: dict[str, list[Tensor]] = {name: [] for name in named}
        padded: list[tuple[Tensor, Tensor]] = []  # and where its elements belong
        for i, param in enumerate(split["self"]):
            dense = all(x[i].is_contiguous() for x in split.values())
            count = param.numel()
            whole = count - count % 64 if dense else 0
            for begin, end in ((0, whole), (whole, count)):
                if begin == end:
                    continue
                for name, x in split.items():
                    part = x[i].detach()
                    part = part.view(-1)[begin:end] if dense else part
                    if begin == whole:
                        flat = F.pad(part.reshape(-1), (0, -part.numel() % 64))
                        if lists[name]:
                            padded.append((flat, part))
                        part = flat
                    parts[name].append(part)
                if "state_steps" in named:
                    parts["state_steps"].append(named["state_steps"][i])
        if parts["self"]:
            step(**parts, **options)
        for flat, part in padded:
            part.copy_(flat[: part.numel()].view(part.shape))
        return None

    return stepped


def _local(t: Any) -> Tensor:
    """The tensor, or this rank's of a DTensor."""
    local: Tensor = getattr(t, "_local_tensor", t)
    return local


def _sharded_alike(lists: Mapping[str, Sequence[Any]]) -> bool:
    """Whether all tensors of a parameter are sharded as it is, or none is."""
    split = [x for name, x in lists.items() if x and name != "state_steps"]
    return all(
        len({(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in group}) == 1
        for group in zip(*split, strict=True)
    )
