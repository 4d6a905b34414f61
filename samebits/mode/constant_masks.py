"""Masks that a graph computes of nothing but sizes: attention that is causal is told so.

Under ``torch.compile``, models of ``transformers`` always make a mask, since they must not look at values to
see that there is nothing to hide. A mask without inputs has its values while the graph is compiled. If it is
the causal one, attention runs without it, as it does where nothing is compiled: in faster kernels, and of
keys that are not repeated for each head.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

_map: Any = torch.fx.node.map_aggregate
_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
__all__ = ["without_causal_masks"]

_LARGEST = 1 << 28
"""Elements of a mask that is looked at."""
_COMPUTE = frozenset(
    """
    add and_ arange bitwise_and bitwise_or bool cat clone contiguous cumsum diff eq expand full ge getitem gt
    int invert le logical_and logical_not logical_or long lt mul ne new_ones new_zeros ones or_ reshape sub to
    tril unsqueeze view zeros
    """.split()  # noqa: SIM905
)
"""Functions and methods that masks of positions are made by."""


def without_causal_masks(module: GraphModule, seen: dict[Node, Tensor | None] | None = None) -> None:
    """Replace causal masks in a graph of the compiler's, and in checkpoints there, by what says so.

    Args:
        module: the graph, which is changed.
        seen: what its nodes are known to compute, or None if that is nothing else.
    """
    seen, changed = {} if seen is None else seen, False
    parts = Counter(node.args[0].target for node in module.graph.nodes if node.target is _CHECKPOINT)
    for node in module.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            q, *repeated = node.args[:3]
            mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) == 4 else None)
            if _is_causal(mask, node, -2, seen) and not node.kwargs.get("is_causal"):
                few = [_before_repeats(x) for x in repeated]
                grouped = None not in few
                node.args = (q, *(few if grouped else repeated))
                node.kwargs = {**node.kwargs, "attn_mask": None, "is_causal": True}
                if grouped:
                    node.kwargs = {**node.kwargs, "enable_gqa": True}
                changed = True
        elif node.target is torch.ops.samebits.attention.default:
            q, k, v, mask, sinks, *positions, left, right, align = node.args[:13]
            alone = positions == [None] * 5 and (left, right, align) == (-1, -1, "first")
            if alone and _is_causal(mask, node, 1, seen):
                node.args = (q, k, v, None, sinks, *positions, -1, 0, align, *node.args[13:])
                changed = True
        elif node.target is _CHECKPOINT and parts[node.args[0].target] == 1:
            part = getattr(module, node.args[0].target)
            takes = part.graph.find_nodes(op="placeholder")
            values = (_value(x, seen) if isinstance(x, Node) else None for x in node.args[1:])
            without_causal_masks(part, dict(zip(takes, values, strict=True)))
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()


def _before_repeats(x: Any) -> Node | None:
    """What ``transformers`` repeats for each head of the queries, where there is a mask."""
    try:
        expanded = x.args[0]
        indexed = expanded.args[0]
        whole, index = slice(None), indexed.args[1]
        if (x.target, expanded.target) != ("reshape", "expand") or indexed.target is not operator.getitem:
            return None
    except (AttributeError, IndexError):
        return None
    few: Node = indexed.args[0]
    return few if index == (whole, whole, None, whole, whole) and _size(few, -1) in range(257) else None


def _is_causal(mask: object, node: Node, dim: int, seen: dict[Node, Tensor | None]) -> bool:
    """Whether a mask is known to show query i of so many keys those up to i."""
    if not isinstance(mask, Node):
        return False
    queries, keys = (_size(x, dim) for x in node.args[:2])
    values = _value(mask, seen)
    if values is None or values.dtype != torch.bool or queries != keys or values.shape[-2:] != (keys, keys):
        return False
    return bool((values == torch.ones(keys, keys, dtype=torch.bool).tril()).all())


def _size(x: object, dim: int) -> Any:
    return x.meta["example_value"].shape[dim] if isinstance(x, Node) else None


def _value(node: Node, seen: dict[Node, Tensor | None]) -> Tensor | None:
    """What a node computes of constants, on a CPU; None: of something else."""
    if node not in seen:
        seen[node] = _computed(node, seen)
    return seen[node]


def _computed(node: Node, seen: dict[Node, Tensor | None]) -> Tensor | None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    example = node.meta.get("example_value")
    known = (
        name.removeprefix("__").removesuffix("__") in _COMPUTE
    )  # `==` is a method of this name in PyTorch 2.11
    if node.op not in ("call_function", "call_method") or not known:
        return None
    if not isinstance(example, Tensor) or not _is_small(example):
        return None
    if any(_value(x, seen) is None for x in node.all_input_nodes):
        return None
    args, kwargs = _map((node.args, node.kwargs), lambda x: _on_cpu(seen[x] if isinstance(x, Node) else x))
    with _disable_current_modes(), torch.no_grad():
        found = (
            node.target(*args, **kwargs)
            if callable(node.target)
            else getattr(args[0], name)(*args[1:], **kwargs)
        )
    return found if isinstance(found, Tensor) else None


def _is_small(example: Tensor) -> bool:
    return all(isinstance(n, int) for n in example.shape) and example.numel() <= _LARGEST


def _on_cpu(x: object) -> object:
    return torch.device("cpu") if isinstance(x, torch.device) else x
