"""Attention and experts of ``transformers`` under the mode, whatever implementation a model was loaded with.

Layers of its models ask registries for the functions that compute attention and experts, and models ask one
for the function that makes masks. Under the mode these answer with this library's:

* **Masks** are those that the model expects, so its own code may change them. A mask of a known pattern
  carries what :mod:`samebits.transformers` knows of positions, as an attribute.
* **Attention** takes what a mask carries, or else the mask itself: a query then counts the keys that its row
  shows. What :func:`samebits.attention` does not have runs as the model was loaded, and is reported if its
  bits may depend on padding or on a cache.
* **Models with attention of their own** do not ask. Their form stays. Their sums count from a row's start, so
  a model whose mask hides keys before others is reported as it is called.

All changes are made once ``transformers`` is loaded, and are undone with the others of the mode.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits import transformers as ours
from samebits.mode.arguments import takes
from samebits.mode.calls import report_by_name
from samebits.mode.patches import Patch, Undo, asks, expect, install_when_loaded, names_in, replace

__all__ = ["cover_interfaces"]

_CARRIED = "_samebits_spans"
"""The attribute of a mask that has what is known of positions, as a tensor."""

Function = Callable[..., Any]


class _Trial(threading.local):
    on = False


_trial = _Trial()


def _in_mode() -> bool:
    return _trial.on or asks.in_mode()


@contextmanager
def _trial_of_mode() -> Iterator[None]:
    """Registries answer as under the mode, in this thread."""
    _trial.on = True
    try:
        yield
    finally:
        _trial.on = False


def cover_interfaces() -> None:
    """Make the changes: now, or when ``transformers`` is loaded."""
    install_when_loaded("transformers.modeling_utils", PATCHES)


# ---- Masks


def _masks() -> Undo:
    from transformers import masking_utils as m

    make = torch.compiler.disable(_mask)  # it looks into functions, which cannot be traced

    def in_mode(own: Function, maker: Function) -> Function:
        @functools.wraps(own)
        def mask(**asked: Any) -> Any:  # it may be kept: transformers registers what it looked up again
            if not _in_mode():
                return own(**asked)
            windowed = asked.get("local_size") is not None or maker is m.flash_attention_mask
            if windowed or not torch.compiler.is_compiling():
                return make(maker, **asked)
            # Without a window a mask alone gives the same bits. So no graph breaks.
            alone = asked.get("attention_mask") is None and asked.get("allow_is_causal_skip", True)
            alone &= asked.get("mask_function") is m.causal_mask_function and maker is m.sdpa_mask
            return None if alone and asked.get("q_length") == asked["kv_length"] else maker(**asked)

        return mask

    def whole(**asked: Any) -> Any:  # flex attention has blocks, which would be compiled for nothing
        return m.sdpa_mask(**asked | {"allow_is_causal_skip": False})

    forms = {own: in_mode(own, own) for own in (m.sdpa_mask, m.eager_mask, m.flash_attention_mask)}
    forms[m.flex_attention_mask] = in_mode(m.flex_attention_mask, whole)
    own_item: Any = m.AttentionMaskInterface.__getitem__

    def __getitem__(self: Any, name: str) -> Function:  # noqa: N807
        found: Function = own_item(self, name)
        return forms.get(found, found) if _in_mode() else found

    return replace(m.AttentionMaskInterface, "__getitem__", __getitem__)


def _mask(own: Function, **asked: Any) -> Tensor | None:
    """The mask that `own` makes, with what is known of positions."""
    from transformers.masking_utils import flash_attention_mask

    seen: Tensor | None = own(**asked)
    flat = own is flash_attention_mask
    if seen is None and not flat:  # all keys are seen, or causally from the first on
        return None
    spans = ours.spans_of(asked)
    if spans is None or (seen is None and spans.plain):
        return seen
    if seen is not None and flat:  # a static cache has more slots than there are tokens
        seen = F.pad(seen, (0, asked["kv_length"] - seen.shape[1]))
    if seen is None:
        seen = torch.ones(
            asked["batch_size"], asked["kv_length"], dtype=torch.bool, device=ours.device_of(asked)
        )
    setattr(seen, _CARRIED, spans.pack(asked["batch_size"], ours.device_of(asked)))
    return seen


def _carried(mask: Any, queries: int, keys: int) -> Tensor | None:
    """What a mask carries, if it is one for so many queries and keys."""
    found: Tensor | None = getattr(mask, _CARRIED, None)
    if found is None or mask.shape[-1] != keys or (mask.ndim == 4 and mask.shape[2] != queries):
        return None
    return found


# ---- Attention


def _attention() -> Undo:
    from transformers.integrations import flash_attention as f
    from transformers.integrations import flex_attention as x
    from transformers.integrations import sdpa_attention as s
    from transformers.modeling_utils import AttentionInterface

    forms: dict[Function, Function] = {
        own: functools.partial(_attend, own, arguments)
        for own, arguments in (
            (s.sdpa_attention_forward, _of_sdpa),
            (f.flash_attention_forward, _of_flash),
            (x.flex_attention_forward, _of_flex),
        )
    }
    own_item: Any = AttentionInterface.__getitem__
    own_get: Any = AttentionInterface.get_interface

    def __getitem__(self: Any, name: str) -> Function:  # noqa: N807
        found: Function = own_item(self, name)
        # A kernel of a hub has its name bound to it.
        return forms.get(getattr(found, "func", found), found) if _in_mode() else found

    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        found: Function = own_get(self, attn_implementation, default)
        return functools.partial(_attend, found, _of_eager) if found is default and _in_mode() else found

    item = replace(AttentionInterface, "__getitem__", __getitem__)
    get = replace(AttentionInterface, "get_interface", get_interface)
    return lambda: (get(), item())


class _NotOursError(Exception):
    """A layer's own attention is to run. The message, if there is one, is reported."""


