"""Attention and experts of Hugging Face models: ``attn_implementation`` and ``experts_implementation``.

``transformers`` asks twice. Once in a forward, the *mask function* is told which keys queries see. Then every
layer calls the *attention function*, and hands over what the mask function returned. That has to be a tensor
of four dimensions: models, ``torch.compile`` and moves to other devices let nothing else through. So
:func:`_mask` returns one of these, and their dtypes tell :func:`attention_function` which:

* int32, and int8 with padding: :class:`Spans`, where a causal or full pattern, a window, padding and packed
  sequences say it all;
* bool: a mask, for all else, and for models that may change it.

Other masks are the user's or the model's own.

A layer of experts calls its *experts function* (:func:`experts_function`) with the tokens of all sequences as
rows.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.backends.attention import SEGMENT
from samebits.contract import Contract
from samebits.latent import Absorbed, absorbed, expanded
from samebits.mode.arguments import without_autocast
from samebits.mode.fp8_layers import fp8_experts
from samebits.ops._checks import SUPPORTED
from samebits.ops._memory import capturing
from samebits.ops._sequences import trusted
from samebits.ops.attention import attention
from samebits.ops.experts import Routed, experts
from samebits.remedies import see

__all__ = [
    "are_converted",
    "are_experts",
    "attention_function",
    "begins_later",
    "convert_experts",
    "device_of",
    "experts_function",
    "packed_by",
    "register",
    "spans_of",
    "spans_of_padding",
    "why_not_converted",
]


def register() -> None:
    """Make ``attn_implementation="samebits"`` and ``experts_implementation="samebits"`` known.

    ::

        samebits.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(
            name, attn_implementation="samebits", experts_implementation="samebits"
        )

    **Attention.** Such a model calls :func:`samebits.attention`, within :class:`samebits.batch_invariant` and
    outside of it. A query has the same bits alone and in a batch, with padding on either side, in a row of
    packed sequences, in a prefill, in chunks of it and in decoding, with every cache: also one that drops
    keys outside of a window. A second call changes nothing.

    * Windows, soft caps, attention sinks, position biases and grouped heads are those of the model.
    * ``attention_mask[batch, keys]`` is padding. It may hide keys anywhere: on either side, or between two
      turns. With it each forward waits for the GPU once, to see whether there are gaps, which take slower
      kernels. While a CUDA graph is captured it does not wait, and takes these.
    * Sequences packed into a row are told by ``position_ids``, without mask and cache, or by
      ``cu_seq_lens_q`` and ``cu_seq_lens_k``. With ``position_ids`` each forward waits for the GPU once, as
      ``transformers`` does itself. Models that do not hand ``position_ids`` on to masks, as GPT-OSS, need the
      others.
    * Masks of four dimensions, and patterns other than these (images in Gemma 3, chunks in Llama 4), are
      passed as masks. A query then counts the keys that its row shows.
    * ``torch.compile`` does not trace the mask function: a graph breaks there, once in a forward.

    A model's call is refused with dropout, ``output_attentions``, a head mask, or the paged cache of
    ``generate_batch``, which takes ``"sdpa"`` in the process's mode: see "Continuous batching" in
    ``docs/mode.md``.

    **Experts.** A mixture-of-experts layer sorts its tokens by expert and calls :func:`samebits.grouped_mm`
    twice. Nothing waits for the GPU. The results have the bits of the layer's own ``"grouped_mm"`` and
    ``"batched_mm"`` under :func:`samebits.batch_invariant`, which then also covers the rest of the model.
    Experts in block FP8 take this form, too, by :func:`samebits.scaled_grouped_mm`.

    * The sum over a token's experts is in the order of its slots, in float32, rounded once. So is the sum of
      the gradients of the token.
    * Each row of the batch ``[batch, tokens, hidden]`` that the layer flattens is a sequence in the gradients
      of weights: padding at the end of rows changes no bit of them. That is so where the layer flattens it
      just before. Elsewhere, and under ``torch.compile``, all tokens are one sequence. Routers and shared
      experts are not part of this: they are products of rows, which are one sequence.

    Under :class:`samebits.batch_invariant` models have these bits however they were loaded: see "Models of
    transformers" in ``docs/mode.md``.

    Raises:
        ImportError: ``transformers`` is not installed.
        ValueError: later, for a model whose layers compute attention themselves, as it is loaded with
            ``attn_implementation="samebits"``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # an older version, in which layers of experts have one form
        pass
    else:
        ALL_EXPERTS_FUNCTIONS.register("samebits", experts_function)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:
        pass
    else:
        ALL_FP8_EXPERTS_FUNCTIONS.register("samebits", fp8_experts)
    if "samebits" not in AttentionInterface._global_mapping:
        own = PreTrainedModel.get_correct_attn_implementation
        PreTrainedModel.get_correct_attn_implementation = _refusing(own)  # type: ignore[method-assign]
    AttentionInterface.register("samebits", attention_function)
    # It looks into functions, which cannot be traced.
    AttentionMaskInterface.register("samebits", torch.compiler.disable(_mask))


