"""What a trainer's model computes, learnt from ``transformers`` without weights.

An engine builds a model of its own from the same configuration, and may read other options of it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.engines.refusals import LATER, RefusedError
from samebits.transformers import spans_of

__all__ = ["Attention", "Place", "TrainerModel", "place"]

_NAME = "samebits_asked"
_PACKED = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}
"""Layers that engines make of several, unless they say so themselves."""
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
Place = tuple[int | None, str]


def place(name: str) -> Place:
    """The number of a layer and the last part of a module's name: what stands between differs in engines."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else None, name.rpartition(".")[2]


class Attention(NamedTuple):
    """What a layer asks of its attention.

    Attributes:
        heads, kv_heads: how many queries have, and keys and values.
        size: of queries and keys.
        window: how many keys a query sees, its own with them; None for all.
        scale: of the products of queries and keys.
        softcap: of scores; 0 for none.
        sinks: whether heads have a score of no key.
    """

    heads: int
    kv_heads: int
    size: int
    window: int | None
    scale: float
    softcap: float
    sinks: bool

    def shared(self, ranks: int) -> Attention:
        """The same on one of so many ranks."""
        return self._replace(heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))

    def within(self, longest: int) -> Attention:
        """The same for sequences of at most so many tokens."""
        return self if self.window is None or self.window < longest else self._replace(window=None)


class TrainerModel:
    """The model of ``transformers`` of a configuration.

    Args:
        config: of ``transformers``, for the text model.

    Attributes:
        attention: by the number of a layer.
        biases: whether linear layers have one.
        eps: of norms.
        tied: whether the head has the embedding's weight.

    Raises:
        RefusedError: ``transformers`` has no such model, or its attention is not told by :class:`Attention`.
    """

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.attention: dict[int, Attention] = {}
        self.biases: dict[Place, set[bool]] = defaultdict(set)
        self.eps: dict[Place, set[float]] = defaultdict(set)
        self._config = config
        try:
            with torch.device("meta"), torch.no_grad(), _registered(self._asked) as functions:
                of: Any = AutoModelForCausalLM
                model = of.from_config(copy.deepcopy(config), **functions).eval()
                ids = torch.zeros(1, 2, dtype=torch.int64)
                with _NoData():  # type: ignore[no-untyped-call]
                    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        except RefusedError:
            raise
        except Exception as error:
            what = f"the configuration {type(config).__name__}"
            reason = f"transformers does not say what its model computes: {type(error).__name__}: {error}"
            raise RefusedError(what, reason, LATER) from error
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self.biases[place(name)].add(module.bias is not None)
            elif "Norm" in type(module).__name__ and _eps(module) is not None:
                self.eps[place(name)].add(_eps(module))
        head = model.get_output_embeddings()
        self.tied = head is not None and head.weight is model.get_input_embeddings().weight
        self._code = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]

    def option(self, name: str) -> Any:
        """What the configuration says, if the model's code reads it; else None."""
        return getattr(self._config, name, None) if re.search(rf"\b{name}\b", self._code) else None

    def check(
        self,
        model: nn.Module,
        attention: Callable[[Any], Attention | None],
        linear: type[Any],
        embedding: type[Any],
        *,
        longest: int,
        ranks: int = 1,
        remedy: str = LATER,
    ) -> None:
        """Refuse an engine's model that is another.

        Args:
            attention: what a layer computes on a rank, if it is one of attention.
            linear, embedding: the engine's classes.
            longest: tokens of a sequence.
            ranks: that share heads.

        Raises:
            RefusedError: it names the layer, and what differs.
        """
        packed = _PACKED | getattr(model, "packed_modules_mapping", {})
        weights: dict[str, int] = {}

        def compared(name: str, layer: Any) -> Iterator[tuple[str, object, object]]:
            number, last = place(getattr(layer, "layer_name", name))
            if isinstance(layer, embedding):
                weights[name] = layer.weight.data_ptr()
            elif isinstance(layer, linear):
                biases = {b for part in packed.get(last, [last]) for b in self.biases.get((number, part), ())}
                if biases:
                    yield "bias", getattr(layer, "bias", None) is not None, any(biases)
            elif (own := attention(layer)) is not None:
                asked = None if number is None else self.attention.get(number)
                if asked is None:
                    yield "its attention", "there", "nowhere"
                else:
                    both = own.within(longest), asked.shared(ranks).within(longest)
                    yield from zip(Attention._fields, *both, strict=True)
            elif len(known := self.eps.get((number, last), ())) == 1:
                yield "eps", _eps(layer), *known

        for name, layer in model.named_modules():
            for what, own, wanted in compared(name, layer):
                if own != wanted:
                    _refuse(f"the layer {name} of class {type(layer).__name__}", what, own, wanted, remedy)
        # Without a head of their own, models take the embedding.
        tied = weights.pop("lm_head", None) in (None, *weights.values())
        if tied != self.tied:
            _refuse("the head", "tie_word_embeddings", tied, self.tied, remedy)

    def _asked(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        number, what = getattr(module, "layer_idx", None), f"the attention {type(module).__name__}"
        if number is None or number in self.attention:
            raise RefusedError(what, "a layer does not ask for it just once", LATER)
        window, causal = sliding_window, is_causal
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if attention_mask is not None:
            window, causal = (len(attention_mask) - 1) or None, attention_mask.shape[1:] == (1, 1, 1)
        if not causal or position_bias is not None:
            raise RefusedError(what, "it is not causal, or has a mask of its own", LATER)
        batch, heads, tokens, size = query.shape
        self.attention[number] = Attention(
            heads=heads,
            kv_heads=key.shape[1],
            size=size,
            window=window,
            scale=size**-0.5 if scaling is None else scaling,
            softcap=softcap or 0.0,
            sinks=s_aux is not None,
        )
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _refuse(where: str, what: str, own: Any, wanted: Any, remedy: str) -> NoReturn:
    if what == "window":
        remedy += f"; or give a maximum length of {min(window for window in (own, wanted) if window)}"
    raise RefusedError(where, f"{what} is {own}, and in transformers {wanted}", remedy)


def _mask(**asked: Any) -> Tensor:
    """A tensor ``[n, 1, 1, 1]``, which tells a window of n - 1 keys, or none; another for other patterns."""
    spans = spans_of(asked | {"attention_mask": None})
    if spans is None or not spans.causal:
        return torch.empty(1, 1, 1, 2)
    return torch.empty(spans.left + 2, 1, 1, 1)


def _experts(module: nn.Module, hidden_states: Tensor, *routed: Tensor) -> Tensor:
    return torch.empty_like(hidden_states)


@contextmanager
def _registered(attention: Any) -> Iterator[dict[str, str]]:
    """Let models call these functions. It gives the options by which they do."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known: tuple[tuple[Any, Any], ...] = (
        (ALL_ATTENTION_FUNCTIONS, attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, _mask),
        (ALL_EXPERTS_FUNCTIONS, _experts),
    )
    for functions, own in known:
        functions[_NAME] = own
    try:
        yield {"attn_implementation": _NAME, "experts_implementation": _NAME}
    finally:
        for functions, _ in known:
            del functions[_NAME]


class _NoData(TorchDispatchMode):
    """Where the values of tensors without data are asked for: conditions hold, and nothing is found."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
        return func(*args, **(kwargs or {}))
