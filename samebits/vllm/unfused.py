"""vLLM's Transformers backend (``model_impl="transformers"``) without its fusers.

It runs ``transformers``' own modelling code. Linear layers, head, attention and log-probs are vLLM's, which
other hooks replace. What the backend would fuse rounds otherwise. ``loading.py`` fuses what keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.model_executor.models.transformers import base, fuser
from vllm.model_executor.models.transformers.fusers.moe import MoEBlockFuser

from samebits.engines.hooks import Hooks
from samebits.vllm import mla

__all__ = ["install"]


def install(hooks: Hooks) -> None:
    """Leave modules as they are, but for linear layers, embedding and attention."""
    # It would change the class of the model for the trainer in this process, too. Nothing is compiled.
    hooks.replace(base.Base, "_decorate_for_torch_compile", _nothing, "self")
    # Experts alone are vLLM's then, and these experts.py replaces.
    hooks.replace(MoEBlockFuser, "match", staticmethod(_none), "moe_block", "experts_name")
    if hasattr(fuser, "FUSERS"):
        from vllm.model_executor.models.transformers.fusers import AttentionFuser, MLAFuser, RMSNormFuser

        class Norms(RMSNormFuser):
            """Tells the fuser of latent attention where norms are, and fuses none."""

            def validate(self, module: Any, vllm_config: Any) -> bool:
                return False

        hooks.expect(fuser, "get_fusers", "module")
        # Of the others one says where attention is. The other makes one product of two with the same rows,
        # and hands latent vectors on, if VLLM_MLA_DISABLE=0 asks for it.
        hooks.replace(fuser, "FUSERS", (MLAFuser, Norms, AttentionFuser))
        hooks.replace(base, "replace_layernorm_class", _itself, "layernorm")
        fuser.get_fusers.cache.clear()
        hooks.on_undo(fuser.get_fusers.cache.clear)
    else:  # before 0.27
        hooks.replace(fuser, "get_fuser", _none, "module")
        own = base.Base.create_attention_instances
        hooks.replace(base.Base, "create_attention_instances", _as_modules(own), "self")


def _as_modules(own: Callable[..., dict[int, nn.Module]]) -> Callable[..., dict[int, nn.Module]]:
    """`own`, or layers of latent attention, as modules of the model: ``covered.py`` looks at those."""

    def create_attention_instances(self: Any) -> dict[int, nn.Module]:
        found = mla.instances(self) if self.model_config.use_mla else own(self)
        self.samebits_attention = nn.ModuleDict({str(i): layer for i, layer in found.items()})
        return found

    return create_attention_instances


def _itself(module: Any) -> Any:
    return module


def _none(*args: Any) -> None:
    return None


def _nothing(self: Any, **kwargs: Any) -> None:
    pass
