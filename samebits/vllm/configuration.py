"""Reads whether an engine is to have samebits' bits, and sets what it needs for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samebits.engines.hooks import Hooks
from samebits.engines.refusals import RefusedError
from samebits.vllm.asked import options
from samebits.vllm.plugin import enable, plugin, version
from samebits.vllm.proven import NATIVE

__all__ = ["register"]

_watching: list[Hooks] = []


def register() -> None:
    """See :func:`samebits.vllm.register`. Engines that do not ask for samebits get vLLM as it is."""
    if not _watching:
        from vllm.engine.arg_utils import EngineArgs

        hooks = Hooks(f"{plugin.name}: vLLM {version()}")
        for name, wrap in (("create_engine_config", _engine_config), ("create_model_config", _model_config)):
            hooks.replace(EngineArgs, name, wrap(getattr(EngineArgs, name)), "self")
        _watching.append(hooks)
    if plugin.wanted():
        enable(any_version=plugin.allows_any_version())


def _engine_config(own: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = (self.additional_config or {}).get("samebits")
        if asked:
            enable(any_version=options(asked)["any_version"])
        if plugin.hooks is None:
            return own(self, *args, **kwargs)
        from samebits.vllm.covered import check_config

        _set_arguments(self)
        # What the engine says of itself, however it was asked.
        self.additional_config = {**(self.additional_config or {}), "samebits": asked or True}
        config = own(self, *args, **kwargs)
        draft = config.speculative_config
        if draft is not None and draft.method == "draft_model" and draft.attention_backend is None:
            # else vLLM would choose one for it
            draft.attention_backend = config.attention_config.backend
        check_config(config)
        return config

    return create_engine_config


def _model_config(own: Callable[..., Any]) -> Callable[..., Any]:
    """Choose between vLLM's own classes and its Transformers backend."""

    def create_model_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = own(self, *args, **kwargs)
        if plugin.hooks is None or config.model_impl != "auto":
            return config
        if any(name in NATIVE for name in config.architectures):
            return config
        if config.is_hybrid or config.is_attention_free:  # which covered.py refuses
            return config
        self.model_impl = "transformers"
        return own(self, *args, **kwargs)

    return create_model_config


def _set_arguments(args: Any) -> None:
    """Set what is open, and refuse what contradicts."""
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    compilation = args.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        raise RefusedError(
            f"compilation mode {compilation.mode}",
            "compiled code has kernels of its own",
            "do not set it, or give 0",
        )
    compilation.mode = CompilationMode.NONE
    if current_platform.is_cpu():
        return
    asked = args.attention_backend or args.attention_config.backend
    if asked not in (None, AttentionBackendEnum.CUSTOM):
        raise RefusedError(f"attention_backend={asked.name}", "its sums have another order", "do not set it")
    args.attention_config.backend = AttentionBackendEnum.CUSTOM
    args.attention_backend = None
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