def _refusing(own: Callable[..., str]) -> Callable[..., str]:
    """A model's check of its ``attn_implementation``, with an error if its layers would not ask for it."""

    @functools.wraps(own)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, *args: Any, **named: Any) -> str:
        if requested_attention == "samebits" and not _asks_for_attention(
            type(self).__module__, self._can_set_attn_implementation()
        ):
            raise ValueError(
                f"samebits.transformers: {type(self).__name__}: attn_implementation: its layers compute"
                ' attention themselves and cannot take "samebits"; load it without, and run it under'
                " samebits.batch_invariant" + see("attention-of-its-own")
            )
        return own(self, requested_attention, *args, **named)

    return get_correct_attn_implementation


@functools.cache
def _asks_for_attention(module: str, follows: bool) -> bool:
    """Whether models of a module ask for attention, or have none of their own, as `transformers` says.

    It says so of those, too, that look it up in a table of classes.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return follows
    return follows and re.search(r"^\w*ATTENTION_CLASSES = \{", source, re.MULTILINE) is None


class _Flag(enum.IntFlag):
    CAUSAL = enum.auto()
    START = enum.auto()
    LENGTH = enum.auto()
    PACKED = enum.auto()
    DROPPED = enum.auto()


class Spans(NamedTuple):
    """Which keys queries see, in the arguments of :func:`samebits.attention`.

    Attributes:
        causal: whether a query sees no key after its own position.
        left: how many keys it sees before it, and after it if not causal; -1 for all.
        start: int32 ``[batch]``: ``key_start`` behind a segment of slots, for a cache that has dropped keys.
        length: int32 ``[batch]``: ``key_length``.
        padding: bool ``[batch, keys]``: which keys there are; behind a segment of slots if keys were dropped.
        offsets: int32 ``[n + 1]``: packed sequences in the tokens of the whole batch.
        dropped: whether the cache has dropped keys.
    """

    causal: bool
    left: int
    start: Tensor | None = None
    length: Tensor | None = None
    padding: Tensor | None = None
    offsets: Tensor | None = None
    dropped: bool = False

    def pack(self, batch: int, device: torch.device | str) -> Tensor:
        """As a tensor. Its sizes hold what the CPU must know, its values what only the GPU may know."""
        flags = _Flag.CAUSAL * self.causal | _Flag.DROPPED * self.dropped
        if self.offsets is not None:
            flags, values = flags | _Flag.PACKED, self.offsets[None]
        else:
            flags |= _Flag.START * (self.start is not None) | _Flag.LENGTH * (self.length is not None)
            zero = torch.zeros(batch, dtype=torch.int32, device=device)
            some = (zero if t is None else t for t in (self.start, self.length))
            values = torch.stack([*some]).T  # each of them contiguous
        if self.padding is not None:  # behind the bytes of the others, and up to a multiple of their size
            numbers = values.contiguous().view(torch.int8)
            shown = F.pad(self.padding, (0, -self.padding.shape[1] % 4)).view(torch.int8)
            values = torch.cat([numbers, shown], 1)
        return values[:, None, None].expand(-1, 1 + flags, 2 + self.left, -1)

    @classmethod
    def unpack(cls, t: Tensor, keys: int) -> Spans:
        """From such a tensor, for so many slots of keys."""
        flags, left = _Flag(t.shape[1] - 1), t.shape[2] - 2
        spans = cls(_Flag.CAUSAL in flags, left, dropped=_Flag.DROPPED in flags)
        if _Flag.PACKED in flags:
            return spans._replace(offsets=trusted(t[0, 0, 0]))
        values = t[:, 0, 0]
        if t.dtype == torch.int8:
            keys += SEGMENT * spans.dropped
            spans = spans._replace(padding=values[:, _NUMBERS : _NUMBERS + keys].view(torch.bool))
            values = values[:, :_NUMBERS].view(torch.int32)
        return spans._replace(
            start=values[:, 0].contiguous() if _Flag.START in flags else None,
            length=values[:, 1].contiguous() if _Flag.LENGTH in flags else None,
        )

    @property
    def plain(self) -> bool:
        """Whether it is a pattern alone, and no window that goes both ways."""
        parts = (self.start, self.length, self.padding, self.offsets)
        return not self.dropped and all(t is None for t in parts) and (self.causal or self.left < 0)

    @property
    def window(self) -> tuple[int, int]:
        return self.left, 0 if self.causal else self.left


_NUMBERS = 8
"""Bytes of a start and a length."""


def begins_later(told: Tensor) -> bool:
    """Whether a packed :class:`Spans` hides keys before others that it shows, in any row."""
    spans = Spans.unpack(told, told.shape[-1] - _NUMBERS)
    if spans.dropped or spans.padding is not None or spans.offsets is not None:
        return True
    return spans.start is not None and bool((spans.start > 0).any())


# ---- the mask function


def _mask(**asked: Any) -> Tensor:
    """What ``transformers`` asks its mask functions for: see ``transformers.masking_utils.sdpa_mask``.

    Queries have the positions from ``q_offset`` on, slots of keys those from ``kv_offset`` on, padding
    included. ``attention_mask`` is indexed by positions. Lengths are integers; ``q_offset`` may be on the
    device.
    """
    from transformers.masking_utils import sdpa_mask

    spans = spans_of(asked)
    if spans is not None and not (_may_change(asked) and spans.left < 0 and spans.offsets is None):
        return spans.pack(asked["batch_size"], device_of(asked))
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen: Any = sdpa_mask(**asked | whole)
    assert isinstance(seen, Tensor)  # it skips none
    return seen


def _may_change(asked: dict[str, Any]) -> bool:
    """Whether a model wants a mask in any case: it selects keys by it. Without a window that changes no bit.

    With a static cache masks are made in any case, too, for graphs that read them.
    """
    static = isinstance(asked.get("q_offset"), Tensor)
    return not asked.get("allow_is_causal_skip", True) and (
        not static or hasattr(asked.get("config"), "index_topk")
    )


def spans_of(asked: dict[str, Any]) -> Spans | None:
    """What a mask function is asked for, or None if spans cannot tell it."""
    from transformers.masking_utils import causal_mask_function

    pattern = _pattern(asked.get("mask_function", causal_mask_function), asked.get("local_size"))
    if pattern is None:
        return None
    if "q_length" in asked:
        queries, offset = asked["q_length"], asked.get("q_offset", 0)
    else:  # older versions
        queries, offset = len(asked["cache_position"]), asked["cache_position"][0]
    sizes = asked["batch_size"], queries, asked["kv_length"], offset, asked.get("kv_offset", 0)
    return _spans(pattern, *sizes, asked.get("attention_mask"), device_of(asked))


def spans_of_padding(padding: Tensor, causal: bool, window: int | None, queries: int) -> Tensor | None:
    """What tells of padding ``[batch, keys]``, where the last query has the last key. None: nothing can."""
    batch, keys = padding.shape
    pattern = causal, -1 if window is None else window - 1, None
    found = _spans(pattern, batch, queries, keys, keys - queries, 0, padding, padding.device)
    return None if found is None else found.pack(batch, padding.device)


def packed_by(position_ids: Tensor | None) -> Tensor | None:
    """The offsets of sequences that are packed into a row, if these positions ``[1, tokens]`` begin anew."""
    from transformers.masking_utils import find_packed_sequence_indices

    if position_ids is None or position_ids.ndim != 2:
        return None
    segments = find_packed_sequence_indices(position_ids)
    return None if segments is None else trusted(_offsets(segments))


def device_of(asked: dict[str, Any]) -> Any:
    """Where a mask is to be made."""
    return asked.get("device", "cpu") if "q_length" in asked else asked["cache_position"].device


def _spans(
    pattern: tuple[bool, int, Tensor | None],
    batch: int,
    queries: int,
    keys: int,
    offset: int | Tensor,
    dropped: int,
    padding: Tensor | None,
    device: torch.device | str,
) -> Spans | None:
    """A pattern with these sizes, offsets and padding, or None if spans cannot tell it."""
    causal, left, segments = pattern
    if segments is not None:
        if dropped or padding is not None or keys != queries:
            return None
        return Spans(causal, left, offsets=_offsets(segments.expand(batch, -1)))
    if not causal:
        aligned = isinstance(offset, int) and offset == 0 and queries == keys
        if dropped or (left >= 0 and not aligned):
            return None
        shown = None if padding is None else _of_keys(padding, keys)
        # A window that goes both ways counts from a query's own slot: `key_length` would move the queries.
        start, length, shown = (None, None, shown) if left >= 0 else _without_gaps(shown)
        return Spans(False, left, start, length, shown)
    if dropped and not 0 <= left <= keys - queries:
        return None  # queries would see keys that are not there
    used = offset + queries - dropped
    if isinstance(used, int) and used > keys:
        return None
    start = length = shown = None
    if padding is not None:
        shown = _of_keys(padding, keys + dropped)
        if not dropped:  # causal queries do not see what is padded behind them
            start, _, shown = _without_gaps(shown)
        else:  # keys that were shown keep the positions of those after them, but for whole segments
            count = shown[:, :dropped].sum(1, keepdim=True) % SEGMENT
            before = torch.arange(SEGMENT, 0, -1, device=shown.device) <= count
            shown = torch.cat([before, shown[:, dropped:]], 1)
    elif dropped:
        start = torch.full((batch,), -dropped % SEGMENT, dtype=torch.int32, device=device)
    if isinstance(used, Tensor):
        length = used.to(torch.int32).expand(batch)
    elif used < keys:
        length = torch.full((batch,), used, dtype=torch.int32, device=device)
    if start is not None and length is not None:
        start = torch.minimum(start, length)  # the padding may show a row's first key before there is one
    return Spans(True, left, start, length, shown, dropped=dropped > 0)


def _of_keys(padding: Tensor, keys: int) -> Tensor:
    """Padding of so many keys, as booleans."""
    return F.pad(padding[:, :keys].to(torch.bool), (0, max(0, keys - padding.shape[1])))


def _without_gaps(shown: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The first key of each row and the one after the last, int32; or `shown`, if a row has none or a gap.

    Both give the same bits, and kernels are faster with the former. This waits for a GPU. So it does not ask
    while a graph is captured.
    """
    if shown is None or shown.is_meta or shown.shape[1] == 0:
        return None, None, shown
    if shown.is_cuda and torch.cuda.is_current_stream_capturing():
        return None, None, shown
    numbers = shown.to(torch.uint8)
    start, count = numbers.argmax(1), shown.count_nonzero(1)
    stop = shown.shape[1] - numbers.flip(1).argmax(1)
    if ((stop - start != count) | (count == 0)).any():
        return None, None, shown
    return start.to(torch.int32), stop.to(torch.int32), None


