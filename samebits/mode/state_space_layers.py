"""Layers of ``transformers`` with state spaces and short convolutions, under the mode.

Modules of models have functions of some names (:data:`_FUNCTIONS`), and layers that call them. The functions
are exchanged. A layer's forward tells them what they are not given: which sequences its rows hold, and its
cache.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samebits.backends.recurrent import RecurrentState
from samebits.mode.exchanged import in_module, under_the_mode
from samebits.mode.recurrent_layers import (
    Sequences,
    cached_state,
    conv_update,
    over_sequences,
    sequences_of,
    wants_gradients,
)
from samebits.ops.causal_conv1d import causal_conv1d
from samebits.ops.selective_scan import selective_scan
from samebits.ops.ssd import ssd, ssd_layout
from samebits.ops.state_space import selective_state_update

__all__ = ["called"]

_MODELS = """
    mamba mamba2 falcon_mamba jamba bamba nemotron_h falcon_h1 granitemoehybrid zamba zamba2 lfm2 lfm2_moe
""".split()  # noqa: SIM905
_UNTOLD = "granitemoehybrid"
"""A model that does not tell its masks of ``position_ids``."""


class _Called(threading.local):
    """The layer that runs in this thread.

    Attributes:
        layer: the module, or None.
        sequences: ``seq_idx`` of its rows, or None where rows are sequences.
        mask: which tokens are a sequence's, or None for all.
        cache: that of the model, or None.
        scans: how many it has run in this call.
        positions: ``position_ids`` of a model that does not tell them to its masks.
    """

    layer: Any = None
    sequences: Tensor | None = None
    mask: Tensor | None = None
    cache: Any = None
    scans = 0
    positions: Tensor | None = None


called = _Called()


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that says what it was given."""
    takes = inspect.signature(own)
    cached = "cache_params" if "cache_params" in takes.parameters else "past_key_values"

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = takes.bind(layer, *args, **kwargs)
        cache, mask = given.arguments.get(cached), given.arguments.get("attention_mask")
        before = vars(called).copy()
        packed = isinstance(mask, Tensor) and mask.ndim == 3
        if packed:
            given.arguments["attention_mask"] = None
        called.layer, called.scans = layer, 0
        called.sequences = mask[..., 0] if isinstance(mask, Tensor) and packed else None
        known = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == given.args[1].shape[:2]
        called.mask, called.cache = mask if known else None, cache
        try:
            return own(*given.args, **given.kwargs)
        finally:
            vars(called).clear()
            vars(called).update(before)

    return under_the_mode(own, torch.compiler.disable(call))  # it cannot be traced


def _mask(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The mask of such layers; ``seq_idx``, of three dimensions, where ``position_ids`` start again."""
    positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
    mask = own(*args, **kwargs)
    if mask is not None or cache is not None or positions is None:
        return mask
    if kwargs.get("attention_mask") is not None or positions.ndim != 2 or positions.shape[1] < 2:
        return mask
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if not starts.any():
        return mask
    numbers = nn.functional.pad(starts.to(torch.int32), (1, 0)).cumsum(1, dtype=torch.int32)
    return numbers.expand(len(kwargs["inputs_embeds"]), -1)[..., None]


def _tell_positions(module: Any, model: type[nn.Module]) -> None:
    """Let a model's masks know its ``position_ids``."""
    own = model.forward
    takes = inspect.signature(own)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind(*args, **kwargs).arguments
        before, called.positions = called.positions, given.get("position_ids")
        try:
            return own(*args, **kwargs)
        finally:
            called.positions = before

    model.forward = under_the_mode(own, forward)
    for name in ("create_causal_mask", "create_recurrent_attention_mask"):
        create = getattr(module, name)

        def told(*args: Any, create: Callable[..., Any] = create, **kwargs: Any) -> Any:
            return create(*args, **{"position_ids": called.positions} | kwargs)

        setattr(module, name, under_the_mode(create, told))


def _packed(x: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """The argument that says how rows divide into sequences, if they do."""
    found = given.get("seq_idx") if called.sequences is None else called.sequences
    if found is not None:
        return {"seq_idx": found}
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if (found := given.get(name)) is not None and len(x) == 1:
            return {"cu_seqlens": found}
    return {}


def _conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **given: Any,
) -> Any:
    if activation not in (None, "silu", "swish"):
        return NotImplemented
    packed = _packed(hidden_states, given)
    out: Any = causal_conv1d(hidden_states.to(weight.dtype), weight, bias, activation=activation, **packed)
    return out.to(hidden_states.dtype)


def _scan_of_heads(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **given: Any
) -> Any:
    """A cache holds ``RecurrentState.data``."""
    named = ("D", "dt_bias", "dt_softplus", "dt_limit", "return_final_states")
    passed = {name: given[name] for name in named if name in given}
    passed["initial_states"] = _state(hidden_states, B, given.get("initial_states"))
    final = given.get("return_final_states", False)

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None, **sequences: Any) -> Any:
        found = ssd(x, dt, A, B, C, z=z, **passed, **sequences)
        return found if final else (found, None)

    z = given.get("z")
    operands = (hidden_states, dt, B, C, *([] if z is None else [z]))
    packed = _packed(hidden_states, given)
    if "seq_idx" in packed:
        y, after = run(*operands, **packed)
    else:
        told = Sequences() if called.mask is None else sequences_of(called.mask)
        y, after = over_sequences(told, run, operands, packed.get("cu_seqlens"))
    return (y, after.data) if final else y


