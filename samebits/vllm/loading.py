"""What happens when vLLM has loaded a model, before it serves: it is checked, and made ready."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from samebits.engines import frequencies
from samebits.engines.hooks import Hooks
from samebits.engines.trainer import TrainerModel
from samebits.fusion import fuse_parts
from samebits.mode import batch_invariant, disable_batch_invariant_mode, enable_batch_invariant_mode
from samebits.mode.calls import outermost
from samebits.vllm import parallel, sampling
from samebits.vllm.covered import check_against, check_model
from samebits.vllm.experts import set_experts
from samebits.vllm.proven import ROUNDED_ONCE
from samebits.vllm.recurrent import set_layers
from samebits.vllm.warmup import warm_up

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Check and prepare every model that is loaded from now on."""
    own = BaseModelLoader.load_model
    hooks.replace(
        *(BaseModelLoader, "load_model", _load(own, hooks)), *("self", "vllm_config", "model_config")
    )
    call = EngineCore.collective_rpc
    hooks.replace(EngineCore, "collective_rpc", _with_reset(call), "self", "method")
    hooks.expect(rotary_embedding, "_ROPE_DICT")
    rotary_embedding._ROPE_DICT.clear()
    hooks.on_undo(rotary_embedding._ROPE_DICT.clear)


def _with_reset(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, after which no cached prefix has keys of old weights."""

    @wraps(own)  # an engine in a process of its own reads the signature
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, method, *args, **kwargs)
        if method in ("reload_weights", "update_weights"):
            self.reset_prefix_cache()
        return found

    return collective_rpc


def _switch_mode(hooks: Hooks) -> None:
    """Turn the mode on in this process, which runs the model. While the model runs, it is "error"."""
    before = outermost.process
    enable_batch_invariant_mode("ignore")
    hooks.on_undo(
        disable_batch_invariant_mode if before is None else partial(enable_batch_invariant_mode, before)
    )


def _load(own: Callable[..., nn.Module], hooks: Hooks) -> Callable[..., nn.Module]:
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        _switch_mode(hooks)
        rotary_embedding._ROPE_DICT.clear()  # models share no tables: they have this one's length
        if model_config.logprobs_mode.startswith("processed"):
            sampling.install_processed(hooks)
        else:
            sampling.install_raw(hooks)
        model = own(self, vllm_config, model_config, *args, **kwargs)
        set_experts(model, model_config.hf_text_config, parallel.contract_of(vllm_config))
        set_layers(model, vllm_config, hooks)
        check_model(model, vllm_config)
        trainer = TrainerModel(model_config.hf_text_config)
        check_against(model, trainer, vllm_config)
        fuse_parts(model)
        parallel.set_contracts(model, vllm_config)
        _set_frequencies(model, model_config)
        _set_norms(model)
        _set_logits(model, trainer)
        if current_platform.is_cuda():
            warm_up(model, vllm_config)
        for name in ("forward", "compute_logits"):
            setattr(model, name, _strict(getattr(model, name)))
        return model

    return load_model


def _strict(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, in which an operator whose rows may depend on the batch is an error.

    Engines make such a call before they serve.
    """

    def strictly(*args: Any, **kwargs: Any) -> Any:
        with batch_invariant("error"):
            return call(*args, **kwargs)

    return strictly


def _set_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(model).__name__ in ROUNDED_ONCE and isinstance(module, RMSNorm):
            module.samebits_rounding = "once"


def _set_logits(model: nn.Module, trainer: TrainerModel) -> None:
    """Let logits be changed after the head as ``transformers`` does."""
    processor = getattr(model, "logits_processor", None)
    if processor is None:
        return
    processor.scale = trainer.option("logit_scale") or 1.0
    processor.soft_cap = trainer.option("final_logit_softcapping")
    divisor = trainer.option("logits_scaling")
    if divisor:  # vLLM would multiply by the inverse, or do nothing
        processor.samebits_divisor = divisor


def _set_frequencies(model: nn.Module, of: Any) -> None:
    frequencies.set_tables(
        *(model, of.hf_text_config, of.max_model_len, RotaryEmbeddingBase),
        lambda layer: (of.dtype, layer.cos_sin_cache.device, layer.rotary_dim // 2),
    )
