"""Recurrent layers of ``transformers``, under the mode: delta rules and lightning attention.

They prefill in chunks that count from a row's start, and decode by another algorithm; their convolutions see
across packed sequences. So the functions that the layers call are changed, once: under the mode they are this
library's, whose decoding has the bits of a prefill, else their own. Which tokens are a sequence's is known
where a model makes its masks, and told to the functions by the layer's call that hides padding.

A cache holds ``RecurrentState.data`` where it held a matrix.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from samebits.backends.recurrent import Layout, RecurrentState
from samebits.mode.patches import ChangedError, when_loaded
from samebits.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from samebits.ops.delta_rule import gated_delta_rule, kda, lightning_attention, state_layout

__all__ = [
    "Sequences",
    "cached_state",
    "conv_update",
    "cover_recurrent",
    "over_sequences",
    "sequences_of",
    "wants_gradients",
]

Run = Callable[..., Any]

_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_KDA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
_MODULES: dict[str, tuple[str, ...]] = {
    f"transformers.models.{name}.modeling_{name}": functions
    for functions, names in {
        _DELTA: "qwen3_next qwen3_5 qwen3_5_moe qwen4_exp olmo_hybrid",
        _KDA: "kimi_linear bailing_hybrid",
        (): "minimax",
    }.items()
    for name in names.split()
}
"""Modules with such layers, and the functions that the layers call. MiniMax has none."""

_asked: list[Callable[[], bool]] = []


def cover_recurrent(is_on: Callable[[], bool]) -> None:
    """Let the layers run this library's operations while `is_on` says so: now, or when they are loaded."""
    if is_on in _asked:
        return
    if not _asked:
        for name in _MODULES:
            if name in sys.modules:
                _cover(name)
            else:
                when_loaded(name, functools.partial(_cover, name))
    _asked.append(is_on)


def _cover(name: str) -> None:
    module = sys.modules[name]
    _replace(module, "create_recurrent_attention_mask", _mask)
    _replace(module, "apply_mask_to_padding_states", _hide_padding)
    for function in _MODULES[name]:
        _replace(module, function, _gated_delta_rule if _MODULES[name] is _DELTA else _kda)
    if _MODULES[name]:
        _replace(module, "causal_conv1d_fn", _conv)
        _replace(module, "causal_conv1d_update", _conv_update)
    else:
        _replace(module.MiniMaxLightningAttention, "forward", _lightning)


def _replace(owner: ModuleType | type, name: str, ours: Run) -> None:
    """Set a function to `ours` under the mode, which gets the function as its first argument."""
    own = getattr(owner, name, None)
    if own is None:
        raise ChangedError(
            f"samebits.batch_invariant: transformers: {owner.__name__}.{name} is missing; this version of"
            " transformers has recurrent layers that samebits does not know"
        )
    ours = torch.compiler.disable(ours)  # it cannot be traced

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        for is_on in _asked:
            if is_on():
                return ours(own, *args, **kwargs)
        return own(*args, **kwargs)

    setattr(owner, name, call)


# ---- which tokens are a sequence's


class Sequences(NamedTuple):
    """The sequences in the rows of a forward, as arguments of the operations.

    Attributes:
        start, length: padding on either side.
        tokens: which of all tokens are a sequence's, if there are others between them.
        offsets: offsets of packed sequences, among `tokens` if there are any.
    """

    start: Tensor | None = None
    length: Tensor | None = None
    tokens: Tensor | None = None
    offsets: Tensor | None = None


class _Here(threading.local):
    """A layer's call: what it was told, and how many tokens a row has."""

    sequences = Sequences()
    tokens = 0


_here = _Here()
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what masks say