class _Anything:
    """Stands for any value of a captured variable, and keeps it."""

    value: Any = None


def _pattern(function: Any, size: int | None) -> tuple[bool, int, Tensor | None] | None:
    """Causal or not, the window to the left, and numbers of packed sequences; None for another pattern.

    A mask function of ``transformers`` is made of nested functions. It is compared with those that this
    module knows, by their code and all that they capture.
    """
    from transformers import masking_utils as m

    known = [(m.causal_mask_function, True, -1), (m.bidirectional_mask_function, False, -1)]
    if isinstance(size, int) and size > 0:
        known.append((m.sliding_window_causal_mask_function(size), True, size - 1))
        if hasattr(m, "sliding_window_bidirectional_mask_function"):
            known.append((m.sliding_window_bidirectional_mask_function(size), False, size))
    anything: Any = _Anything()
    for own, causal, left in known:
        if _same(function, own):
            return causal, left, None
        segments: Any = _Anything()
        packed = m.packed_sequence_mask_function(segments)
        forms = [(own, packed)]
        if hasattr(m, "remap_positions_for_packed_sequence"):  # newer versions, in either order
            positions = m.remap_positions_for_packed_sequence(own, anything)
            forms += [(packed, positions), (positions, packed)]
        if any(_same(function, m.and_masks(*form)) for form in forms):
            return causal, left, segments.value
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two functions do the same, as far as can be told from what they are made of."""
    if isinstance(b, _Anything):
        b.value = a
        return True
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, FunctionType):
        parts = ([c.cell_contents for c in f.__closure__ or ()] for f in (a, b))
        return a.__code__ is b.__code__ and _same(*map(tuple, parts))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, int) and a == b


def _offsets(segments: Tensor) -> Tensor:
    """Where packed sequences begin in the tokens of all rows, and the end.

    In the capture of a CUDA graph nobody can wait for their number. So there are as many as tokens, and the
    last of them are empty.
    """
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True).flatten()
    if capturing(segments):
        tokens = torch.arange(begins.numel(), device=begins.device, dtype=torch.int32)
        found = torch.where(begins, tokens, begins.numel()).sort().values
    else:
        found = begins.nonzero()[:, 0]
    return F.pad(found, (0, 1), value=begins.numel()).to(torch.int32)


# ---- the attention function


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """:func:`samebits.attention` of ``[batch, heads, tokens, size]``, as layers of models call it."""
    _refuse(dropout, others)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if attention_mask is not None and attention_mask.dtype not in (torch.int32, torch.int8):
        if cu_seq_lens_q is not None:
            raise ValueError("samebits.transformers: attention_mask: expected none with cu_seq_lens_q")
        return _attend(module, q, k, v, mask=_with_bias(attention_mask, position_bias), **options), None
    if attention_mask is not None:
        spans = Spans.unpack(attention_mask, k.shape[1])
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None and not causal:
            raise ValueError("samebits.transformers: sliding_window: expected none without a mask or causal")
        spans = Spans(causal, -1 if sliding_window is None else sliding_window - 1)
    options |= {"window": spans.window, "mask": position_bias}
    offsets = (spans.offsets, spans.offsets) if cu_seq_lens_q is None else (cu_seq_lens_q, cu_seq_lens_k)
    if offsets[0] is not None:
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out = _attend(module, *flat, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **options)
        return out.unflatten(0, q.shape[:2]), None
    length = spans.length
    if spans.dropped:
        k, v = (F.pad(t, (0, 0, 0, 0, SEGMENT, 0)) for t in (k, v))
        options["mask"] = _behind(position_bias)
        length = None if length is None else length + SEGMENT
    if spans.padding is not None:
        options["mask"] = _with_bias(spans.padding[:, None, None], options["mask"])
    return _attend(module, q, k, v, key_start=spans.start, key_length=length, **options), None


def _behind(bias: Tensor | None) -> Tensor | None:
    """A bias of keys that a segment of slots was put before."""
    return bias if bias is None or bias.shape[-1] == 1 else F.pad(bias, (SEGMENT, 0))


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if isinstance(module, Absorbed):
        weight, size = module.kv_b_proj.weight, module.qk_nope_head_dim
        q = absorbed(q.transpose(-3, -2), weight, size).transpose(-3, -2)
    out = attention(q, k, v, **options)
    assert isinstance(out, Tensor)  # without return_lse
    if isinstance(module, Absorbed):
        out = expanded(out.transpose(-3, -2), weight, size).transpose(-3, -2)
    return out


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    """Refuse what would change the result and is not implemented."""
    wanted = {name: others.get(name) for name in ("output_attentions", "head_mask", "sinks", "cache")}
    if dropout:
        wanted["dropout"] = dropout
    for name, value in wanted.items():
        if value is not None and value is not False:
            instead = '; generate_batch takes "sdpa" in the mode' if name == "cache" else ""
            raise NotImplementedError(
                f'samebits.transformers: {name}: attn_implementation="samebits" does not have it{instead}'
            )


def _with_bias(mask: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


# ---- the experts function


def experts_function(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """A layer of experts, as ``transformers.integrations.moe`` has them. Results are ``[tokens, hidden]``."""
    count = module.num_experts
    if getattr(module, "_is_expert_parallel", False):  # slots of other processes have numbers from `count` on
        top_k_weights = top_k_weights.masked_fill(top_k_index >= count, 0.0)
    to = Routed(top_k_index, count, _rows_of_batch(hidden_states))
    with without_autocast(hidden_states.device):  # as PyTorch's grouped products are without it
        out = experts(
            hidden_states,
            to,
            top_k_weights,
            _linear(module, "gate_up_proj" if module.has_gate else "up_proj", to),
            module._apply_gate if module.has_gate else module.act_fn,
            _down(module, to),
            module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
        )
    return out.to(hidden_states.dtype)


def _linear(module: Any, name: str, to: Routed) -> Callable[[Tensor], Tensor]:
    """The product with a weight: in FP8 if ``samebits.convert`` said so, or if the weight has scales."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    scale = getattr(module, f"{name}_scale_inv", None)
    if not module.is_transposed:
        weight, scale = weight.mT, None if scale is None else scale.mT
    fp8 = getattr(module, "_samebits_in_fp8", False) if scale is None else scale
    contract = vars(module).get("samebits_contract")
    return lambda x: to.linear(x, weight, bias, fp8, contract)