def _attend(
    own: Function,
    arguments: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention: this library's, with what `arguments` takes of the call, or its `own`."""
    try:
        if not takes(query, key, value):
            raise _NotOursError  # PyTorch's operators report what they do not cover
        taken = arguments(own, module, query, key, value, attention_mask, given)
    except _NotOursError as why:
        if str(why):
            report_by_name(f"attention of {type(module).__name__} {why}")
        result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **given)
        return result
    return ours.attention_function(module, *taken[:4], **taken[4])


Taken = tuple[Tensor, Tensor, Tensor, Any, dict[str, Any]]


def _of_eager(
    own: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    given: dict[str, Any],
) -> Taken:
    """Without a mask it sees all keys. It has no window but the mask's."""
    if given.get("dropout"):
        raise _NotOursError("with dropout")
    if _wants_weights(given):
        raise _NotOursError("with output_attentions" * _hides_before(mask, query, key))
    if not _is_known(own, given.get("s_aux") is not None):
        raise _NotOursError("in a form of its own" * _hides_before(mask, query, key))
    named = {name: given.get(name) for name in ("scaling", "softcap", "s_aux", "position_bias")}
    return query, key, value, _tells(mask, query, key), named | {"is_causal": False}


def _of_flex(own: Function, module: nn.Module, *call: Any) -> Taken:
    mask = call[3]
    if mask is not None and not isinstance(mask, Tensor):  # blocks: flex_attention itself is reported
        raise _NotOursError
    return _of_eager(_of_flex, module, *call)


def _of_sdpa(
    own: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    given: dict[str, Any],
) -> Taken:
    """Without a mask it is causal if the layer is, from the first key on. It has no window but the mask's."""
    if given.get("cache") is not None:
        raise _NotOursError("with a window and a paged cache" * (given.get("sliding_window") is not None))
    if given.get("dropout") or given.get("softcap") is not None:  # PyTorch's function reports the former
        raise _NotOursError
    named = {name: given.get(name) for name in ("scaling", "position_bias")}
    if mask is not None:
        return query, key, value, _tells(mask, query, key), named
    causal = query.shape[2] > 1 and _is_causal(module, given)
    if causal and key.shape[2] != query.shape[2]:
        if key.shape[2] < query.shape[2]:
            raise _NotOursError
        key, value = (t[:, :, : query.shape[2]] for t in (key, value))
        if named["position_bias"] is not None:
            named["position_bias"] = named["position_bias"][..., : query.shape[2]]
    return query, key, value, None, named | {"is_causal": causal}