def _state(x: Tensor, B: Tensor, data: Tensor | None) -> RecurrentState | None:
    """What is in a cache of heads ``x[batch, T, heads, P]`` with ``B[batch, T, groups, N]``."""
    return cached_state("ssd", ssd_layout(x, B), data)


def _scan_of_channels(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **given: Any,
) -> Any:
    """A prefill goes on from the state in the cache, where the layer forgets it."""
    cache = called.cache
    states = None if cache is None else cache.get_recurrent_state(called.layer.layer_idx, state_idx=0)
    if states is not None and states.ndim == 4:  # the layer calls head by head
        states = states[:, called.scans]
    called.scans += 1
    packed = _packed(hidden_states, given)
    return selective_scan(
        *(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state),
        initial_state=states,
        **packed,
    )


def _step_of_heads(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> Any:
    """What all channels of a head share comes expanded to these."""
    x, B, C = hidden_states[:, None], B[:, None], C[:, None]
    # A layer's prefill has limits, which its step forgets, and multiplies by the gate itself.
    limit = getattr(called.layer, "time_step_limit", None) or (0.0, math.inf)
    bias = None if dt_bias is None else dt_bias[:, 0]
    options: dict[str, Any] = {"initial_states": _state(x, B, state), "return_final_states": True}
    options |= {"D": D, "dt_bias": bias, "dt_softplus": dt_softplus, "dt_limit": limit}
    out = ssd(x, dt[:, None, :, 0], A[:, 0, 0], B, C, **options)[0][:, 0]
    return out if z is None else out * nn.functional.silu(z)


def _step_of_channels(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    **given: Any,
) -> Any:
    if wants_gradients(hidden_states, dt, A, B, C) or state.dtype != torch.float32:
        return NotImplemented
    named = ("z", "dt_bias", "dt_softplus", "dt_limit")
    passed = {name: given[name] for name in named if name in given}
    return selective_state_update(state, hidden_states, dt, A, B, C, D, **passed)


def _unfused(*_: Any, **__: Any) -> None:
    """Of a kernel that computes all of a layer: the layer then goes step by step."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": conv_update,
    "mamba_selective_scan": _scan_of_channels,
    "mamba_selective_state_update": _step_of_channels,
    "mamba_inner_fn": _unfused,
    "mamba2_chunk_scan": _scan_of_heads,
    "mamba2_selective_state_update": _step_of_heads,
    "mamba2_split_conv1d_scan_combined": _unfused,
}
"""What takes the place of a function with this name in a module of a model."""


def _exchange(name: str) -> None:
    module: Any = sys.modules[name]
    known = _FUNCTIONS.keys() & vars(module).keys()
    layers = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and kind.__module__ == name
        and known & {*inspect.unwrap(kind.forward).__code__.co_names}
    ]
    for function in known:
        setattr(module, function, under_the_mode(getattr(module, function), _FUNCTIONS[function]))
    for kind in layers:
        kind.forward = _forward(kind.forward)
    if hasattr(module, "create_recurrent_attention_mask"):
        own = module.create_recurrent_attention_mask
        mask = torch.compiler.disable(functools.partial(_mask, own))
        module.create_recurrent_attention_mask = under_the_mode(own, mask)
    if name.endswith(_UNTOLD):
        _tell_positions(module, module.GraniteMoeHybridModel)


for _model in _MODELS:
    _name = f"transformers.models.{_model}.modeling_{_model}"
    in_module(_name, functools.partial(_exchange, _name))