def _down(module: Any, to: Routed) -> Callable[[Tensor], Tensor]:
    """The last product. An engine on several GPUs has one that adds over them."""
    split = vars(module).get("samebits_split_down")
    return _linear(module, "down_proj", to) if split is None else lambda x: split(x, to)


def are_experts(module: nn.Module) -> bool:
    """Whether a module is a layer of experts by ``use_experts_implementation`` of ``transformers``."""
    return hasattr(module, "is_transposed") and callable(getattr(module, "_apply_gate", None))


def are_converted(module: nn.Module) -> bool:
    """Whether :func:`convert_experts` was called for a layer of experts."""
    return hasattr(type(module), "_samebits_in_fp8")


def why_not_converted(experts: nn.Module, asked: tuple[Contract | None, str | None, Any]) -> str | None:
    """Why :func:`convert_experts` does not suit a layer of experts; None if it does.

    Args:
        asked: the contract, `fp8` and the dtype of results.
    """
    contract, fp8, out_dtype = asked
    if out_dtype is not None:
        return "experts take no out_dtype: convert them in a call of their own"
    if contract is not None and fp8 is not None:
        return "experts in FP8 take no contract: convert them in a call of their own"
    if "forward" in vars(experts):
        return "its forward was replaced on the instance: convert first, then wrap"
    if nn.utils.parametrize.is_parametrized(experts):
        return "it is parametrized: convert first, then parametrize"
    for name, weight in experts.named_parameters():
        if weight.dtype.itemsize == 1:
            return "its weights are FP8 already: samebits.batch_invariant runs them"
        if weight.dtype not in SUPPORTED:
            return f"its {name} is {weight.dtype}; samebits takes float32, bfloat16 and float16"
    return None