def _of_flash(
    own: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    given: dict[str, Any],
) -> Taken:
    """The last query has the last key. Windows are the layer's, and a mask is padding ``[batch, keys]``."""
    from transformers.integrations.flash_attention import get_target_dtype

    if given.get("cache") is not None:
        raise _NotOursError("with a paged cache")
    if given.get("dropout"):
        raise _NotOursError("with dropout")
    dtype = get_target_dtype(query, module)
    if dtype is not None:
        query, key, value = (t.to(dtype) for t in (query, key, value))
    names = ("scaling", "softcap", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k")
    causal = _is_causal(module, given)
    named = {name: given.get(name) for name in names} | {"is_causal": causal}
    queries, keys = query.shape[2], key.shape[2]
    if named["cu_seq_lens_q"] is not None:
        return query, key, value, None, named
    told = _carried(mask, queries, keys)
    if mask is not None and told is None:
        told = ours.spans_of_padding(mask, causal, named["sliding_window"], queries)
        if told is None:
            raise _NotOursError("with a window that goes both ways, and padding")
    elif mask is None and len(query) == 1 and queries == keys > 1:
        offsets = ours.packed_by(given.get("position_ids"))
        named |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    return query, key, value, told, named


def _is_causal(module: nn.Module, given: dict[str, Any]) -> bool:
    found = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if found is None else found)


def _tells(mask: Any, query: Tensor, key: Tensor) -> Any:
    """What a mask carries, or itself with four dimensions."""
    carried = _carried(mask, query.shape[2], key.shape[2])
    if carried is not None or mask is None or mask.ndim >= 4:
        return mask if carried is None else carried
    return mask[(None,) * (4 - mask.ndim)]


def _hides_before(mask: Any, query: Tensor, key: Tensor) -> bool:
    """Whether a mask may hide keys before others that it shows: sums begin elsewhere then."""
    if mask is None:
        return False
    carried = _carried(mask, query.shape[2], key.shape[2])
    return carried is None or ours.begins_later(carried)


def _wants_weights(given: dict[str, Any]) -> bool:
    """Whether the model is asked for probabilities, which only an eager function returns."""
    from transformers.utils import output_capturing

    if given.get("output_attentions"):
        return True
    collector: Any = output_capturing._active_collector
    collected = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return any(name.endswith("attentions") for name in collected or ())


_STANDARD = set(
    """
    F device dtype float float32 functional getattr hasattr head_dim matmul maybe_autocast contiguous nn
    num_key_value_groups repeat_kv shape size softmax dropout tanh to torch training transpose type
    attention_mask key key_states kwargs module position_bias query query_states scaling sliding_window
    softcap value value_states
    """.split()  # noqa: SIM905
)
_SINKS = set("cat expand keepdim logsumexp max reshape sigmoid sinks unsqueeze values view".split())  # noqa: SIM905


@functools.cache
def _is_known(own: Function, sinks: bool) -> bool:
    """Whether an eager function is the usual one: its code has names of no other computations."""
    if own is _of_flex:
        return True
    code = getattr(inspect.unwrap(own), "__code__", None)
    if not isinstance(code, CodeType):
        return False
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {*code.co_names, *parameters} <= (_STANDARD | _SINKS if sinks else _STANDARD)


# ---- Experts


def _experts() -> Undo:
    from transformers.integrations import moe

    known = {*moe.ExpertsInterface._global_mapping.values()}
    own_get = moe.ExpertsInterface.get_interface

    def get_interface(self: Any, experts_implementation: str, default: Function) -> Function:
        found: Function = own_get(self, experts_implementation, default)
        of_fp8 = type(self) is not moe.ExpertsInterface  # which are covered as layers
        replaced = not of_fp8 and (found is default or found in known) and _in_mode()
        return ours.experts_function if replaced else found

    return replace(moe.ExpertsInterface, "get_interface", get_interface)


# ---- Models


