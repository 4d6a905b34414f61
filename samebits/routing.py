"""Routing replay: a trainer's tokens go to the experts that an engine chose for them.

For those who cannot have equal bits in both halves. Where bits differ, routers near a tie choose other
experts, and log-probs jump. With equal bits the choices are equal, and nothing need be replayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["replay"]

_TOPK = torch.topk, Tensor.topk
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@contextmanager
def replay(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Let the routers of a ``transformers`` model choose recorded experts.

    ::

        experts = pad_sequence(samebits.vllm.check.experts(outputs), batch_first=True, padding_value=-1)
        with samebits.routing.replay(model, experts):
            loss = compute_loss(model(ids))
            loss.backward()

    A router computes its scores as ever. Only the experts that it takes, the ``topk`` among them, are those
    recorded; their weights, and gradients, are those of the trainer's own scores. Nothing waits for a GPU
    after the recording was looked at. It works in eager mode, in the mode and without.

    Keep the backward within: layers whose activations are checkpointed route a second time there.

    Args:
        model: whose blocks of experts have a router and ``experts``. Blocks are told apart by their layer's
            number.
        experts: ``[..., layers, k]``, integers. In front are the tokens that a forward gets, as
            ``[batch, tokens]`` or flat. ``layers`` counts all layers of the model. Those without experts may
            hold anything. A token whose entries are all -1 in a layer chooses there by itself: so pad rows.

    Raises:
        TypeError: `experts` are no integers.
        ValueError: shapes do not fit the model, or the tokens of a forward; or a token's experts are not `k`
            different ones of those that a layer has.
        RuntimeError: a router does not choose by one ``topk``, or no router ran.
    """
    blocks = _blocks(model)
    chosen = _checked(blocks, experts)
    ran: set[int] = set()
    with ExitStack() as hooks:
        for layer, block in blocks.items():
            for hook in _hooks(block, layer, chosen[layer], ran):
                hooks.callback(hook.remove)
        yield
    if not ran:
        raise RuntimeError("samebits.routing.replay: model: expected a forward within the context, got none")


def _blocks(model: nn.Module) -> dict[int, Any]:
    """Blocks of experts, by layer."""
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        experts, layer = getattr(module, "experts", None), _LAYER.search(f"{name}.")
        if isinstance(experts, nn.Module) and hasattr(experts, "num_experts") and layer is not None:
            if int(layer[1]) in found:
                raise ValueError(
                    "samebits.routing.replay: model: expected one block of experts in a layer, got more in"
                    f" layer {layer[1]}"
                )
            router = getattr(module, "gate", None)
            methods = (getattr(x, "topk_method", None) for x in (module, router))
            if "group_limited_greedy" in methods:  # its scores of other groups are zeros, not a trainer's
                raise ValueError(
                    "samebits.routing.replay: model: expected routers that score every expert, got one by"
                    f" groups (group_limited_greedy) in layer {layer[1]}"
                )
            found[int(layer[1])] = module
    if not found:
        raise ValueError(
            f"samebits.routing.replay: model: expected layers of experts as transformers 5 has them, got none"
            f" in {type(model).__name__}"
        )
    return found


def _checked(blocks: Mapping[int, Any], experts: Tensor) -> dict[int, Tensor]:
    """``[tokens, k]`` of each layer with experts."""
    if not isinstance(experts, Tensor) or experts.is_floating_point() or experts.dtype == torch.bool:
        got = experts.dtype if isinstance(experts, Tensor) else type(experts).__name__
        raise TypeError(f"samebits.routing.replay: experts: expected a tensor of integers, got {got}")
    if experts.ndim < 3 or experts.shape[-2] <= max(blocks):
        raise ValueError(
            f"samebits.routing.replay: experts: expected [..., layers, k] with more than {max(blocks)}"
            f" layers, got shape {tuple(experts.shape)}"
        )
    device = next(next(iter(blocks.values())).parameters()).device
    of_all = experts.to(device, torch.int64).flatten(0, -3)
    for layer, block in blocks.items():
        ids = of_all[:, layer].sort(-1).values
        count = block.experts.num_experts
        right = (ids[:, 0] >= 0) & (ids[:, -1] < count) & (ids.diff(dim=-1) > 0).all(-1)
        wrong = ~(right | (ids == -1).all(-1))
        if wrong.any():
            token = int(wrong.nonzero()[0])
            raise ValueError(
                f"samebits.routing.replay: experts: expected {ids.shape[-1]} different ones of {count} for"
                f" each token, or -1 for all, got {of_all[token, layer].tolist()} for token {token} in layer"
                f" {layer}"
            )
    return {layer: of_all[:, layer] for layer in blocks}


def _hooks(block: Any, layer: int, chosen: Tensor, ran: set[int]) -> Iterator[Any]:
    """A router's ``topk`` is another from the beginning of its block until its experts begin."""
    entered: list[_Choice] = []

    def begin(module: Any, args: Any) -> None:
        entered.append(_Choice(chosen, layer, module.experts.num_experts))
        entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def end() -> None:
        if entered:
            entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def chose(module: nn.Module, args: Any) -> None:
        calls = entered[-1].calls if entered else 0
        end()
        if calls != 1:
            raise RuntimeError(
                f"samebits.routing.replay: model: expected a router that chooses {chosen.shape[-1]} experts"
                f" by one topk, got {calls} in layer {layer}"
            )
        ran.add(layer)

    yield block.register_forward_pre_hook(begin)
    yield block.experts.register_forward_pre_hook(chose)
    yield block.register_forward_hook(lambda *_: end(), always_call=True)


class _Choice(TorchFunctionMode):
    """``topk`` of the scores of all experts gives those that were chosen."""

    def __init__(self, chosen: Tensor, layer: int, count: int) -> None:
        super().__init__()
        self._chosen, self._layer = chosen, layer
        self._sizes = 2, count, chosen.shape[-1]
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        if func not in _TOPK:
            return out
        scores = args[0] if args else given["input"]
        if (scores.ndim, scores.shape[-1], out.indices.shape[-1]) != self._sizes:  # of groups of experts
            return out
        self.calls += 1
        if len(scores) != len(self._chosen):
            raise ValueError(
                f"samebits.routing.replay: experts: expected those of {len(scores)} tokens, which layer"
                f" {self._layer} got, but they are of {len(self._chosen)}"
            )
        indices = torch.where(self._chosen < 0, out.indices, self._chosen)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
