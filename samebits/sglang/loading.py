"""What happens when SGLang has loaded a model, before it serves: it is checked, and made ready."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from samebits.engines import frequencies
from samebits.engines.hooks import Hooks
from samebits.engines.trainer import TrainerModel
from samebits.mode import batch_invariant, disable_batch_invariant_mode, enable_batch_invariant_mode
from samebits.mode.calls import outermost
from samebits.sglang.covered import check_against, check_arguments, check_model
from samebits.sglang.experts import set_experts

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Check and prepare every model that is loaded from now on."""
    hooks.replace(ModelRunner, "load_model", _load(ModelRunner.load_model, hooks), "self")
    hooks.expect(factory, "_ROPE_DICT")
    factory._ROPE_DICT.clear()
    hooks.on_undo(factory._ROPE_DICT.clear)


def _switch_mode(hooks: Hooks) -> None:
    """Turn the mode on in this process, which runs the model. While the model runs, it is "error"."""
    before = outermost.process
    enable_batch_invariant_mode("ignore")
    hooks.on_undo(
        disable_batch_invariant_mode if before is None else partial(enable_batch_invariant_mode, before)
    )


def _load(own: Callable[[Any], None], hooks: Hooks) -> Callable[[Any], None]:
    @functools.wraps(own)
    def load_model(self: Any) -> None:
        check_arguments(self.server_args)  # of a ServerArgs that was made before the hooks, too
        _switch_mode(hooks)
        factory._ROPE_DICT.clear()  # models share no tables: they have this one's length
        own(self)
        model, config = self.model, self.model_config.hf_text_config
        length = self.model_config.context_len
        check_model(model, config)
        trainer = TrainerModel(config)
        check_against(model, trainer, length)
        set_experts(model, config)
        weight = next(model.parameters())
        of_tables = weight.dtype, weight.device, None
        frequencies.set_tables(model, config, length, RotaryEmbedding, lambda _: of_tables)
        _set_logits(model.logits_processor, trainer)
        _round_scales(model)
        if self.device == "cuda":
            from samebits.sglang.warmup import warm_up

            warm_up(model, self)
        model.forward = _strict(model.forward)
        model.samebits_checked = True

    return load_model


def _strict(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, in which an operator whose rows may depend on the batch is an error."""

    @functools.wraps(call)
    def strictly(*args: Any, **kwargs: Any) -> Any:
        with batch_invariant("error"):
            return call(*args, **kwargs)

    return strictly


def _set_logits(processor: Any, trainer: TrainerModel) -> None:
    """Let logits be changed after the head as ``transformers`` does: see ``layers.py``."""
    processor.samebits_divisor = trainer.option("logits_scaling") or None
    processor.samebits_soft_cap = trainer.option("final_logit_softcapping")
    processor.final_logit_softcapping = processor.logit_scale = None


def _round_scales(model: nn.Module) -> None:
    """``transformers`` rounds what Gemma 3's embeddings are multiplied by to their dtype."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        scale, weight = getattr(module, "embed_scale", None), getattr(module, "weight", None)
        if isinstance(scale, float) and weight is not None:
            module.embed_scale = float(torch.tensor(scale, dtype=weight.dtype))