def _mask(own: Run, *args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of recurrent layers. Packed sequences have one, too."""
    mask: Tensor | None = own(*args, **kwargs)
    given = dict(zip(("config", "inputs_embeds", "attention_mask", "past_key_values"), args, strict=False))
    given |= kwargs
    positions, embeds = given.get("position_ids"), given["inputs_embeds"]
    if mask is None and positions is not None and positions.ndim == 2 and embeds.shape[1] > 1:
        # as attention's masks take them
        if given.get("attention_mask") is not None or given.get("past_key_values") is not None:
            return None
        restarts = positions.diff(dim=1) != 1
        if not restarts.any():
            return None
        batch, tokens = embeds.shape[:2]
        first = F.pad(restarts, (1, 0), value=True).expand(batch, -1)
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=embeds.device)
        starts = first.flatten().nonzero()[:, 0]
        _known[mask] = Sequences(offsets=F.pad(starts, (0, 1), value=batch * tokens).to(torch.int32))
    return mask


def _hide_padding(own: Run, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A layer begins. What it is told of padding is kept for the operation that it calls."""
    known = attention_mask is not None and attention_mask.shape == hidden_states.shape[:2]
    _here.sequences = sequences_of(attention_mask) if known else Sequences()  # type: ignore[arg-type]
    _here.tokens = hidden_states.shape[1]
    hidden: Tensor = own(hidden_states, attention_mask)
    return hidden


def sequences_of(mask: Tensor) -> Sequences:
    """What a mask ``[batch, tokens]`` says. This waits for a GPU, once for all layers."""
    found = _known.get(mask)
    if found is None:
        shown = mask != 0
        numbers, count = shown.to(torch.uint8), shown.count_nonzero(1)
        start = numbers.argmax(1)
        if (shown.shape[1] - numbers.flip(1).argmax(1) - start == count).all():
            found = Sequences(start.to(torch.int32), (start + count).to(torch.int32))
        else:
            offsets = F.pad(count.cumsum(0), (1, 0)).to(torch.int32)
            found = Sequences(tokens=shown.flatten().nonzero()[:, 0], offsets=offsets)
        _known[mask] = found
    return found  # type: ignore[no-any-return]


# ---- the operations


def _offsets(given: dict[str, Any]) -> Tensor | None:
    """Those of packed sequences, as a call of the model told them."""
    return next((given[n] for n in ("cu_seqlens", "cu_seq_lens_q") if given.get(n) is not None), None)


def _conv(
    own: Run,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """``causal_conv1d_fn``, of ``[batch, channels, T]``. What a cache kept lies before a row's tokens."""
    fused = activation if activation in (None, "silu", "swish") else None

    def run(x: Tensor, cu_seqlens: Tensor | None = None, **_: Any) -> tuple[Any, None]:
        found: Any = causal_conv1d(x.mT, weight, bias, activation=fused, cu_seqlens=cu_seqlens)
        return found.mT, None  # padding is zeros already, and so is what is before a sequence

    told, offsets, tokens = _here.sequences, _offsets(kwargs), _here.tokens
    kept = hidden_states.shape[2] - tokens
    if kept:  # they are of the row's first sequence
        told = Sequences()
        offsets = None if offsets is None else offsets + kept * -(-offsets // tokens)
    out = over_sequences(told, run, (hidden_states.to(weight.dtype).mT,), offsets)[0].mT
    if activation != fused:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _conv_update(own: Run, *args: Any, **kwargs: Any) -> Tensor:
    found = conv_update(*args, **kwargs)
    return own(*args, **kwargs) if found is NotImplemented else found  # type: ignore[no-any-return]


def conv_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """``causal_conv1d_update``, or NotImplemented; its own form has the same bits."""
    if activation not in (None, "silu", "swish") or wants_gradients(hidden_states, weight, bias):
        return NotImplemented
    if not hidden_states.dtype == conv_state.dtype == weight.dtype:
        return NotImplemented
    return causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


def wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _gated_delta_rule(own: Run, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return _delta(gated_delta_rule, *args, **kwargs)


def _kda(own: Run, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return _delta(kda, *args, **kwargs)


def _delta(
    operation: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``torch_chunk_gated_delta_rule`` and the like, of a prefill and of decoding."""
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    operands = (query, key, value, g, beta)
    return _run(operation, operands, initial_state, output_final_state, _offsets(kwargs), options)


def _run(
    operation: Run,
    operands: tuple[Tensor, ...],
    initial: Tensor | None,
    final: bool,
    offsets: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """An operation on the sequences of this layer's call."""
    name = operation.__name__
    q, _, v = operands[:3]
    state = cached_state(name, state_layout(q, v, operation=name, by_channel=operation is kda), initial)
    told, _here.sequences = _here.sequences, Sequences()
    go_on = functools.partial(operation, initial_state=state, output_final_state=final, **options)
    out, after = over_sequences(told, go_on, operands, offsets)
    return out, None if after is None else after.data


def cached_state(operation: str, layout: Layout, data: Tensor | None) -> RecurrentState | None:
    """What a cache has, if there is one."""
    if data is not None and data.ndim != 2:
        raise ValueError(
            f"samebits.batch_invariant: {operation}: the cache has states {list(data.shape)} that were"
            " computed outside of the mode; expected a cache that was filled under it"
        )
    return None if data is None else RecurrentState(layout, data)


def over_sequences(
    told: Sequences, run: Run, operands: tuple[Tensor, ...], offsets: Tensor | None
) -> tuple[Tensor, RecurrentState | None]:
    """`run` on the sequences in rows of operands ``[batch, T, ...]``: what is told of them, or `offsets`."""
    if told.offsets is not None:
        offsets = told.offsets
    batch, tokens = operands[0].shape[:2]
    if offsets is None:
        out, after = run(*operands, key_start=told.start, key_length=told.length)
    else:
        operands = tuple(t.flatten(0, 1)[None] for t in operands)
        if told.tokens is not None:
            operands = tuple(t[:, told.tokens] for t in operands)
        out, after = run(*operands, cu_seqlens=offsets)
    if told.tokens is not None:
        zeros = out.new_zeros((1, batch * tokens, *out.shape[2:]))
        out = zeros.index_copy(1, told.tokens, out)
    return out.reshape(batch, tokens, *out.shape[2:]), after


def _lightning(
    own: Run,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``MiniMaxLightningAttention.forward``."""
    states = layer.act_fn(layer.qkv_proj(hidden_states))
    _here.sequences = Sequences() if attention_mask is None else sequences_of(attention_mask)
    states = states.unflatten(2, (layer.num_attention_heads, 3 * layer.head_dim))
    operands = states.split(layer.head_dim, dim=3)
    initial = None if past_key_values is None else past_key_values.get_linear_cache(layer.layer_idx)
    decays = -layer.slope_rate.to(torch.float32).flatten()
    options = {"g_gamma": decays, "scale": 1.0}
    offsets = kwargs.get("cu_seq_lens_q")
    out, after = _run(lightning_attention, operands, initial, past_key_values is not None, offsets, options)
    out = layer.norm(out.flatten(2))
    out = layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * out)
    if past_key_values is not None:
        past_key_values.set_linear_cache(layer.layer_idx, after)
    return out, after
