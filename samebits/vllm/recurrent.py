"""Layers with a recurrent state: state spaces of Mamba 2 and gated delta rules.

What such a layer computes is replaced, but for its linear layers. Its page in vLLM's cache holds the last
inputs of its convolution and a row of :class:`samebits.backends.recurrent.RecurrentState`, in this order:
vLLM copies the first as a convolution's, and some versions run kernels of their own on it before they serve.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor, split_decodes_and_prefills

from samebits.backends.delta import layout
from samebits.engines.experts import without_weights
from samebits.engines.hooks import Hooks
from samebits.engines.recurrent import Packing, Step, convolved, gone_on
from samebits.ops.add_rms_norm import add_rms_norm
from samebits.ops.delta_rule import gated_delta_rule
from samebits.ops.gated import gated
from samebits.ops.ssd import ssd

__all__ = ["LAYERS", "install", "set_layers", "steps"]


def install(hooks: Hooks) -> None:
    """Round decays of Mamba 2 to the dtype of the model, as a trainer has loaded them."""
    own = mamba_mixer2.composed_weight_loader
    hooks.replace(mamba_mixer2, own.__name__, _rounding(own), "loader", "fn")


def _rounding(own: Callable[..., Any]) -> Callable[..., Any]:
    def composed_weight_loader(loader: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        dtype = torch.get_default_dtype()
        return own(loader, lambda weight: fn(weight.to(dtype)))

    return composed_weight_loader


@dataclass
class StateMetadata:
    """Which tokens of a step go on with which rows of the cache: sequences with one token, then others."""

    parts: list[tuple[slice, Step]]


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """For every kind of layer. CUDA graphs keep the memory of what decodes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = max(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self.rows = torch.zeros(most, dtype=torch.int64, device=device)
        self.begins = torch.ones(most, dtype=torch.bool, device=device)
        self.lead = kv_cache_spec.shapes[0][0]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> StateMetadata:
        m = common_attn_metadata
        sequences, starts = m.num_reqs, m.query_start_loc[: m.num_reqs + 1]
        decodes, prefills, decoded, prefilled = split_decodes_and_prefills(m, decode_threshold=1)
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(m.block_table_tensor, m.seq_lens, self.kv_cache_spec, mode)
        rows, begins, lengths = self.rows[:sequences], self.begins[:sequences], starts.diff()
        rows.copy_(table[:sequences, 0]).masked_fill_(lengths == 0, 0)  # padding has a page that nobody reads
        begins.copy_((m.seq_lens[:sequences] <= lengths) | (lengths == 0))
        parts = []
        if decodes:
            parts.append((slice(decoded), Step(rows[:decodes], begins[:decodes], None)))
        if prefills:
            packing = Packing.of(starts[decodes:] - decoded, prefilled, self.lead)
            tokens = slice(decoded, decoded + prefilled)
            parts.append((tokens, Step(rows[decodes:], begins[decodes:], packing)))
        return StateMetadata(parts)


class StateBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "SAMEBITS_STATE"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


def set_layers(model: nn.Module, vllm_config: Any, hooks: Hooks) -> None:
    """Let all layers of these kinds compute what those of ``transformers`` do."""
    found: list[Any] = [m for m in model.modules() if type(m) in LAYERS]
    if not found:
        return
    config = vllm_config.model_config.hf_text_config
    own = [m for m in without_weights(config).modules() if hasattr(m, "A_log")]
    for layer, by in zip(found, own, strict=True):
        layer.samebits_most = vllm_config.scheduler_config.max_num_seqs
        LAYERS[type(layer)](layer, by)
    module: Any
    for module in model.modules():
        if hasattr(module, "use_fused_qk_norm_rope_gate"):  # a kernel of Qwen3-Next's that rounds otherwise
            module.use_fused_qk_norm_rope_gate = False
    # vLLM asks the model's class how large its pages have to be.
    shapes, dtypes = found[0].get_state_shape(), found[0].get_state_dtype()
    for name, value in (("shape", shapes), ("dtype", dtypes)):
        method = classmethod(lambda cls, vllm_config, value=value: value)
        hooks.replace(type(model), f"get_mamba_state_{name}_from_config", method, "vllm_config")


def _set_layer(layer: Any, forward: Any, own: Any, width: int, channels: int, dtype: torch.dtype) -> None:
    """Let a layer have pages of the layout `own`, and of the last inputs of its convolution."""
    layer.samebits_layout, layer.samebits_inputs = own, (width - 1, channels)
    layer.get_state_shape = lambda: (layer.samebits_inputs, (own.words,))
    layer.get_state_dtype = lambda: (dtype, torch.float32)
    # No checkpoints within a prefill, which Mamba 2's would have: the scheduler lets it end there.
    layer.get_kv_cache_spec = functools.partial(MambaBase.get_kv_cache_spec, layer)
    layer.get_attn_backend = lambda: StateBackend
    layer.forward = functools.partial(forward, layer)


def _parts(layer: Any) -> list[tuple[slice, Step]]:
    """What this layer is to compute in this step; only the memory while vLLM measures that."""
    metadata = get_forward_context().attn_metadata
    found = None if metadata is None else metadata.get(layer.prefix)
    if found is None:
        torch.empty(layer.samebits_most, layer.samebits_layout.words, device=layer.out_proj.weight.device)
        return []
    return found.parts  # type: ignore[no-any-return]


def steps(model: nn.Module, tokens: int, sequences: int) -> Iterator[Callable[[], object]]:
    """Calls of each kind of layer on a GPU, for several numbers of tokens and sequences."""
    layers: list[Any] = [m for m in model.modules() if type(m) in LAYERS]
    sizes = sorted({*(1 << i for i in range(tokens.bit_length())), tokens})
    for layer in {(m.samebits_layout, m.samebits_inputs): m for m in layers}.values():
        shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
        layer.kv_cache = tuple(
            torch.zeros(1, *shape, dtype=dtype, device="cuda")
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        for n in sizes:
            for batch in sorted({min(b, n, sequences) for b in (1, 8, 64, n)}):
                offsets = torch.arange(batch + 1, device="cuda") * n // batch
                packing = None if n == batch else Packing.of(offsets, n, shapes[0][0])
                rows = torch.zeros(batch, dtype=torch.int64, device="cuda")
                yield functools.partial(_run_on_zeros, layer, Step(rows, rows == 0, packing), n)


def _run_on_zeros(layer: Any, step: Step, tokens: int) -> None:
    channels, heads = layer.samebits_inputs[1], layer.samebits_layout.parts[0].shape[0]
    x = torch.zeros(tokens, channels, dtype=layer.get_state_dtype()[0], device="cuda")
    g = torch.zeros(tokens, heads, dtype=torch.float32, device="cuda")
    if type(layer) is MambaMixer2:
        _scanned(layer, step, x, g.to(x.dtype))
    else:
        _decayed(layer, step, x, g, g.to(x.dtype))


# ---- Mamba 2


def _set_mamba2(layer: Any, by: Any) -> None:
    dtype, heads, size = layer.in_proj.weight.dtype, layer.num_heads, layer.head_dim
    own = layout("ssd", heads, layer.ssm_state_size, size, dtype, weighted=True)
    layer.samebits_limit = by.time_step_limit or (0.0, math.inf)
    group = getattr(by.norm, "group_size", layer.intermediate_size)  # Granite's had none before 5.20
    layer.norm.forward = functools.partial(_norm_of_groups, layer.norm, group)
    _set_layer(layer, _mamba2, own, layer.conv_kernel_size, layer.conv_dim, dtype)


def _mamba2(self: Any, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
    projected = self.in_proj(hidden_states)[0]
    if mup_vector is not None:
        projected = projected * mup_vector
    gate, x, dt = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
    out = torch.zeros_like(gate, memory_format=torch.contiguous_format)
    for tokens, step in _parts(self):
        out[tokens] = _scanned(self, step, x[tokens], dt[tokens])
    return self.out_proj(self.norm(out, gate))[0]  # type: ignore[no-any-return]


def _scanned(self: Any, step: Step, x: Tensor, dt: Tensor) -> Tensor:
    inputs, states = self.kv_cache
    weight = self.conv1d.weight.view(self.conv_dim, -1)
    x = convolved(step, x, inputs, weight, self.conv1d.bias, self.activation)
    x, B, C = x.split([self.intermediate_size, *[self.groups_ssm_state_size] * 2], -1)

    options = {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True, "dt_limit": self.samebits_limit}

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial_state: Any, **given: Any) -> Tensor:
        given |= {"initial_states": initial_state, "return_final_states": True, **options}
        return ssd(x, dt, self.A, B, C, **given)[0]

    heads, groups = (self.num_heads, self.head_dim), (self.n_groups, self.ssm_state_size)
    operands = x.unflatten(-1, heads), dt, B.unflatten(-1, groups), C.unflatten(-1, groups)
    return gone_on(step, self.samebits_layout, states, run, *operands).flatten(1)


def _norm_of_groups(self: Any, group: int, x: Tensor, gate: Tensor) -> Tensor:
    """An RMS norm of each group of a gated row, in float32 but for the weight."""
    rows = (x.to(torch.float32) * F.silu(gate.to(torch.float32))).unflatten(-1, (-1, group))
    found: Any = add_rms_norm(rows, None, None, self.variance_epsilon)
    return self.weight * found.flatten(-2).to(x.dtype)  # type: ignore[no-any-return]


# ---- gated delta rules


def _set_delta(layer: Any, by: Any) -> None:
    dtype, heads = layer.out_proj.weight.dtype, layer.num_v_heads
    own = layout("gated_delta_rule", heads, layer.head_k_dim, layer.head_v_dim, dtype)
    _set_layer(layer, _delta, own, layer.conv_kernel_size, layer.conv_dim, dtype)


def _delta(self: Any, hidden_states: Tensor) -> Tensor:
    projected = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    *qkv, z, b, a = self.fix_query_key_value_ordering(*projected)
    x = torch.cat([t.flatten(1) for t in qkv], 1)
    A_log = self.A_log.to(x.dtype)  # a trainer's dtype
    g = -A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    out = torch.zeros_like(z, memory_format=torch.contiguous_format)
    for tokens, step in _parts(self):
        out[tokens] = _decayed(self, step, x[tokens], g[tokens], b.sigmoid()[tokens])
    return self.out_proj(_gated_norm(self.norm, out, z).flatten(1))[0]  # type: ignore[no-any-return]


def _decayed(self: Any, step: Step, x: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    inputs, states = self.kv_cache
    weight = self.conv1d.weight.view(self.conv_dim, -1)
    x = convolved(step, x, inputs, weight, self.conv1d.bias, self.activation)
    q, k, v = x.split([self.key_dim, self.key_dim, self.value_dim], -1)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Tensor:
        given |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return gated_delta_rule(q, k, v, g, beta, **given)[0]

    keys, values = (-1, self.head_k_dim), (-1, self.head_v_dim)
    operands = q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values), g, beta
    return gone_on(step, self.samebits_layout, states, run, *operands)


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """An RMS norm of each head's row, and then its gate."""
    return gated(gate, add_rms_norm(x, None, self.weight.data, self.eps), rounding="once")


LAYERS: dict[type[MambaBase], Any] = {MambaMixer2: _set_mamba2, QwenGatedDeltaNetAttention: _set_delta}
"""What makes a layer of each class ours."""