def convert_experts(experts: nn.Module, contract: Contract | None, fp8: bool) -> None:
    """Let a layer of experts compute under a contract, or in block FP8.

    It does so whatever its ``experts_implementation``, in any mode.
    """
    kind: Any = type(experts)
    experts.__class__ = _converted(kind, fp8)
    vars(experts)["samebits_contract"] = contract


@functools.cache
def _converted(kind: Any, fp8: bool) -> Any:
    """A subclass of the same name, by which others know layers. What is unpickled is converted again."""

    def reduce(self: Any, protocol: Any) -> Any:
        return _new_converted, (kind, fp8), self.__dict__

    given = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own: Any = {"forward": experts_function, "__reduce_ex__": reduce, "_samebits_in_fp8": fp8}
    return type(kind)(kind.__name__, (kind,), given | own)


def _new_converted(kind: Any, fp8: bool) -> Any:
    made = _converted(kind, fp8)
    return made.__new__(made)


def _rows_of_batch(tokens: Tensor) -> int:
    """How many rows of a batch were flattened to these tokens, if they are a view of it. Otherwise 1.

    Autograd has recorded the shape that was flattened. Where it has not, the view's base tells it.
    """
    if torch.compiler.is_compiling():
        return 1
    made = tokens.grad_fn
    if made is not None and made.name() in ("ViewBackward0", "UnsafeViewBackward0"):
        shape = made._saved_self_sym_sizes  # type: ignore[attr-defined]
    else:
        whole = tokens._base
        shape = whole.shape if whole is not None and whole.is_contiguous() and tokens.is_contiguous() else ()
    flattens = len(shape) == 3 and (shape[0] * shape[1], shape[2]) == tuple(tokens.shape)
    return int(shape[0]) if flattens else 1