def _models() -> Undo:
    from transformers.modeling_utils import PreTrainedModel

    look = torch.compiler.disable(_look_at)  # it reads masks

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # The compiler knows architectures by name alone. It breaks its graph for these.
        if _in_mode() and (not torch.compiler.is_compiling() or self.config.model_type in _BY_NAME):
            look(self, args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    return replace(PreTrainedModel, "__call__", __call__)


_layers: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def _look_at(model: Any, args: Any, kwargs: Any) -> None:
    """Report a model with attention of its own whose mask hides keys before others, and what is known."""
    implementation = str(model.config._attn_implementation)
    known = _layers.setdefault(model, {})
    if implementation not in known:
        known[implementation] = _own_attention(model, implementation)
    layer, kind = known[implementation], model.config.model_type
    if not layer and kind not in _KNOWN and kind not in _SHIFTS:
        return
    given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    masks = {name: mask for name in _MASKS if isinstance(mask := given.get(name), Tensor) and mask.ndim == 2}
    for name, mask in masks.items():
        if (layer or kind in _SHIFTS) and _shows_after_hiding(mask):
            what = f"attention of {layer}" if layer else f"the architecture {kind} of transformers"
            report_by_name(f"{what} with keys that {name} hides before others")
    if kind in _KNOWN:
        padded = any(map(_hides, masks.values()))
        if _KNOWN[kind] is _FLATTENS:
            depends = padded and torch.is_grad_enabled() and _trains_in_16_bits(model)
        else:
            depends = padded or _has_keys(given.get("past_key_values"))
        if depends:
            report_by_name(f"the architecture {kind} of transformers ({_KNOWN[kind]})")
    if kind in _STEPS and _is_step(model, given):
        report_by_name(f"the architecture {kind} of transformers ({_STEPS[kind]})")


_MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")
_FLATTENS = "in gradients of weights, which take a flattened batch as one sequence"
_KNOWN = dict.fromkeys(
    """
    afmoe cohere2_moe gpt2 hy_v3 inkling_text jetmoe laguna llama4_text mellum minimax_m3_vl_text openai-gpt
    opt qwen2_moe qwen3_5_moe_text qwen3_next qwen3_omni_moe_talker_text qwen4_exp_text recurrent_gemma
    """.split(),  # noqa: SIM905
    _FLATTENS,
) | {
    "deepseek_v4": "compressed keys lie behind those of all tokens",
    "hy_v4": "selected keys depend on the padded length",
    "inkling2_text": "selected keys depend on the padded length",
    "mpt": "a bias of positions counts from the padded end",
}
"""Architectures whose bits depend on padding or on the cache, by their own code, and what in it does that."""

_STEPS = {"recurrent_gemma": "a step of decoding sums its convolution in another order"}
"""Architectures whose state is in their layers, and whose steps have other bits than a prefill."""

_SHIFTS = {"moss_transcribe_diarize", "squeezebert"}
"""Those whose positions, or sums in layers that look otherwise, count from a row's padded start."""

_BY_NAME = {*_KNOWN, *_SHIFTS} | {
    *"""
    big_bird bloom codegen convbert cpmant deberta deberta-v2 flaubert funnel git gpt_neo gpt_neox_japanese
    gptj ibert longformer luke megatron-bert mpnet mra nystromformer perceiver rembert roformer rwkv
    squeezebert tapas trocr xglm xlm yoso
    """.split()  # noqa: SIM905
}
"""Those, and others with attention of their own."""


def _hides(mask: Tensor) -> bool:
    return bool((mask == 0).any())


def _has_keys(cache: Any) -> bool:
    return cache is not None and bool(cache.get_seq_length())


def _is_step(model: Any, given: dict[str, Any]) -> bool:
    """Whether a model is called with one token, of which it keeps a state."""
    tokens = next((t for n in ("input_ids", "inputs_embeds") if (t := given.get(n)) is not None), None)
    if tokens is None or tokens.shape[1] != 1:
        return False
    keeps = given.get("use_cache")
    return bool(model.config.use_cache if keeps is None else keeps)


def _trains_in_16_bits(model: nn.Module) -> bool:
    return any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


def _shows_after_hiding(mask: Tensor) -> bool:
    """Whether a row of a mask ``[batch, keys]`` hides a key before one that it shows."""
    shown = mask != 0
    return bool((shown[:, 1:] & ~shown[:, :-1]).any())


def _own_attention(model: Any, implementation: str) -> str:
    """The name of a layer in which a model computes attention without asking, or an empty string.

    Models in a model are looked at as they are called.
    """
    from transformers.modeling_utils import PreTrainedModel

    todo: list[Any] = [*model.children()]
    while todo:
        layer = todo.pop()
        if isinstance(layer, PreTrainedModel):
            continue
        kind: Any = type(layer)
        if _computes_attention(kind, implementation):
            return str(kind.__name__)
        todo += layer.children()
    return ""


@functools.cache
def _computes_attention(kind: Any, implementation: str) -> bool:
    """Whether a layer has products and a softmax of its own."""
    if not kind.__module__.startswith("transformers"):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    if "get_interface(" in source:
        return False
    asks_pytorch = implementation == "sdpa" and "scaled_dot_product_attention(" in source
    multiplies = any(f"{name}(" in source for name in ("matmul", "bmm", "baddbmm", "einsum"))
    return "softmax(" in source.lower() and multiplies and not asks_pytorch


# ---- All of them


def _try_masks() -> None:
    from transformers import masking_utils as m

    asked = {*inspect.signature(m.sdpa_mask).parameters}
    expect(asked >= _ASKED, f"masking_utils.sdpa_mask: it is not asked for {sorted(_ASKED - asked)}")
    for create in (m.create_causal_mask, m.create_sliding_window_causal_mask, m.create_bidirectional_mask):
        asks_registry = "ALL_MASK_ATTENTION_FUNCTIONS" in names_in(create.__code__)
        expect(asks_registry, f"masking_utils.{create.__name__}: it asks no registry")
    padding = torch.tensor([[False, True, True]])
    sizes = {"batch_size": 1, "q_length": 3, "kv_length": 3, "attention_mask": padding}
    for name in ("sdpa", "eager", "flash_attention_2"):
        with _trial_of_mode():
            mask = m.ALL_MASK_ATTENTION_FUNCTIONS[name](**sizes)
        expect(hasattr(mask, _CARRIED), f"AttentionMaskInterface: {name} is looked up in another way")


_ASKED = {
    "batch_size",
    "q_length",
    "kv_length",
    "q_offset",
    "kv_offset",
    "mask_function",
    "attention_mask",
} | {
    "local_size",
    "allow_is_causal_skip",
}


def _try_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    from transformers.utils.output_capturing import _active_collector

    x = torch.ones(1, 1, 2, 4)
    for name in ("sdpa", "flash_attention_2", "eager"):
        with _trial_of_mode():
            found = ALL_ATTENTION_FUNCTIONS.get_interface(name, _nothing)
        expect(
            getattr(found, "func", None) is _attend, f"AttentionInterface: {name} is looked up in another way"
        )
    out = ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Module(), x, x, x, None)[0]
    expect(out.shape == (1, 2, 1, 4), "AttentionInterface: its functions return another shape")
    code = PreTrainedModel._can_set_attn_implementation.__func__.__code__  # type: ignore[attr-defined]
    expect(
        "ALL_ATTENTION_FUNCTIONS.get_interface(" in code.co_consts, "models ask for attention in another way"
    )
    expect(hasattr(_active_collector, "global_var"), "output_capturing: it collects in another way")


def _try_experts() -> None:
    from transformers.integrations import moe

    with _trial_of_mode():
        found = moe.ALL_EXPERTS_FUNCTIONS.get_interface("grouped_mm", _nothing)
    expect(found is ours.experts_function, "ExpertsInterface: functions are looked up in another way")
    expect(
        "get_interface" in names_in(moe.use_experts_implementation.__code__), "layers of experts do not ask"
    )


def _try_models() -> None:
    from transformers.modeling_utils import PreTrainedModel

    expect(issubclass(PreTrainedModel, nn.Module), "PreTrainedModel: it is no module")


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """In place of a layer's own function."""


PATCHES = (
    Patch("masks of models", _masks, _try_masks),
    Patch("attention of models", _attention, _try_attention),
    Patch("experts of models", _experts, _try_experts),
    Patch("calls of models", _models, _try_models),
)
